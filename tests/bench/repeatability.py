"""How far ten measurements of one model are apart: measured as people do, and with the benchmark's protocol.

    python tests/bench/repeatability.py    # in a workspace that has been built

Both kinds take turns, so that they meet the same load: first with the host left alone, then beside processes
that only compute.
"""

import contextlib
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from report import FOLDER, conditions, parser, write

from fleet.device.engine import ENGINE_VERSION, Session
from fleet.lab.local import LocalDevice
from fleet.lab.measurement import Measurement, summarize
from fleet.lab.schedule import Job, measure

REPEATS = 10
NAIVE_INFERENCES = 10
QUERIES, ROUNDS = 500, 4
NAIVE = {
    f"mean of {NAIVE_INFERENCES}": statistics.mean,
    f"median of {NAIVE_INFERENCES}": statistics.median,
}
Naive = list[list[list[float]]]
"""Milliseconds: per repeat, per model, per inference."""
Careful = list[list[Measurement]]
"""Per repeat, per model."""
KINDS = ("p0-fp32", "p30-i8")
"""Of the variants, the largest and the smallest."""

CORES_COUNT = os.cpu_count() or 1
HOSTS = {"left alone": 0, f"{2 * CORES_COUNT} busy processes": 2 * CORES_COUNT}
"""What else runs meanwhile: the number of processes that only compute."""

_TEXT = (
    f"Each row is {REPEATS} measurements of one thing, one after the other on one thread."
    f" `mean of {NAIVE_INFERENCES}` is what a quick script does: open the model, run it {NAIVE_INFERENCES}"
    f" times, divide; `median of {NAIVE_INFERENCES}` is of the same inferences. `protocol` is"
    f" `edgeloop bench`: warm-up, {QUERIES} samples from {ROUNDS} fresh processes, both models in turns; P50,"
    " and P50 over P50 in the same round, the median of the rounds. The two kinds took turns, too. `host`"
    f" says what else ran on its {CORES_COUNT} cores. `deviation` is the standard deviation over the mean;"
    " `flagged` is how many the protocol itself called not valid."
)


@contextlib.contextmanager
def busy(processes_count: int) -> Iterator[None]:
    """So many other processes that only compute, while the block runs."""
    spinners = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(processes_count)]
    for spinner in spinners:
        spinner.start()
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.join()


def _spin() -> None:
    while True:
        sum(range(1_000_000))


def naive_ms(model: Path) -> list[float]:
    """Open the model and run it ten times at once: in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", str(model)],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return [float(text) for text in done.stdout.split()]


def naive_child(model: Path) -> None:
    """What `naive_ms` runs."""
    with Session(model) as session:
        feeds = {name: np.zeros(spec.shape, np.float32) for name, spec in session.inputs.items()}
        for _ in range(NAIVE_INFERENCES):
            start = time.perf_counter()
            session.run(feeds)
            print((time.perf_counter() - start) * 1e3)


def protocol(models: list[Path]) -> list[Measurement]:
    """The models interleaved, as `edgeloop bench` does."""
    jobs = [Job(model=model) for model in models]
    return [summarize(runs) for runs in measure(LocalDevice(), jobs, queries=QUERIES, rounds=ROUNDS)]


def row(host: str, what: str, how: str, values: list[float], flagged: int | str) -> dict[str, Any]:
    """How far ten numbers are apart."""
    middle = statistics.median(values)
    return {
        "host": host,
        "what": what,
        "how": how,
        "median": middle,
        "least": min(values),
        "most": max(values),
        "most / least": max(values) / min(values),
        "deviation, %": 100 * statistics.stdev(values) / statistics.mean(values),
        "flagged": flagged,
    }


def rows_of(host: str, names: list[str], naive: Naive, careful: Careful) -> list[dict[str, Any]]:
    """The table's rows for one state of the host."""
    rows = []
    for index, name in enumerate(names):
        measured = [measurements[index] for measurements in careful]
        flagged = f"{sum(bool(m.flags) for m in measured)} of {REPEATS}"
        for how, of in NAIVE.items():
            rows.append(row(host, f"{name}, ms", how, [of(samples[index]) for samples in naive], "-"))
        rows.append(row(host, f"{name}, ms", "protocol, P50", [m.p50_ms for m in measured], flagged))
    ratio = f"{KINDS[1]} / {KINDS[0]}"
    flagged = f"{sum(any(m.flags for m in measured) for measured in careful)} of {REPEATS}"
    for how, of in NAIVE.items():
        rows.append(row(host, ratio, how, [of(small) / of(large) for large, small in naive], "-"))
    by_rounds = [_ratio(large, small) for large, small in careful]
    return [*rows, row(host, ratio, "protocol, by rounds", by_rounds, flagged)]


def main() -> None:
    """Measure in turns and write the result."""
    folders = [next(Path("models/mnn").glob(f"*-{kind}-*")) for kind in KINDS]
    models = [folder / "model.mnn" for folder in folders]
    before = conditions()["load_average_1min"]
    rows: list[dict[str, Any]] = []
    samples: dict[str, Any] = {}
    seen = {}
    for host, processes_count in HOSTS.items():
        naive: Naive = []
        careful: Careful = []
        with busy(processes_count):
            for repeat in range(REPEATS):
                naive.append([naive_ms(model) for model in models])
                careful.append(protocol(models))
                print(f"{host}: {repeat + 1}/{REPEATS}", file=sys.stderr, flush=True)
        rows += rows_of(host, [folder.name for folder in folders], naive, careful)
        loads = [m.load_avg_1min for measured in careful for m in measured]
        seen[host] = f"load {min(loads):.1f} to {max(loads):.1f}, flags: {_flags(careful)}"
        samples[host] = {
            "naive_ms": naive,
            "protocol_p50_ms": [[m.p50_ms for m in measured] for measured in careful],
            "protocol_p99_ms": [[m.p99_ms for m in measured] for measured in careful],
            "protocol_flags": [[list(m.flags) for m in measured] for measured in careful],
        }
    write(
        FOLDER / "repeatability.json",
        {
            "title": "How far ten measurements of one model are apart",
            "command": "python tests/bench/repeatability.py",
            "text": _TEXT,
            "conditions": conditions(load_average_before=before, engine=ENGINE_VERSION, **seen),
            "rows": rows,
            "samples": samples,
        },
    )


def _ratio(large: Measurement, small: Measurement) -> float:
    pairs = zip(small.round_p50_ms, large.round_p50_ms, strict=True)
    return statistics.median(a / b for a, b in pairs)


def _flags(careful: Careful) -> str:
    raised = [flag for measured in careful for m in measured for flag in m.flags]
    return ", ".join(f"{flag} {raised.count(flag)}" for flag in sorted(set(raised))) or "none"


if __name__ == "__main__":
    asked = parser(__doc__)
    asked.add_argument("--child", type=Path, help="run a model a few times; the benchmark does so")
    model = asked.parse_args().child
    main() if model is None else naive_child(model)
