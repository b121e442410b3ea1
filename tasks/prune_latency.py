"""What pruned models cost in the engine on this host: export, convert and measure, side by side."""

import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from fleet.device.engine import RuntimeConfig
from fleet.device.preprocess import Preprocess
from fleet.lab.local import Measurement, measure_interleaved
from tasks.mnn.converter import convert
from tasks.mnn.onnx_export import export_onnx

_ROUNDS = 4  # forth and back twice: a slow drift of the host falls on all models alike


def measure_models(
    models: Mapping[str, nn.Module], preprocess: Preprocess, *, queries: int
) -> dict[str, Measurement]:
    """Latency of each model in fp32 on one CPU thread, interleaved.

    Args:
        models: Name to float model in eval mode.
        preprocess: Gives the input shape.
        queries: Timed inferences per model.

    Raises:
        EngineError: a model does not convert or run.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for index, (name, model) in enumerate(models.items()):
            onnx, mnn = Path(folder) / f"{index}.onnx", Path(folder) / f"{index}.mnn"
            export_onnx(model, preprocess, onnx)
            convert(onnx, mnn)
            files[name] = (mnn, None)
        return measure_interleaved(files, RuntimeConfig(), queries=queries, rounds=_ROUNDS, seed=0)
