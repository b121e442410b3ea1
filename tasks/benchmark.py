"""Stage benchmark: what every variant costs on one device, interleaved, in fresh processes.

The first of the configs is the one that a release is bound to: its numbers stand at VARIANT/key in the
report, and its layers are profiled. Numbers of other configs stand at VARIANT/CONFIG/key.
"""

import argparse
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from fleet.device.bench import RawRun
from fleet.device.engine import Level, RuntimeConfig
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from fleet.lab.device import Device
from fleet.lab.devices import open_device
from fleet.lab.layers import Layer, profile
from fleet.lab.measurement import Measurement, config_name, summarize
from fleet.lab.schedule import Job, measure
from fleet.lab.validity import MIN_QUERIES_P99
from tasks.benchmark_files import write_layers, write_samples
from tasks.progress import track
from tasks.stage import REPORTS, Params, read_json, stage

MODELS = Path("models/mnn")


class ConfigParams(Params):
    """One runtime config on the CPU; see RuntimeConfig."""

    threads: int = Field(default=1, ge=1)
    precision: Level = "normal"
    memory: Level = "normal"

    def runtime(self) -> RuntimeConfig:
        """As the engine takes it."""
        return RuntimeConfig(threads=self.threads, precision=self.precision, memory=self.memory)


class BenchmarkParams(Params):
    """Section `benchmark` of params.yaml."""

    queries: int = Field(default=500, ge=MIN_QUERIES_P99)
    """Timed inferences per variant and config; fewer bound no P99 at 99 % confidence."""
    rounds: int = Field(default=2, ge=1)
    """Alternating passes over variants and configs, each in a fresh process."""
    configs: tuple[ConfigParams, ...] = Field(default=(ConfigParams(),), min_length=1)
    """The first is bound to the release, others are measured beside it."""
    seed: int = 0

    @model_validator(mode="after")
    def _configs_differ(self) -> Self:
        if len(set(self.configs)) < len(self.configs):
            raise ValueError("configs has one of them twice")
        return self


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """A model file as it lay there before it was measured."""

    path: Path
    sha256: str
    size_bytes: int

    @classmethod
    def of(cls, path: Path) -> Self:
        """As it lies there now."""
        content = path.read_bytes()
        return cls(path=path, sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))

    def require_unchanged(self) -> None:
        """Refuse what was measured while the file was replaced: it is of either file, or of both.

        Raises:
            UserError: another file lies there, or none.
        """
        found = ModelFile.of(self.path).sha256[:12] if self.path.is_file() else "no file"
        if found != self.sha256[:12]:
            raise UserError(
                f"{self.path} was replaced while it was measured: {found}, was {self.sha256[:12]}",
                allowed="the same bytes from the first process to the last",
                next_step="measure again when nothing writes the file any more",
            )


@dataclass(frozen=True, kw_only=True)
class Benchmarked:
    """All that was measured on one device."""

    runs: dict[tuple[str, str], list[RawRun]]
    """(variant, config) to its runs in the order of the rounds."""
    layers: dict[str, list[Layer]]
    """Variant to its layers in the first config."""
    models: dict[str, ModelFile]
    """Variant to the file that was measured."""


def benchmark(device: Device, models: Path, params: BenchmarkParams) -> Benchmarked:
    """Measure every variant under `models` (models/mnn).

    Raises:
        UserError: no models, more threads than the device has cores, or a model replaced meanwhile.
        EngineError: a model does not run there.
    """
    cards = sorted(models.glob("*/card.json"))
    if not cards:
        raise UserError(
            f"no converted models in {models}",
            allowed="models/mnn/VARIANT/model.mnn with its card.json",
            next_step="run `dvc repro convert`",
        )
    configs = [config.runtime() for config in params.configs]
    jobs = {
        (card.parent.name, config_name(config)): Job(
            model=card.parent / "model.mnn",
            config=config,
            preprocess=Preprocess.from_dict(read_json(card)["preprocess"]),
        )
        for card in cards
        for config in configs
    }
    files = {card.parent.name: ModelFile.of(card.parent / "model.mnn") for card in cards}
    measured = measure(
        device,
        list(jobs.values()),
        queries=params.queries,
        rounds=params.rounds,
        seed=params.seed,
        progress=lambda turns: track(turns, "benchmark", len(turns)),
    )
    firsts = {variant: job for (variant, config), job in jobs.items() if config == config_name(configs[0])}
    with device.lock():
        layers = {variant: profile(device, job, seed=params.seed) for variant, job in firsts.items()}
    for file in files.values():
        file.require_unchanged()
    return Benchmarked(runs=dict(zip(jobs, measured, strict=True)), layers=layers, models=files)


def check_threads(threads: int, cores: int) -> None:
    """Refuse more threads than the device has cores: they would only wait for each other."""
    if threads > cores:
        raise UserError(
            f"{threads} threads",
            allowed=f"1 to {cores}, the cores of the device",
            next_step="ask for fewer threads",
        )


def flat_report(measured: Benchmarked, engine_bytes: int) -> dict[str, Any]:
    """The flat keys of reports/benchmark/DEVICE.json: `VARIANT/p50_ms` ..., and the bytes measured."""
    report: dict[str, Any] = {}
    for (variant, config), runs in measured.runs.items():
        values = _costs(summarize(runs))
        if f"{variant}/config" in report:
            report |= {f"{variant}/{config}/{key}": value for key, value in values.items()}
            continue
        slow = [layer for layer in measured.layers[variant] if layer.outlier]
        report |= {f"{variant}/{key}": value for key, value in values.items()} | {
            f"{variant}/config": config,
            f"{variant}/mnn_sha256": measured.models[variant].sha256,
            f"{variant}/package_bytes": engine_bytes + measured.models[variant].size_bytes,
            f"{variant}/outlier_layers_count": len(slow),
        }
    return report


def _costs(m: Measurement) -> dict[str, Any]:
    values = {
        "n": m.n,
        "p50_ms": m.p50_ms,
        "p90_ms": m.p90_ms,
        "p95_ms": m.p95_ms,
        "p99_ms": m.p99_ms,
        "max_ms": m.max_ms,
        "p90_bound_ms": m.p90_bound.value,
        "p90_bound_rank": m.p90_bound.rank,
        "p95_bound_ms": m.p95_bound.value,
        "p95_bound_rank": m.p95_bound.rank,
        "p99_bound_ms": m.p99_bound.value,
        "p99_bound_rank": m.p99_bound.rank,
        "peak_memory_mb": m.peak_memory_mb,
        **m.beside_latency(),
        "flags": " ".join(m.flags),
        "warnings": " ".join(m.warnings),
    }
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in values.items()}


def main() -> None:
    """`python -m tasks.benchmark DEVICE` writes DEVICE{.json,_samples.parquet,_layers.csv}."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    name, folder = parser.parse_args().device, REPORTS / "benchmark"
    with stage(f"benchmark-{name}", BenchmarkParams, section="benchmark") as run:
        identity = read_json(REPORTS / "probe" / f"{name}.json")
        check_threads(max(config.threads for config in run.params.configs), identity["cores_count"])
        measured = benchmark(open_device(name), MODELS, run.params)
        write_samples(measured.runs, folder / f"{name}_samples.parquet")
        write_layers(measured.layers, folder / f"{name}_layers.csv")
        report = flat_report(measured, identity["engine_bytes"])
        run.report({"device": name, "soc": identity["soc"], **report}, file=folder / f"{name}.json")


if __name__ == "__main__":
    main()
