"""The order of measurements: a fresh process each, forth and back, so that slow drift falls on all alike."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fleet.device.bench import RawRun
from fleet.device.engine import RuntimeConfig
from fleet.device.preprocess import Preprocess
from fleet.lab.device import Device

MIN_CORE_SHARE = 0.9
"""Below this share of its core the process was interrupted too often for its latency to mean anything."""
MAX_P95_TO_P50 = 1.5
"""A quiet host repeats one computation within a few per cent; beyond this ratio something else ran."""
MAX_ROUND_TO_ROUND = 1.25
"""Nor do the medians of two processes on a quiet host differ by more."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One model in one runtime config."""

    model: Path
    config: RuntimeConfig = field(default_factory=RuntimeConfig)
    preprocess: Preprocess | None = None
    """For the time from camera frame to class; None: not measured."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of inputs that the model leaves open."""

    def options(self) -> dict[str, Any]:
        """What every program that runs the model needs to know of it."""
        return {
            "config": self.config.to_dict(),
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }


Progress = Callable[[Sequence[int]], Iterable[int]]
"""Shows how far a list of work is while it hands on its items."""


def measure(
    device: Device,
    jobs: Sequence[Job],
    *,
    queries: int,
    rounds: int,
    seed: int = 0,
    progress: Progress = iter,
) -> list[list[RawRun]]:
    """Measure the jobs in alternating order (ABBA ...), with the device to oneself.

    Args:
        device: Where.
        jobs: Models and configs in the order of the first round; every second round runs backwards.
        queries: Timed inferences a job, at least, split over the rounds.
        rounds: Fresh processes a job.
        seed: Seed of the input data.
        progress: Of the runs.

    Returns:
        A list of runs for each job, in the order of the rounds.
    """
    runs: list[list[RawRun]] = [[] for _ in jobs]
    forth = list(range(len(jobs)))
    turns = [job for index in range(rounds) for job in (forth if index % 2 == 0 else forth[::-1])]
    with device.lock():
        for index in progress(turns):
            job = jobs[index]
            record = job.preprocess.to_dict() if job.preprocess else None
            options = {"queries": math.ceil(queries / rounds), "preprocess": record, "seed": seed}
            raw = device.run("fleet.device.bench", job.options() | options, model=job.model)
            runs[index].append(RawRun.from_dict(raw))
    return runs


def pooled_ms(runs: Sequence[RawRun]) -> npt.NDArray[np.float64]:
    """The steady samples of several runs together."""
    return np.concatenate([np.asarray(run.latency_ms, np.float64) for run in runs])


def is_noisy(runs: Sequence[RawRun]) -> bool:
    """Whether other work on the device shows in the latency of one job."""
    p50, p95 = np.percentile(pooled_ms(runs), [50, 95])
    medians = [float(np.median(run.latency_ms)) for run in runs]
    return bool(
        min(run.core_share for run in runs) < MIN_CORE_SHARE
        or p95 > MAX_P95_TO_P50 * p50
        or max(medians) > MAX_ROUND_TO_ROUND * min(medians)
    )
