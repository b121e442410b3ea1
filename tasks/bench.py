"""`edgeloop bench`: what anyone's MNN models cost on this host, side by side, in one or more configs."""

import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

from fleet.device.engine import Level, RuntimeConfig
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from fleet.lab.device import Device
from fleet.lab.devices import open_device
from fleet.lab.layers import Layer, profile
from fleet.lab.measurement import Measurement, config_name, summarize
from fleet.lab.schedule import Job, measure
from tasks.benchmark import ModelFile, check_threads
from tasks.benchmark_files import write_samples
from tasks.progress import track

ROUNDS = 4
"""Fresh processes a model and config: forth and back twice."""
SLOWEST = 5
_MOST_QUERIES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One model in one config."""

    model: str
    """As the user named it; a file named twice is told apart by a number."""
    config: str
    """threads-precision-memory."""
    mnn_sha256: str
    model_bytes: int
    package_bytes: int
    """The engine's libraries and the model: what an app ships."""
    cost: Measurement
    layers: tuple[Layer, ...]
    """In the order they ran; empty for all but a model's first config."""

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints of it."""
        m = self.cost
        bounds = {"p90": m.p90_bound, "p95": m.p95_bound, "p99": m.p99_bound}
        percentiles = {"p50": m.p50_ms, "p90": m.p90_ms, "p95": m.p95_ms, "p99": m.p99_ms, "max": m.max_ms}
        slowest = sorted(self.layers, key=lambda layer: -layer.p50_ms)[:SLOWEST]
        return {
            "model": self.model,
            "mnn_sha256": self.mnn_sha256,
            "engine_version": m.engine_version,
            "config": dict(m.config),
            "inputs": dict(m.inputs),
            "latency_ms": percentiles | {f"{name}_bound": bound.value for name, bound in bounds.items()},
            "bound_rank": {name: bound.rank for name, bound in bounds.items()},
            "n": m.n,
            "memory_mb": m.peak_memory_mb,
            **m.beside_latency(),
            "model_bytes": self.model_bytes,
            "package_bytes": self.package_bytes,
            "flags": list(m.flags),
            "warnings": list(self.warnings),
            "slowest_layers": [asdict(layer) for layer in slowest],
            "outlier_layers": [asdict(layer) for layer in self.layers if layer.outlier],
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """Those of the measurement and of the layers."""
        slow = any(layer.outlier for layer in self.layers)
        return (*self.cost.warnings, *(("fallback",) if slow else ()))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One measurement against the first: P50 over P50, from processes that ran in the same round."""

    model: str
    config: str
    ratio: float
    """Median over the rounds; above 1 is slower than the first."""
    ratio_min: float
    ratio_max: float


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Everything that one `edgeloop bench` measured."""

    device: str
    soc: str
    cores_count: int
    measured: tuple[Measured, ...]
    comparisons: tuple[Comparison, ...]
    """Of the second and each further one against the first."""

    def to_dict(self) -> dict[str, Any]:
        """One measurement is one flat record; several are a list, with their comparisons."""
        head = {"ok": True, "device": self.device, "soc": self.soc, "cores_count": self.cores_count}
        if len(self.measured) == 1:
            return head | self.measured[0].to_dict()
        return head | {
            "measurements": [one.to_dict() for one in self.measured],
            "comparisons": [asdict(comparison) for comparison in self.comparisons],
        }


def bench(
    models: Sequence[Path],
    configs: Sequence[RuntimeConfig],
    *,
    queries: int = 500,
    shapes: Sequence[str] = (),
    preprocess: Preprocess | None = None,
    samples: Path | None = None,
) -> BenchResult:
    """Measure every model in every config, interleaved, and profile each model's layers in the first config.

    Args:
        models: MNN files; the same twice measures what is no difference.
        configs: See `parse_configs`.
        queries: Timed inferences of each.
        shapes: Of dynamic inputs, as NAME=1,3,224,224.
        preprocess: How a camera frame becomes the input; adds the end-to-end time.
        samples: Where every single latency is written to, as Parquet.

    Raises:
        UserError: a file or an option that cannot be used, or a file replaced while it was measured.
        EngineError: a model does not run.
    """
    if not 1 <= queries <= _MOST_QUERIES:
        raise UserError(
            f"--queries {queries}", allowed=f"1 to {_MOST_QUERIES}", next_step="correct --queries"
        )
    for model in models:
        _check_model(model)
    if samples:
        _check_samples(samples)
    device = open_device("local")
    identity = device.run("fleet.device.identity", {})
    check_threads(max(config.threads for config in configs), identity["cores_count"])
    asked = _one_shape_each(shapes)
    keys = [(name, config_name(config)) for name, config in product(_names(models), configs)]
    jobs = [
        Job(model=model, config=config, preprocess=preprocess, shapes=asked)
        for model, config in product(models, configs)
    ]
    files = {model: ModelFile.of(model) for model in models}
    runs = measure(
        device,
        jobs,
        queries=queries,
        rounds=min(ROUNDS, queries),
        progress=lambda turns: track(turns, "bench", len(turns)),
    )
    layers = _profile_firsts(device, jobs, len(configs))
    for file in files.values():
        file.require_unchanged()
    if samples:
        write_samples(dict(zip(keys, runs, strict=True)), samples)
    costs = [summarize(of_job) for of_job in runs]
    measured = tuple(
        Measured(
            model=model,
            config=config,
            mnn_sha256=files[job.model].sha256,
            model_bytes=files[job.model].size_bytes,
            package_bytes=identity["engine_bytes"] + files[job.model].size_bytes,
            cost=cost,
            layers=tuple(layers.get(index, ())),
        )
        for index, ((model, config), job, cost) in enumerate(zip(keys, jobs, costs, strict=True))
    )
    return BenchResult(
        device=device.name,
        soc=identity["soc"],
        cores_count=identity["cores_count"],
        measured=measured,
        comparisons=tuple(_compare(measured[0], other) for other in measured[1:]),
    )


def parse_configs(threads: str, precision: str, memory: str) -> list[RuntimeConfig]:
    """All combinations of the values in three lists with commas.

    Raises:
        UserError: a value that the engine does not know.
    """
    counts = threads.split(",")
    if not all(re.fullmatch(r"[1-9][0-9]{0,3}", count) for count in counts):
        raise UserError(
            f"--threads {threads[:40]!r}", allowed="numbers from 1, e.g. 1,2,4", next_step="correct --threads"
        )
    for option, text in (("--precision", precision), ("--memory", memory)):
        if wrong := [value for value in text.split(",") if value not in get_args(Level)]:
            raise UserError(
                f"{option} {wrong[0]!r}",
                allowed=f"{', '.join(get_args(Level))}, or several with commas",
                next_step=f"correct {option}",
            )
    combined = product(map(int, counts), precision.split(","), memory.split(","))
    configs = [RuntimeConfig(threads=n, precision=p, memory=m) for n, p, m in combined]  # type: ignore[arg-type]  # checked
    return list(dict.fromkeys(configs))


def _check_model(model: Path) -> None:
    """What can be known without the engine; the rest its process says."""
    if model.is_file() and model.stat().st_size > 0 and model.suffix != ".onnx" and os.access(model, os.R_OK):
        return
    what = "is a folder" if model.is_dir() else "is missing, empty or not readable"
    convert = model.suffix == ".onnx" and model.is_file()
    raise UserError(
        f"model {str(model)!r} {'is ONNX' if convert else what}",
        allowed="an .mnn file",
        next_step=f"`edgeloop convert {model} --out {model.with_suffix('.mnn')}`"
        if convert
        else "name the file that `edgeloop convert` or `edgeloop build` wrote",
    )


def _check_samples(samples: Path) -> None:
    """Refuse before minutes of measuring what could not be written after them."""
    free = not samples.exists() or (samples.is_file() and not samples.is_symlink() and _is_parquet(samples))
    if not free or not samples.name or not os.access(samples.parent, os.W_OK | os.X_OK):
        raise UserError(
            f"--samples {str(samples)!r}",
            allowed="a new file in a folder you may write to, or a Parquet file to be replaced",
            next_step="choose another path",
        )


def _one_shape_each(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    from tasks.mnn.onnx_inputs import parse_shapes  # brings onnx

    asked = parse_shapes(texts) if texts else {}
    for name, shapes in asked.items():
        if len(shapes) > 1:
            raise UserError(
                f"{len(shapes)} shapes for {name}",
                allowed="one for each input",
                next_step="run `edgeloop bench` once for each size",
            )
    return {name: shapes[0] for name, shapes in asked.items()}


def _names(models: Sequence[Path]) -> list[str]:
    """What the user called the models, numbered where that is one name twice."""
    texts = [str(model) for model in models]
    return [
        text if texts.count(text) == 1 else f"{text} ({texts[: index + 1].count(text)})"
        for index, text in enumerate(texts)
    ]


def _profile_firsts(device: Device, jobs: Sequence[Job], configs: int) -> dict[int, list[Layer]]:
    """Job index to layers, for the first config of each model."""
    firsts = range(0, len(jobs), configs)
    with device.lock():
        return {index: profile(device, jobs[index]) for index in track(firsts, "layers", len(firsts))}


def _compare(first: Measured, other: Measured) -> Comparison:
    pairs = zip(first.cost.round_p50_ms, other.cost.round_p50_ms, strict=True)
    ratios = sorted(b / a for a, b in pairs)
    middle = len(ratios) // 2
    median = ratios[middle] if len(ratios) % 2 else (ratios[middle - 1] + ratios[middle]) / 2
    return Comparison(
        model=other.model, config=other.config, ratio=median, ratio_min=ratios[0], ratio_max=ratios[-1]
    )


def _is_parquet(path: Path) -> bool:
    """Whether a file is one that samples may replace: of its kind, or empty."""
    try:
        with path.open("rb") as file:
            return file.read(4) in (b"PAR1", b"")
    except OSError:
        return False
