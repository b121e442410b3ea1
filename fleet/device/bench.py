"""One benchmark run of one model, in a process of its own: `python -m fleet.device.bench OPTIONS`.

It answers with raw samples and readings; statistics and verdicts are the lab's business (`fleet.lab`).
Only numpy, OpenCV, MNN and the standard library, so that the same file runs on a board or a phone.
"""

import gc
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from fleet.device.engine import ENGINE_VERSION, Array, RuntimeConfig, Session, TensorSpec
from fleet.device.errors import UserError
from fleet.device.host import available_mb, clock_mhz, energy_mj, forget_peak, resident_mb, temperature_c
from fleet.device.preprocess import Preprocess
from fleet.device.program import answer

_WINDOW_QUERIES, _WINDOW_S = 5, 0.02  # a window is at least both: 20 ms see a clock that is still rising
_STABLE_WINDOWS = 3
_STABLE_WITHIN = 0.05
_MOST_WINDOWS = 30
_MOST_END_TO_END = 100
_CAMERA_SHAPE = (480, 640, 3)  # a VGA camera frame: what a phone app decodes before it preprocesses


@dataclass(frozen=True, kw_only=True)
class RawRun:
    """What one process measured; samples in ms, in the order they were taken. None: not exposed here."""

    engine_version: str
    config: Mapping[str, str | int]
    inputs: Mapping[str, list[int]]
    """Shape of each input."""
    load_ms: float
    """Opening the model in a fresh process."""
    first_ms: float
    """The first inference in that process."""
    warmup_queries: int
    warmup_stable: bool
    """Whether the warm-up ended because the latency had settled, and not at its cap."""
    latency_ms: list[float]
    end_to_end_ms: list[float]
    """Camera frame to class; empty without a preprocess record."""
    steady_s: float
    """Wall time of the timed inferences."""
    cpu_share: float
    """CPU time of the timed inferences over their wall time times threads."""
    core_share: float
    """The same for the thread that asks, which never sleeps on a CPU: below 1 somebody else had its core."""
    load_avg_1min: float
    load_memory_mb: float | None
    peak_memory_mb: float | None
    """Most that the process took on top of the interpreter and its libraries."""
    available_memory_mb: float | None
    """What was free before the model was loaded."""
    session_memory_mb: float
    """What the engine says its session holds."""
    temp_before_c: float | None
    temp_after_c: float | None
    clock_before_mhz: float | None
    """After the warm-up."""
    clock_after_mhz: float | None
    energy_mj: float | None
    """Of the CPU packages per timed inference, whatever else they did included."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
        return asdict(self)

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """Rebuild from `to_dict()`."""
        return cls(**{field.name: record[field.name] for field in fields(cls)})


def random_feeds(session: Session, rng: np.random.Generator) -> dict[str, Array]:
    """Normal noise for every float input, zeros for integers: as indices they are always valid.

    Raises:
        UserError: an input has an extent that only its user knows.
    """
    feeds: dict[str, Array] = {}
    for name, spec in session.inputs.items():
        if min(spec.shape, default=1) < 1:
            raise _dynamic(session.path, spec)
        is_int = spec.dtype.startswith(("int", "uint"))
        values = np.zeros(spec.shape) if is_int else rng.standard_normal(spec.shape)
        feeds[name] = values.astype(spec.dtype)
    return feeds


def _dynamic(model: Path, spec: TensorSpec) -> UserError:
    shape = ",".join("?" if extent < 1 else str(extent) for extent in spec.shape)
    return UserError(
        f"{model.name}: input {spec.name} has the shape {shape}",
        allowed="a shape without unknown extents: latency depends on it",
        next_step=f"say it with --shape {spec.name}={shape}, numbers in place of ?",
    )


def warm_up(query: Callable[[], float]) -> tuple[int, bool]:
    """Run until the medians of three windows in a row lie within 5 %, for 30 windows at most.

    Args:
        query: One inference; returns the seconds it took.

    Returns:
        The inferences spent, and whether their latency settled.
    """
    medians: list[float] = []
    spent = 0
    while len(medians) < _MOST_WINDOWS:
        window: list[float] = []
        while len(window) < _WINDOW_QUERIES or sum(window) < _WINDOW_S:
            window.append(query())
        spent += len(window)
        medians.append(float(np.median(window)))
        last = medians[-_STABLE_WINDOWS:]
        if len(last) == _STABLE_WINDOWS and max(last) <= min(last) * (1 + _STABLE_WITHIN):
            return spent, True
    return spent, False


def _timed_s(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@dataclass(frozen=True, kw_only=True)
class _Steady:
    latency_ms: list[float]
    wall_s: float
    cpu_s: float
    thread_s: float
    energy_mj: float | None


def _steady(session: Session, feeds: dict[str, Array], queries: int) -> _Steady:
    """Timed inferences, one at a time. Python's garbage collector waits: its pauses are no model's."""
    latency_s = np.empty(queries)
    gc.collect()
    gc.disable()
    energy, cpu, thread, wall = energy_mj(), time.process_time(), time.thread_time(), time.perf_counter()
    for i in range(queries):
        start = time.perf_counter()
        session.run(feeds)
        latency_s[i] = time.perf_counter() - start
    wall, thread = time.perf_counter() - wall, time.thread_time() - thread
    cpu, energy_after = time.process_time() - cpu, energy_mj()
    gc.enable()
    known = energy is not None and energy_after is not None and energy_after >= energy  # else it wrapped
    return _Steady(
        latency_ms=(latency_s * 1e3).tolist(),
        wall_s=wall,
        cpu_s=cpu,
        thread_s=thread,
        energy_mj=((energy_after or 0.0) - (energy or 0.0)) / queries if known else None,
    )


def _end_to_end_ms(session: Session, preprocess: Preprocess, queries: int, seed: int) -> list[float]:
    """Camera frame in, class out: preprocessing, inference and argmax, in ms."""
    (name,) = session.inputs
    frame = np.random.default_rng(seed).integers(0, 256, _CAMERA_SHAPE, dtype=np.uint8)

    def classify() -> int:
        outputs = session.run({name: preprocess.apply(frame)})
        return int(np.argmax(next(iter(outputs.values()))))

    return [_timed_s(classify) * 1e3 for _ in range(queries)]


def _check_record(feeds: Mapping[str, Array], preprocess: Preprocess) -> None:
    shapes = {name: array.shape for name, array in feeds.items()}
    if list(shapes.values()) != [preprocess.input_shape]:
        raise UserError(
            f"preprocess record that makes an input of {preprocess.input_shape} for the inputs {shapes}",
            allowed="a model with one input of that shape",
            next_step="correct size_px and layout of the record, or measure without it",
        )


class _Readings:
    """What the device said before the model was there."""

    def __init__(self) -> None:
        self.available_mb, self.temp_c, self.load_avg = available_mb(), temperature_c(), os.getloadavg()[0]
        forget_peak()
        self.resident_mb = resident_mb()

    def above_mb(self, now: float | None) -> float | None:
        """Memory on top of the interpreter and its libraries."""
        return None if self.resident_mb is None or now is None else now - self.resident_mb


def run(
    model: Path,
    config: RuntimeConfig,
    *,
    queries: int,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    preprocess: Preprocess | None = None,
    seed: int = 0,
) -> RawRun:
    """Load, first inference, warm-up, then `queries` timed inferences, one at a time.

    Raises:
        UserError: no model file, an input whose shape is not known, or a record that does not fit the model.
        EngineError: the model does not run.
    """
    before, start = _Readings(), time.perf_counter()
    with Session(model, config=config, shapes=shapes) as session:
        load_s, loaded_mb = time.perf_counter() - start, resident_mb()
        feeds = random_feeds(session, np.random.default_rng(seed))
        if preprocess:
            _check_record(feeds, preprocess)
        first_s = _timed_s(lambda: session.run(feeds))
        warmup_queries, warmup_stable = warm_up(lambda: _timed_s(lambda: session.run(feeds)))
        clock_before = clock_mhz()
        steady = _steady(session, feeds, queries)
        clock_after, temp_after = clock_mhz(), temperature_c()
        few = min(queries, _MOST_END_TO_END)
        return RawRun(
            engine_version=ENGINE_VERSION,
            config=config.to_dict(),
            inputs={name: list(array.shape) for name, array in feeds.items()},
            load_ms=load_s * 1e3,
            first_ms=first_s * 1e3,
            warmup_queries=warmup_queries,
            warmup_stable=warmup_stable,
            latency_ms=steady.latency_ms,
            end_to_end_ms=_end_to_end_ms(session, preprocess, few, seed) if preprocess else [],
            steady_s=steady.wall_s,
            cpu_share=steady.cpu_s / steady.wall_s / config.threads,
            core_share=steady.thread_s / steady.wall_s,
            load_avg_1min=before.load_avg,
            load_memory_mb=before.above_mb(loaded_mb),
            peak_memory_mb=before.above_mb(resident_mb("VmHWM")),
            available_memory_mb=before.available_mb,
            session_memory_mb=session.memory_mb,
            temp_before_c=before.temp_c,
            temp_after_c=temp_after,
            clock_before_mhz=clock_before,
            clock_after_mhz=clock_after,
            energy_mj=steady.energy_mj,
        )


def _program(options: dict[str, Any]) -> dict[str, Any]:
    preprocess = options["preprocess"]
    return run(
        Path(options["model"]),
        RuntimeConfig(**options["config"]),
        queries=options["queries"],
        shapes={name: tuple(shape) for name, shape in options["shapes"].items()},
        preprocess=Preprocess.from_dict(preprocess) if preprocess else None,
        seed=options["seed"],
    ).to_dict()


if __name__ == "__main__":
    answer(_program)
