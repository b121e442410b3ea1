"""A real gateway in a process of its own, and devices that speak to it: for tests and the benchmark."""

import asyncio
import base64
import fcntl
import gzip
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq

from fleet.device.credentials import DeviceKey
from fleet.device.histogram import Histogram
from fleet.device.wire import (
    SCHEMA,
    Batch,
    Environment,
    Loss,
    Performance,
    Quality,
    Resource,
    Versions,
    Window,
)
from fleet.gateway import batch, database, parts, serve
from fleet.gateway.limits import Limits

ROOT = Path(__file__).resolve().parents[3]
FAST = Limits(requests_per_s=1e4, requests_burst=100_000, enrolments_per_s=1e4, enrolments_burst=100_000)
"""Bounds that a test of something else does not meet."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def window(sequence: int, rng: np.random.Generator | None = None, *, end_ms: int | None = None) -> Window:
    """A window of 100 inferences as a phone would send it; the same for the same generator state."""
    rng = rng or np.random.default_rng(sequence)
    end_ms = now_ms() if end_ms is None else end_ms
    of = Histogram.of
    return Window(
        sequence=sequence,
        boot="0123456789abcdef",
        start_ms=end_ms - 6_667,
        end_ms=end_ms,
        uptime_ms=1_000 + sequence % 10_000 * 6_667,
        versions=Versions(release=3, model="3", engine="3.6.1", config="c1", monitor="1", app="1.2.0"),
        performance=Performance(
            inferences=100,
            failures=0,
            skipped_frames=2,
            throughput_hz=14.9,
            latency_ms=of(rng.lognormal(3, 0.3, 100)),
        ),
        resource=Resource(
            memory_mb=of(rng.normal(180, 3, 100)),
            cpu_percent=of(rng.normal(60, 8, 100)),
            temperature_c=of(rng.normal(36, 0.5, 7)),
            battery_percent=of(np.full(7, 81.0)),
        ),
        quality=Quality(
            confidence=of(rng.beta(8, 1, 100)),
            input_mean=of(rng.normal(120, 15, 100)),
            input_std=of(rng.normal(50, 8, 100)),
            classes={str(k): 10 for k in range(10)},
        ),
        environment=Environment(
            device_model="Pixel 7",
            os="Android 14",
            network="wifi",
            charging=True,
            backend="CPU",
            driver="",
            tier="mid",
            variant="mbv3s-p30-i8-r48",
        ),
        loss=Loss(overwritten_records=1),
        anomalies={"latency": 2},
    )


def batch_of(windows: list[Window], *, schema: int = SCHEMA) -> bytes:
    """The JSON of a batch."""
    return msgspec.json.encode(Batch(schema=schema, sent_ms=now_ms(), windows=tuple(windows)))


def with_tier(one: Window, tier: str) -> Window:
    return replace(one, environment=replace(one.environment, tier=tier))


def run(coroutine: Any) -> Any:
    """asyncio.run in a thread of its own: a browser of the same session keeps a loop running in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


@dataclass
class Answer:
    """What a server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """Of its error, which is well-formed."""
        error = self.json()["error"]
        assert {"code", "got", "allowed", "next_step"} <= set(error), error
        return str(error["code"])


@dataclass
class Client:
    """A device."""

    port: int
    key: DeviceKey = field(default_factory=lambda: DeviceKey(secrets.token_bytes(32)))
    timeout_s: float = 60.0

    def send(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout_s)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            content = response.read()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, content)
        finally:
            connection.close()

    def enrolment(self, token: str, device_model: str = "Pixel 7") -> bytes:
        key = base64.b64encode(self.key.public).decode()
        return json.dumps({"token": token, "public_key": key, "device_model": device_model}).encode()

    def enrol(self, token: str) -> Answer:
        return self.send("POST", "/v1/enrol", self.enrolment(token))

    def signed(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        *,
        time_ms: int | None = None,
    ) -> Answer:
        """A signed request."""
        at = now_ms() if time_ms is None else time_ms
        return self.send(
            method, path, body, {**self.key.headers(method, path, body, time_ms=at), **(headers or {})}
        )

    def upload(self, content: bytes) -> Answer:
        """A batch, compressed."""
        return self.signed("POST", "/v1/windows", gzip.compress(content, 6), {"Content-Encoding": "gzip"})


_SERVE = """
import json, sys
from pathlib import Path
from fleet.gateway.limits import Limits
from fleet.gateway.serve import serve
given = json.loads(sys.argv[1])
paths = ("folder", "repository", "certfile", "keyfile", "classifier")
given |= {name: Path(given[name]) for name in paths if given.get(name)}
sys.exit(serve(**given | {"limits": Limits(**given["limits"])}))
"""


@dataclass
class Running:
    """A gateway's process."""

    process: subprocess.Popen[str]
    port: int
    folder: Path

    def client(self) -> Client:
        """A device that is enrolled."""
        made = Client(self.port)
        (token,) = serve.token(self.folder)
        assert made.enrol(token).status == 201
        return made

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def gateway(folder: Path, *, limits: Limits = FAST, preexec: Any = None, **options: Any) -> Iterator[Running]:
    """A gateway on a free port of the loopback, for the block."""
    given = {"folder": str(folder), "port": 0, "limits": asdict(limits)} | {
        name: str(value) if isinstance(value, Path) else value for name, value in options.items()
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE, json.dumps(given)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        preexec_fn=preexec,  # noqa: PLW1509  # limits of the child, set before any thread runs there
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("edgeloop gateway: http"), line
        yield Running(process, int(line.rstrip().rstrip("/").rpartition(":")[2]), folder)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def windows(folder, device):
    """A device's windows that wait for compaction, by their numbers, as often as they are there."""
    connection = database.reader(folder)
    rows = connection.execute(
        "SELECT taken, body FROM batches JOIN devices ON number = batches.device WHERE devices.device = ?",
        (device,),
    ).fetchall()
    connection.close()
    found = (
        window
        for taken, body in rows
        for window in batch.decode_windows(gzip.decompress(body), array("H", taken).tolist())
    )
    return sorted(found, key=lambda window: window.sequence)


def stored(folder, device):
    """Their numbers."""
    return [window.sequence for window in windows(folder, device)]


def windows_in(folder):
    """(device, sequence) of every window, in Parquet or waiting, as often as it is there."""
    with (folder / "compact.lock").open("w") as lock:  # a compaction outlives the gateway that was killed
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _windows_in(folder)


def _windows_in(folder):
    connection = database.opened(folder)
    files = [folder / part.path for part in parts.live(connection, "windows")]
    (through,) = connection.execute("SELECT value FROM progress").fetchone()
    connection.execute("DELETE FROM batches WHERE id <= ?", (through,))
    connection.close()
    found = Counter()
    for file in files:
        rows = pq.ParquetFile(file).read(columns=["device", "sequence"]).to_pydict()
        found.update(zip(rows["device"], rows["sequence"], strict=True))
    for device in serve.devices(folder):
        found.update((device.device, sequence) for sequence in stored(folder, device.device))
    return found
