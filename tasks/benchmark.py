"""Stage benchmark: latency and memory of every variant on one device, interleaved, in fresh processes."""

import argparse
import hashlib
from pathlib import Path
from typing import Any

from pydantic import Field

from fleet.device.engine import RuntimeConfig
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from fleet.lab.local import MIN_QUERIES_P99, Measurement, measure_interleaved
from tasks.stage import REPORTS, Params, read_json, stage

MODELS = Path("models/mnn")


class BenchmarkParams(Params):
    """Section `benchmark` of params.yaml."""

    queries: int = Field(default=500, ge=MIN_QUERIES_P99)
    """Timed inferences per variant; fewer bound no P99 at 99 % confidence."""
    rounds: int = Field(default=2, ge=1)
    """Alternating passes over the variants."""
    threads: int = Field(default=1, ge=1)
    seed: int = 0


def benchmark(models: Path, params: BenchmarkParams) -> dict[str, Measurement]:
    """Measure every variant under `models` (models/mnn).

    Returns:
        Variant name to its measurement.
    """
    cards = sorted(models.glob("*/card.json"))
    if not cards:
        raise UserError(
            f"no converted models in {models}",
            allowed="models/mnn/VARIANT/model.mnn with its card.json",
            next_step="run `dvc repro convert`",
        )
    entries = {
        card.parent.name: (card.parent / "model.mnn", Preprocess.from_dict(read_json(card)["preprocess"]))
        for card in cards
    }
    config = RuntimeConfig(threads=params.threads)
    return measure_interleaved(
        entries, config, queries=params.queries, rounds=params.rounds, seed=params.seed
    )


def flat_report(measurements: dict[str, Measurement], models: Path) -> dict[str, Any]:
    """The flat keys of reports/benchmark/DEVICE.json: `VARIANT/p50_ms` ..., and the bytes measured."""
    report: dict[str, Any] = {}
    for variant, m in measurements.items():
        values = {
            "mnn_sha256": hashlib.sha256((models / variant / "model.mnn").read_bytes()).hexdigest(),
            "n": m.n,
            "p50_ms": m.p50_ms,
            "p90_ms": m.p90_ms,
            "p95_ms": m.p95_ms,
            "p99_ms": m.p99_ms,
            "max_ms": m.max_ms,
            "p95_bound_ms": m.p95_bound.value,
            "p95_bound_rank": m.p95_bound.rank,
            "p99_bound_ms": m.p99_bound.value,
            "p99_bound_rank": m.p99_bound.rank,
            "load_ms": m.load_ms,
            "first_ms": m.first_ms,
            "end_to_end_p50_ms": m.end_to_end_p50_ms,
            "load_memory_mb": m.load_memory_mb,
            "peak_memory_mb": m.peak_memory_mb,
            "cpu_share": m.cpu_share,
            "flags": " ".join(m.flags),
        }
        report |= {f"{variant}/{key}": _rounded(value) for key, value in values.items()}
    return report


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    """`python -m tasks.benchmark DEVICE` writes reports/benchmark/DEVICE.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    device = parser.parse_args().device
    with stage(f"benchmark-{device}", BenchmarkParams, section="benchmark") as run:
        identity = read_json(REPORTS / "probe" / f"{device}.json")
        measurements = benchmark(MODELS, run.params)
        report = {"device": device, "soc": identity["soc"], **flat_report(measurements, MODELS)}
        run.report(report, file=REPORTS / "benchmark" / f"{device}.json")


if __name__ == "__main__":
    main()
