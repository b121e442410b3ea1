"""How far ten measurements of one model are apart: measured as people do, and with the benchmark's protocol.

    python tests/bench/repeatability.py    # in a workspace that has been built

Both kinds take turns, so that they meet the same load.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import FOLDER, conditions, write

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
KINDS = ("p0-fp32", "p30-i8")
"""Of the variants, the largest and the smallest."""

_TEXT = (
    f"Each row is {REPEATS} measurements of one thing, one after the other on one thread."
    f" `mean of {NAIVE_INFERENCES}` is what a quick script does: open the model, run it {NAIVE_INFERENCES}"
    f" times, divide; `median of {NAIVE_INFERENCES}` is of the same inferences. `protocol` is"
    f" `edgeloop bench`: warm-up, {QUERIES} samples from {ROUNDS} fresh processes, both models in turns; P50,"
    " and P50 over P50 in the same round, the median of the rounds. The two kinds took turns, too."
    " `deviation` is the standard deviation over the mean; `flagged` is how many the protocol itself called"
    " not valid: the load says how busy the machine was with other work."
)


def naive_ms(model: Path) -> list[float]:
    """Open the model and run it ten times at once: in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, str(model)], check=True, capture_output=True, text=True, timeout=600
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


def row(what: str, how: str, values: list[float], flagged: int | str) -> dict[str, Any]:
    """How far ten numbers are apart."""
    middle = statistics.median(values)
    return {
        "what": what,
        "how": how,
        "median": middle,
        "least": min(values),
        "most": max(values),
        "most / least": max(values) / min(values),
        "deviation, %": 100 * statistics.stdev(values) / statistics.mean(values),
        "flagged": flagged,
    }


def main() -> None:
    """Measure in turns and write the result."""
    folders = [next(Path("models/mnn").glob(f"*-{kind}-*")) for kind in KINDS]
    models = [folder / "model.mnn" for folder in folders]
    naive: list[list[list[float]]] = []
    careful: list[list[Measurement]] = []
    before = conditions()["load_average_1min"]
    for repeat in range(REPEATS):
        naive.append([naive_ms(model) for model in models])
        careful.append(protocol(models))
        print(f"{repeat + 1}/{REPEATS}", file=sys.stderr, flush=True)
    rows = []
    for index, folder in enumerate(folders):
        p50s = [measured[index] for measured in careful]
        flagged = f"{sum(bool(m.flags) for m in p50s)} of {REPEATS}"
        for how, of in NAIVE.items():
            rows.append(row(f"{folder.name}, ms", how, [of(samples[index]) for samples in naive], "-"))
        rows.append(row(f"{folder.name}, ms", "protocol, P50", [m.p50_ms for m in p50s], flagged))
    ratio = f"{KINDS[1]} / {KINDS[0]}"
    flagged = f"{sum(any(m.flags for m in measured) for measured in careful)} of {REPEATS}"
    for how, of in NAIVE.items():
        rows.append(row(ratio, how, [of(small) / of(large) for large, small in naive], "-"))
    by_rounds = [_ratio(large, small) for large, small in careful]
    rows.append(row(ratio, "protocol, by rounds", by_rounds, flagged))
    write(
        FOLDER / "repeatability.json",
        {
            "title": "How far ten measurements of one model are apart",
            "command": "python tests/bench/repeatability.py",
            "text": f"{_host(_loads(careful))} {_TEXT}",
            "conditions": conditions(
                load_average_before=before,
                load_during_protocol="{:.1f} to {:.1f}".format(*_loads(careful)),
                engine=ENGINE_VERSION,
                flags=_flags(careful),
            ),
            "rows": rows,
            "naive_ms": naive,
            "protocol_p50_ms": [[m.p50_ms for m in measured] for measured in careful],
            "protocol_p99_ms": [[m.p99_ms for m in measured] for measured in careful],
            "protocol_flags": [[list(m.flags) for m in measured] for measured in careful],
        },
    )


def _ratio(large: Measurement, small: Measurement) -> float:
    pairs = zip(small.round_p50_ms, large.round_p50_ms, strict=True)
    return statistics.median(a / b for a, b in pairs)


def _loads(careful: list[list[Measurement]]) -> tuple[float, float]:
    loads = [m.load_avg_1min for measured in careful for m in measured]
    return min(loads), max(loads)


def _host(loads: tuple[float, float]) -> str:
    """The first thing to know of the numbers: whether others worked on the machine, too."""
    cores_count = os.cpu_count() or 1
    busy = "busy with other work" if loads[0] > cores_count + 1 else "not busy with other work all the time"
    return (
        f"These numbers are of a host that was {busy}: load average {loads[0]:.1f} to {loads[1]:.1f} on"
        f" {cores_count} cores."
    )


def _flags(careful: list[list[Measurement]]) -> str:
    raised = [flag for measured in careful for m in measured for flag in m.flags]
    return ", ".join(f"{flag} {raised.count(flag)}" for flag in sorted(set(raised))) or "none"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        naive_child(Path(sys.argv[1]))
    else:
        main()
