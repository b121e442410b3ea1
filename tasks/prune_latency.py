"""What pruned models cost in the engine on this host: export, convert and measure, side by side."""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fleet.device.preprocess import Preprocess
from fleet.lab.local import LocalDevice
from fleet.lab.schedule import Job, is_noisy, measure, pooled_ms
from tasks.mnn.converter import convert
from tasks.mnn.onnx_export import export_onnx

_ROUNDS = 4  # forth and back twice: a slow drift of the host falls on all models alike


@dataclass(frozen=True, kw_only=True)
class RungLatency:
    """Engine latency of one model."""

    n: int
    p50_ms: float
    p95_ms: float
    flags: tuple[str, ...]
    """`noisy` where other work on the host shows in it."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
        return asdict(self)


def measure_models(
    models: Mapping[str, nn.Module], preprocess: Preprocess, *, queries: int
) -> dict[str, RungLatency]:
    """Latency of each model in fp32 on one CPU thread, interleaved.

    Args:
        models: Name to float model in eval mode.
        preprocess: Gives the input shape.
        queries: Timed inferences per model.

    Raises:
        EngineError: a model does not convert or run.
    """
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for index, model in enumerate(models.values()):
            onnx, mnn = Path(folder) / f"{index}.onnx", Path(folder) / f"{index}.mnn"
            export_onnx(model, preprocess, onnx)
            convert(onnx, mnn)
            jobs.append(Job(model=mnn))
        measured = measure(LocalDevice(), jobs, queries=queries, rounds=_ROUNDS)
    latencies = {}
    for name, runs in zip(models, measured, strict=True):
        samples_ms = pooled_ms(runs)
        p50, p95 = (float(q) for q in np.percentile(samples_ms, [50, 95]))
        flags = ("noisy",) if is_noisy(runs) else ()
        latencies[name] = RungLatency(n=len(samples_ms), p50_ms=p50, p95_ms=p95, flags=flags)
    return latencies
