"""MNN's compression parameters, the JSON form of its MNN_compression.proto: one writer, one reader.

The converter finds a layer by the name of its output tensor after it has fused the activation, and silently
leaves a layer float whose name it does not find.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from fleet.device.errors import UserError
from tasks.mnn.source import Source, attribute_value

Q_MAX = 127
"""Integers go from -127 to 127."""
_BITS = 8
_RELU6_RANGE = [0.0, 6.0]
_CHANNEL_RANGE = 2.0**-12  # the engine counts a depthwise bias in int32 units of input scale x weight scale
_LEAST_SCALE = 1e-7  # of an activation: a tensor that is always zero still needs one
_UNREADABLE = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    OverflowError,
    RecursionError,
)
"""What a JSON document of any other shape raises while it is read."""


@dataclass(frozen=True, kw_only=True)
class Int8Layer:
    """One layer that must compute in int8."""

    input: str
    """Tensor it reads."""
    weight: str
    """Tensor of its weights; the converter does not look at it."""
    output: str
    """Tensor it writes, after fusion: how the converter finds it."""
    input_scale: float
    output_scale: float
    weight_scales: tuple[float, ...]
    """One per output channel."""


def parameters(layers: Sequence[Int8Layer]) -> dict[str, Any]:
    """The document for these layers, with no scale below what the engine can count in.

    An activation's scale is at least 1e-7, a channel's weight scale at least 1/4096 of its layer's largest:
    with a dead channel's own one the bias of a depthwise convolution would leave int32.
    """
    algorithm = {"type": "QUANTIZE", "quantParams": {"layer": [_record(layer) for layer in layers]}}
    return {"version": "0.0.0", "algo": [algorithm]}


def int8_layers(compression: Path | None) -> tuple[Int8Layer, ...]:
    """The layers that compression parameters ask for; none without a file.

    Raises:
        UserError: the file is missing or does not follow MNN_compression.proto.
    """
    if compression is None:
        return ()
    try:
        document = json.loads(compression.read_text(encoding="utf-8"))
        layers = tuple(
            _layer(record) for algorithm in document["algo"] for record in algorithm["quantParams"]["layer"]
        )
    except _UNREADABLE as error:
        raise UserError(
            f"compression parameters {compression}: {type(error).__name__} {error}",
            allowed="JSON after MNN_compression.proto: int8 layers with an input, a weight and an output",
            next_step="correct the file, or leave it out and give --int8 --calibration FOLDER",
        ) from error
    if not layers:
        raise UserError(
            f"compression parameters {compression} name no layer",
            allowed="at least one int8 layer",
            next_step="convert without compression parameters, or list the layers",
        )
    return layers


def fused_activation(source: Source, conv: onnx.NodeProto) -> onnx.NodeProto | None:
    """The Relu or Clip(0, 6) that the converter fuses into a convolution: the only reader of its output."""
    node = source.sole_reader(conv.output[0])
    if node is None or node.op_type == "Relu":
        return node
    return node if node.op_type == "Clip" and _clip_limits(source, node) == _RELU6_RANGE else None


def _clip_limits(source: Source, clip: onnx.NodeProto) -> list[float | None]:
    """Minimum and maximum: attributes up to operator set 10, inputs from 11 on; None where not fixed."""
    if len(clip.input) == 1:
        return [attribute_value(clip, name) for name in ("min", "max")]
    names = [*clip.input[1:], ""][:2]
    return [float(source.value(name)) if name in source.constants else None for name in names]


def _record(layer: Int8Layer) -> dict[str, Any]:
    clamp = {"bits": _BITS, "clampMin": -Q_MAX, "clampMax": Q_MAX}
    least = max(layer.weight_scales) * _CHANNEL_RANGE

    def activation(name: str, scale: float) -> list[dict[str, Any]]:
        return [{"name": name, "scales": [max(scale, _LEAST_SCALE)], "zeroPoint": 0, **clamp}]

    weight_scales = [max(scale, least) for scale in layer.weight_scales]
    return {
        "input": activation(layer.input, layer.input_scale),
        "weight": [{"name": layer.weight, "scales": weight_scales, **clamp}],
        "output": activation(layer.output, layer.output_scale),
    }


def _layer(record: Mapping[str, Any]) -> Int8Layer:
    sides = [record[side][0] for side in ("input", "weight", "output")]
    for side in sides:
        if int(side["bits"]) != _BITS or int(side.get("zeroPoint", 0)) != 0:
            raise ValueError(
                f"{side['name']!r} has {side['bits']} bits, zero point {side.get('zeroPoint', 0)}"
            )
    given, weight, made = sides
    return Int8Layer(
        input=str(given.get("name", "")),
        weight=str(weight.get("name", "")),
        output=str(made["name"]),
        input_scale=float(given["scales"][0]),
        output_scale=float(made["scales"][0]),
        weight_scales=tuple(float(scale) for scale in weight["scales"]),
    )
