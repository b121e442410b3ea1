"""What the monitor costs an inference, beside what other recorders cost, and what a window weighs.

python tests/bench/monitor.py [--model models/mnn/mbv3s-p30-i8-r48/model.mnn] [--rounds 20]
"""

import gc
import gzip
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from prometheus_client import CollectorRegistry, Counter, Histogram
from report import FOLDER, conditions, parser, write

from fleet.device.credentials import DeviceKey
from fleet.device.engine import Session
from fleet.device.monitor import Monitor
from fleet.device.monitor.encoding import encode_batch
from fleet.device.sensors import Reading
from fleet.device.wire import Environment, Versions

CALLS = 2000  # of one contender in one round
PACE_US = 200.0  # between paced calls: what an inference of 0.2 ms leaves the caches in
VERSIONS = Versions(
    release=12, model="mbv3s-digits-9", engine="3.6.1", config="t2-low-normal", monitor="0.1.0", app="2.4.1"
)
ENVIRONMENT = Environment(
    device_model="Pixel 6", os="Android 14", network="wifi", charging=True, backend="CPU", driver="",
    tier="mid", variant="mbv3s-p30-i8-r48",
)  # fmt: skip
Record = Callable[[float], None]


class NoisySensors:
    """Readings that differ, so that their histograms weigh what real ones do."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(1)

    def read(self) -> Reading:
        """One reading with all values."""
        return Reading(
            temperature_c=round(float(self._rng.normal(34, 1)), 1),
            battery_percent=87.0,
            charging=True,
            network="wifi",
            memory_mb=118.0 + int(self._rng.integers(800)) / 256,
            cpu_percent=round(float(self._rng.uniform(30, 60)), 1),
            power_w=round(float(self._rng.normal(1.9, 0.2)), 2),
        )


def open_monitor(folder: Path) -> Monitor:
    key = DeviceKey(bytes(32))
    return Monitor(folder, key, None, versions=VERSIONS, environment=ENVIRONMENT, sensors=NoisySensors())


def by_monitor(monitor: Monitor) -> Record:
    record = monitor.record
    return lambda latency_ms: record(latency_ms, 0.93, 3, 118.7, 52.1)


def by_prometheus() -> Record:
    registry = CollectorRegistry()
    latency = Histogram("latency_ms", "", registry=registry)
    inferences = Counter("inferences", "", registry=registry)

    def record(latency_ms: float) -> None:
        latency.observe(latency_ms)
        inferences.inc()

    return record


def by_opentelemetry() -> Record:
    view = View(instrument_name="latency_ms", aggregation=ExponentialBucketHistogramAggregation())
    provider = MeterProvider(metric_readers=[InMemoryMetricReader()], views=[view])
    latency = provider.get_meter("bench").create_histogram("latency_ms", unit="ms")
    return latency.record


def time_calls(record: Record, pace_us: float) -> list[float]:
    """Microseconds of each of CALLS calls, the clock's own time taken off."""
    clock, took = time.perf_counter_ns, []
    empty = -statistics.median(clock() - clock() for _ in range(1000))
    for index in range(CALLS):
        resume = clock() + pace_us * 1e3
        while clock() < resume:
            pass
        value = 20.0 + index % 17
        start = clock()
        record(value)
        took.append((clock() - start - empty) / 1e3)
    return took


def compare_recorders(rounds: int, pace_us: float) -> dict[str, list[float]]:
    """Samples of each recorder, interleaved round by round in alternating order."""
    with tempfile.TemporaryDirectory() as folder, open_monitor(Path(folder)) as monitor:
        recorders = {
            "Monitor.record (5 measures)": by_monitor(monitor),
            "prometheus_client Histogram.observe + Counter.inc": by_prometheus(),
            "OpenTelemetry SDK histogram.record": by_opentelemetry(),
            "nothing (a Python call)": lambda _: None,
        }
        samples: dict[str, list[float]] = {name: [] for name in recorders}
        for turn in range(rounds):
            for name in list(recorders)[:: 1 if turn % 2 else -1]:
                samples[name] += time_calls(recorders[name], pace_us)
                time.sleep(0.15)  # the worker empties the ring: each round begins alike
    return samples


def share_of_inference(model: Path, rounds: int) -> dict[str, Any]:
    """Wall and CPU time of inferences with the monitor over that without, ABBA, as ratios of each pair."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_monitor(Path(folder)) as monitor,
        Session(model) as session,
    ):
        record = by_monitor(monitor)
        name, spec = next(iter(session.inputs.items()))
        feeds = {name: np.random.default_rng(0).random(spec.shape, dtype=np.float32)}

        def run(*, monitored: bool, n: int = 1500) -> tuple[float, float]:
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(n):
                start = time.perf_counter()
                session.run(feeds)
                if monitored:
                    record((time.perf_counter() - start) * 1e3)
            return (time.perf_counter() - wall) / n, (time.process_time() - cpu) / n

        run(monitored=True)
        walls, cpus, inference = [], [], []
        for turn in range(rounds):
            order = (True, False) if turn % 2 else (False, True)
            got = {monitored: run(monitored=monitored) for monitored in order}
            walls.append(got[True][0] / got[False][0] - 1)
            cpus.append(got[True][1] / got[False][1] - 1)
            inference.append(got[False][0] * 1e3)
            monitor.flush()
    return {
        "inference_ms": statistics.median(inference),
        "wall_share": statistics.median(walls),
        "cpu_share": statistics.median(cpus),
        "wall_shares": walls,
        "cpu_shares": cpus,
    }


def weigh_windows(classes: int) -> dict[str, float]:
    """Bytes of 45 windows of realistic spread, as JSON, compressed alone, and compressed as a batch."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        with open_monitor(Path(folder)) as monitor:
            for index in range(4500):
                monitor.record(
                    float(rng.lognormal(3.3, 0.2)),
                    float(1 - rng.beta(1, 8)),
                    int(rng.integers(classes)),
                    float(rng.normal(120, 20)),
                    float(rng.normal(50, 8)),
                )
                if index % 100 == 0:
                    time.sleep(0.11)
        paths = sorted((Path(folder) / "windows").iterdir())
        windows = [path.read_bytes().partition(b"\n")[2] for path in paths]
    return {
        "json": statistics.median(map(len, windows)),
        "gzip": statistics.median(len(gzip.compress(encode_batch([window], 1), 6)) for window in windows),
        "batch": len(gzip.compress(encode_batch(windows, 1), 6)) / len(windows),
        "windows": len(windows),
    }


def row(what: str, samples: list[float], budget: str = "") -> dict[str, Any]:
    ordered = np.sort(samples)
    rank = [float(ordered[int(np.ceil(q * len(ordered))) - 1]) for q in (0.5, 0.99, 0.999)]
    p50, p99, p999 = rank
    return {"what": what, "median": p50, "P99": p99, "P99.9": p999, "n": len(samples), "budget": budget}


def single(what: str, value: float, n: int, budget: str = "") -> dict[str, Any]:
    return {"what": what, "median": value, "P99": "", "P99.9": "", "n": n, "budget": budget}


def main() -> None:
    asked_for = parser(__doc__)
    asked_for.add_argument("--model", type=Path, default=Path("models/mnn/mbv3s-p30-i8-r48/model.mnn"))
    asked_for.add_argument("--rounds", type=int, default=20)
    arguments = asked_for.parse_args()
    before = conditions()
    gc.disable()
    rows = []
    for pace_us, said in ((0.0, "back to back"), (PACE_US, "every 0.2 ms")):
        for name, samples in compare_recorders(arguments.rounds, pace_us).items():
            budget = "median <= 2 us" if name.startswith("Monitor") else ""
            rows.append(row(f"us: {name}, {said}", samples, budget))
    for classes in (10, 100):
        weights = weigh_windows(classes)
        n, said = int(weights["windows"]), f"{classes} classes"
        rows.append(single(f"bytes: a window as JSON, {said}", weights["json"], n))
        rows.append(single(f"bytes: a window alone, gzip, {said}", weights["gzip"], n, "<= 1024"))
        rows.append(single(f"bytes: a window in a batch of 45, gzip, {said}", weights["batch"], n, "<= 1024"))
    share = share_of_inference(arguments.model, arguments.rounds)
    for kind, text in (("wall", "time of the inference loop"), ("cpu", "CPU of the whole process")):
        rows.append(single(f"share: monitor of {text}", share[f"{kind}_share"], arguments.rounds))
    cpu_us = share["cpu_share"] * share["inference_ms"] * 1e3
    rows.append(single("us: CPU of the monitor for an inference, from that share", cpu_us, arguments.rounds))
    rows.append(single("ms: an inference without the monitor", share["inference_ms"], arguments.rounds))
    record = {
        "title": "What the monitor costs",
        "command": "python tests/bench/monitor.py",
        "text": TEXT,
        "conditions": before
        | {"rounds": arguments.rounds, "calls a round": CALLS, "model": arguments.model.parent.name},
        "rows": rows,
        "share_of_inference": share,
    }
    write(FOLDER / "monitor.json", record)


TEXT = """\
Recorders take turns round by round, forth and back, in one process; each call is timed alone and the time of
the clock taken off. `Monitor.record` takes five measures a call, the others one. Paced calls come from a
caller that spins in Python between them: the monitor's worker, which drains the ring meanwhile, closes a
window every hundred records and writes each to the disk with fsync, competes with it for the interpreter's
lock as it does in the worst of apps. Python's garbage collector is off. A window holds 100 inferences with
spread-out values and all sensors; the more classes, the more it weighs. Shares are of an inference loop
without a pause, which no camera does: median of the ratios of neighbouring runs with and without the monitor;
CPU holds the worker and its writes."""


if __name__ == "__main__":
    main()
