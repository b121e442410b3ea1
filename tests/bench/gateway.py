"""What the gateway takes in, what that costs, what it answers, and what it loses when it is killed.

python tests/bench/gateway.py                                        # all, some 20 minutes on two quiet cores
python tests/bench/gateway.py --requests 2000 --windows 500000 --kills 5 --out /tmp/gateway.json   # a look
"""

import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fleet" / "gateway"))

import gateway_kit as kit
import gateway_load as load
import report

from fleet.device.credentials import DeviceKey
from fleet.gateway import database, duck, parts, rollup
from fleet.gateway.columns import Received, table
from fleet.gateway.compact import compact
from fleet.gateway.parts import Part
from fleet.gateway.queries import Fleet

ROOT = kit.ROOT
_SERVER_CORE, _LOAD_CORE = 0, 1
_WINDOWS, _CONNECTIONS = 45, 16
_DEVICES = 500
_HOUR_MS = 3_600_000
Row = dict[str, Any]


def _row(what: str, value: float, unit: str, n: str, target: str = "") -> Row:
    return {"what": what, "value": value, "unit": unit, "n": n, "target": target}


def _on_core() -> None:
    os.sched_setaffinity(0, {_SERVER_CORE})


def _enrolled(folder: Path, count: int) -> list[str]:
    """Private keys of devices that are enrolled, in hex."""
    keys = [load.new_key() for _ in range(count)]
    connection = database.opened(folder)
    connection.execute("BEGIN")
    for key in keys:
        device = DeviceKey(bytes.fromhex(key))
        connection.execute(
            "INSERT INTO devices(device, public_key, model, enrolled_ms) VALUES(?, ?, 'bench', 0)",
            (device.device, device.public),
        )
    connection.execute("COMMIT")
    connection.close()
    return keys


def _loaded(port: int, process: int, keys: list[str], *, bodies: int, windows: int) -> Row:
    """Numbers of one run of the load generator in a process of its own."""
    given = {
        "port": port,
        "keys": keys,
        "bodies": bodies,
        "windows": windows,
        "connections": _CONNECTIONS,
        "core": _LOAD_CORE,
    }
    child = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/bench/gateway_load.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(given) + "\n")
    child.stdin.flush()
    child.stdout.readline()
    before_s = _cpu_s(process)
    child.stdin.write("go\n")
    child.stdin.flush()
    result = json.loads(child.stdout.readline())
    cpu_s = _cpu_s(process) - before_s
    child.wait()
    latencies = sorted(result["latencies_s"])
    count = len(latencies)
    assert count == bodies * len(keys), result["refused"]
    return {
        "requests": count,
        "windows_per_s": count * windows / result["seconds"],
        "windows_per_cpu_s": count * windows / cpu_s,
        "p50_ms": latencies[count // 2] * 1e3,
        "p99_ms": latencies[int(count * 0.99)] * 1e3,
        "body_bytes_per_window": result["body_bytes"] / windows,
    }


def _cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mb(process: int) -> float:
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def ingest(folder: Path, requests: int) -> list[Row]:
    """Batches, single windows, and batches while it compacts: the gateway has one core."""
    rows = []
    for name, windows, every_s in (
        ("batches of 45", _WINDOWS, 0.0),
        ("single windows", 1, 0.0),
        ("batches of 45, compacting on the same core", _WINDOWS, 2.0),
    ):
        state = folder / f"ingest{len(rows)}"
        with kit.gateway(state, compact_every_s=every_s, preexec=_on_core) as running:
            keys = _enrolled(state, _DEVICES)
            bodies = max(1, requests // _DEVICES)
            done = _loaded(running.port, running.process.pid, keys, bodies=bodies, windows=windows)
        n = f"{done['requests']} requests"
        target = ">= 10,000" if windows == _WINDOWS and not every_s else ""
        rows += [
            _row(f"{name}: windows a second", done["windows_per_s"], "1/s", n, target),
            _row(f"{name}: windows a second of CPU", done["windows_per_cpu_s"], "1/s", n),
            _row(f"{name}: P50 of the acknowledgement", done["p50_ms"], "ms", n),
            _row(f"{name}: P99 of the acknowledgement", done["p99_ms"], "ms", n),
            _row(f"{name}: bytes on the wire a window", done["body_bytes_per_window"], "B", n),
        ]
        shutil.rmtree(state)
    return rows


def peer(folder: Path, requests: int) -> list[Row]:
    """The same load on a plain FastAPI + SQLite service."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/bench/gateway_peer.py"), str(folder / "peer.sqlite"), str(port)],
        preexec_fn=_on_core,  # noqa: PLW1509  # before any thread runs there
    )
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.1)
        keys = [load.new_key() for _ in range(_DEVICES)]
        done = _loaded(port, process.pid, keys, bodies=max(1, requests // _DEVICES), windows=_WINDOWS)
    finally:
        process.terminate()
        process.wait()
    n = f"{done['requests']} requests"
    return [
        _row("peer, plain FastAPI + SQLite: windows a second", done["windows_per_s"], "1/s", n),
        _row("peer, plain FastAPI + SQLite: P99 of the acknowledgement", done["p99_ms"], "ms", n),
    ]


def memory(folder: Path, devices: int) -> list[Row]:
    """Resident memory before any device, and after each of many has sent a batch."""
    state = folder / "memory"
    with kit.gateway(state, compact_every_s=0) as running:
        before = _rss_mb(running.process.pid)
        keys = _enrolled(state, devices)
        _loaded(running.port, running.process.pid, keys, bodies=1, windows=5)
        after = _rss_mb(running.process.pid)
    shutil.rmtree(state)
    return [
        _row("memory of the gateway, started", before, "MiB", "1"),
        _row("memory after every device has sent a batch", after, "MiB", f"{devices} devices"),
    ]


def percentiles(folder: Path, windows: int) -> list[Row]:
    """P50, P95, P99 of latency by release, tier and day over many windows: from roll-ups and raw."""
    state = folder / "queries"
    written_s = _written(state, windows)
    fleet, rows = Fleet(state), []
    for name, raw, target in (("roll-ups", False, "< 2"), ("raw windows", True, "< 20")):
        times, answers = [], []
        for _ in range(3):
            started = time.perf_counter()
            answers.append(
                fleet.percentiles(
                    "latency_ms",
                    by=("release", "tier", "device_model"),
                    raw=raw,
                    threads=os.cpu_count() or 1,
                )
            )
            times.append(time.perf_counter() - started)
        assert sum(group.count for group in answers[0]) == windows * 100
        rows.append(
            _row(f"percentiles from {name}, median of 3", sorted(times)[1], "s", f"{windows} windows", target)
        )
    size = sum(f.stat().st_size for f in (state / parts.FOLDER / "windows").rglob("*.parquet"))
    rows.append(_row("columns of the question on disk, a window", size / windows, "B", f"{windows} windows"))
    print(f"generated in {written_s:.0f} s")
    shutil.rmtree(state)
    return rows


def _written(state: Path, windows: int) -> float:
    """Parts as compaction makes them, of 20,000 distinct windows repeated over 30 days."""
    started, distinct = time.perf_counter(), 20_000
    connection = database.opened(state)
    rng = random.Random(3)
    base = []
    for k in range(distinct):
        one = kit.window(k, end_ms=0)
        environment = replace(
            one.environment, tier=("high", "mid", "low")[k % 3], device_model=f"model {rng.randrange(20)}"
        )
        base.append(Received("d", 0, replace(one, environment=environment)))
    columns = ["end_ms", "release", "model", "tier", "device_model", "backend", "latency_ms"]
    rows = pa.concat_tables(
        [table(base[at : at + 2_000]).select(columns) for at in range(0, distinct, 2_000)]
    ).combine_chunks()
    for number in range(-(-windows // distinct)):
        first_ms = 1_790_000_000_000 + number % 720 * _HOUR_MS
        part = rows.set_column(0, "end_ms", pa.array([first_ms] * distinct, pa.int64()))
        part = part.slice(0, min(distinct, windows - number * distinct))
        _write_parts(connection, state, part, number + 1)
    connection.close()
    return time.perf_counter() - started


def _write_parts(connection: Any, state: Path, rows: Any, number: int) -> None:
    made = []
    date = time.strftime("%Y-%m-%d", time.gmtime(rows["end_ms"][0].as_py() / 1000))
    with duck.confined(state) as analytics:
        analytics.register("windows", rows)
        selects = {"buckets": rollup.buckets_sql("windows", ("latency_ms",))} | {
            f"windows {tier}": f"SELECT * EXCLUDE (tier) FROM windows WHERE tier = '{tier}'"
            for tier in ("high", "mid", "low")
        }
        for name, sql in selects.items():
            kind, _, tier = name.partition(" ")
            path = parts.part_path(kind, date, tier, number, number)  # type: ignore[arg-type]
            made_of = analytics.sql(sql).to_arrow_table()
            target = state / path
            target.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(made_of, target, compression="zstd")
            made.append(Part(path=path, kind=kind, date=date, tier=tier, rows=made_of.num_rows))  # type: ignore[arg-type]
    connection.execute("BEGIN")
    parts.add(connection, made)
    connection.execute("COMMIT")


def kills(folder: Path, times: int) -> list[Row]:
    """kill -9 at random moments under load, while it compacts: what is lost or doubled afterwards."""
    state, rng, windows = folder / "kills", random.Random(), 15
    acknowledged: set[tuple[int, int]] = set()
    devices, lost, doubled, mid_load = None, 0, 0, 0
    for number in range(times):
        with kit.gateway(state, compact_every_s=0.3) as running:
            devices = devices or [running.client() for _ in range(8)]
            bodies = _numbered(number, windows)
            wire = [
                (d, b, load.signed(device.key, bodies[b])) for b in bodies for d, device in enumerate(devices)
            ]
            timer = threading.Timer(rng.uniform(0.05, 1.5), running.kill)
            timer.start()
            result = asyncio.run(load.run(running.port, wire, 8))
            timer.join()
        mid_load += bool(result.refused)
        acknowledged |= set(result.acknowledged)
        found = kit.windows_in(state)
        doubled += sum(count > 1 for count in found.values())
        for d, b in acknowledged:
            names = ((devices[d].key.device, load.FIRST + b * windows + k) for k in range(windows))
            lost += sum(found[name] != 1 for name in names)
        compact(state)
    n = f"{times} kills, {mid_load} of them before all was sent, {len(acknowledged)} batches acknowledged"
    shutil.rmtree(state)
    return [
        _row("acknowledged windows lost by kill -9", lost, "windows", n, "0"),
        _row("windows stored twice after kill -9", doubled, "windows", n, "0"),
    ]


def _numbered(number: int, windows: int) -> dict[int, bytes]:
    """60 batches with numbers of their own for this round."""
    made = load.bodies(60, windows, first=number * 60)
    return {number * 60 + k: body for k, body in enumerate(made)}


def main() -> None:
    """Measure all, write docs/results/gateway.{json,md}."""
    asked_for = report.parser(__doc__)
    asked_for.add_argument("--requests", type=int, default=20_000, help="of each ingest run")
    asked_for.add_argument("--devices", type=int, default=10_000, help="for the memory")
    asked_for.add_argument("--windows", type=int, default=10_000_000, help="for the percentiles")
    asked_for.add_argument("--kills", type=int, default=100)
    asked_for.add_argument("--out", type=Path, default=report.FOLDER / "gateway.json")
    given = asked_for.parse_args()
    rows: list[Row] = []
    steps: tuple[tuple[Callable[[Path, int], list[Row]], int], ...] = (
        (ingest, given.requests),
        (peer, given.requests // 4),
        (memory, given.devices),
        (percentiles, given.windows),
        (kills, given.kills),
    )
    conditions = report.conditions(
        server="one core, pinned; the load generator on the other",
        connections=_CONNECTIONS,
        devices=_DEVICES,
        transport="HTTP on the loopback, without TLS",
        percentile_data="20,000 distinct windows repeated; DuckDB on all cores",
        load_average_at_the_start=round(os.getloadavg()[0], 1),
    )
    with tempfile.TemporaryDirectory(prefix="gateway-bench-", dir=os.environ.get("TMPDIR")) as folder:
        for step, count in steps:
            if count:
                rows += step(Path(folder), count)
                print(*rows[-3:], sep="\n", flush=True)
    command = "python tests/bench/gateway.py"
    if (arguments := sys.argv[1:]) and "--out" not in arguments:
        command += " " + " ".join(arguments)
    report.write(
        given.out,
        {
            "title": "Gateway: what it takes in, and what a kill costs",
            "command": command,
            "text": "Signed requests, each window validated, durable (SQLite, synchronous=FULL)"
            " before the answer. The peer stores a row a window, checks nothing and is as durable.",
            "conditions": conditions,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
