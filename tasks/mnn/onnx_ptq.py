"""Post-training quantisation of an arbitrary ONNX, with scales measured on real images.

The cheap alternative to training with fake-quantised layers: convolutions become int8, all else stays float.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

from fleet.device.errors import EngineError
from tasks.mnn.calibration import Calibration
from tasks.mnn.int8_record import Q_MAX, Int8Layer, fused_activation, parameters
from tasks.mnn.onnx_layers import int8_output, why_float
from tasks.mnn.onnx_read import write_onnx
from tasks.mnn.onnx_runs import run_fold, run_measure
from tasks.mnn.source import Source
from tasks.progress import track

Doubles = npt.NDArray[np.float64]

_IMAGES_A_CHILD = 32
_CLIPS = np.linspace(0.3, 1.0, 36)  # shares of the largest value that are tried as the end of the range
_SMALLEST = 1e-6  # of a range: a tensor that is always zero still needs a scale


@dataclass(frozen=True, kw_only=True)
class QuantisableLayer:
    """A convolution that the engine can compute in int8, with the scales of its weights."""

    input: str
    weight: str
    output: str
    """After the fused activation: the converter finds the layer by it."""
    weight_scales: tuple[float, ...]
    relu6: bool

    def with_scales(self, scales: Mapping[str, float]) -> Int8Layer:
        """The layer with the scales of the tensors it reads and writes."""
        return Int8Layer(
            input=self.input,
            weight=self.weight,
            output=self.output,
            input_scale=scales[self.input],
            output_scale=scales[self.output],
            weight_scales=self.weight_scales,
        )


def fold(path: Path, folded: Path, *, timeout_s: float) -> onnx.ModelProto:
    """Write the model with its batch norms folded into the convolutions, as the converter will fold them.

    Raises:
        EngineError: ONNX Runtime cannot load it.
    """
    run_fold(path, folded, timeout_s=timeout_s)
    return onnx.load(str(folded))


def quantisable(model: onnx.ModelProto) -> list[QuantisableLayer]:
    """The convolutions that the engine can compute in int8, but for the first, which reads the picture.

    Raises:
        EngineError: there is none.
    """
    source = Source(name="", model=model, sha256="")
    layers = []
    for node in model.graph.node:
        if node.op_type != "Conv" or why_float(source, node):
            continue
        weight = source.value(node.input[1])
        activation = fused_activation(source, node)
        largest = np.abs(weight.reshape(len(weight), -1)).max(axis=1)
        largest = largest if largest.any() else np.ones_like(largest)  # all zero: any scale will do
        layers.append(
            QuantisableLayer(
                input=node.input[0],
                weight=node.input[1],
                output=int8_output(source, node),
                weight_scales=tuple(float(v) for v in largest / Q_MAX),
                relu6=activation is not None and activation.op_type == "Clip",
            )
        )
    if not layers:
        raise EngineError("no convolution of the model can be int8 (fixed 2-D weights, not first, not last)")
    return layers


def quantise(
    model: onnx.ModelProto,
    layers: Sequence[QuantisableLayer],
    calibration: Calibration,
    folder: Path,
    *,
    timeout_s: float,
) -> Path:
    """Measure the scales of layers.

    Args:
        model: Float, batch norms folded, shapes inferred.
        layers: What `quantisable` found in it.
        calibration: Real images, at least one batch.
        folder: Where compression.json goes.
        timeout_s: Limit of each child process; one takes some of the images.

    Returns:
        MNN's compression parameters.

    Raises:
        EngineError: ONNX Runtime cannot run the model.
        UserError: an image cannot be used.
    """
    tensors = sorted({name for layer in layers for name in (layer.input, layer.output)})
    scales = _measure(model, tensors, calibration, folder / "measured.onnx", timeout_s=timeout_s)
    for layer in layers:
        if layer.relu6:  # the engine's fused ReLU6 ends only where int8 ends
            scales[layer.output] = min(scales[layer.output], 6 / Q_MAX)
    records = parameters([layer.with_scales(scales) for layer in layers])
    path = folder / "compression.json"
    path.write_text(json.dumps(records, sort_keys=True), encoding="utf-8")
    return path


def _measure(
    model: onnx.ModelProto, tensors: Sequence[str], calibration: Calibration, path: Path, *, timeout_s: float
) -> dict[str, float]:
    """Per tensor, the scale with the least mean square rounding error over all images; two passes."""
    augmented = onnx.ModelProto()
    augmented.CopyFrom(model)
    del augmented.graph.output[:]
    augmented.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors)
    write_onnx(augmented, path)
    batch = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value or 1
    count = len(calibration.files) // batch

    def measured(title: str, ends: Doubles | None) -> Iterator[Doubles]:
        batches = track(calibration.feeds(batch), title, count)
        while some := list(islice(batches, max(_IMAGES_A_CHILD // batch, 1))):
            yield run_measure(path, some, ends, timeout_s=timeout_s)

    largest = np.maximum(np.max([*measured("calibrate: ranges", None)], axis=0), _SMALLEST)
    counts = np.sum([*measured("calibrate: histograms", largest)], axis=0)
    return {name: _best_clip(counts[i], float(largest[i])) / Q_MAX for i, name in enumerate(tensors)}


def _best_clip(counts: Doubles, largest: float) -> float:
    """The end of the range that loses least: rounding inside it against clamping beyond it."""
    centres = (np.arange(len(counts)) + 0.5) * (largest / len(counts))
    losses = []
    for share in _CLIPS:
        step = share * largest / Q_MAX
        quantised = np.minimum(np.round(centres / step), Q_MAX) * step
        losses.append(float((counts * (centres - quantised) ** 2).sum()))
    return float(_CLIPS[int(np.argmin(losses))]) * largest
