"""Learned scales as MNN's compression parameters; names are read from the exported ONNX, never made up."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from fleet.device.errors import EngineError
from tasks.mnn.int8_record import Int8Layer, fused_activation, parameters
from tasks.mnn.source import Source, read_source
from tasks.nn.quantized import LayerScales


@dataclass(frozen=True, kw_only=True)
class Compression:
    """What the converter is told, and what must be true of its result."""

    parameters: dict[str, Any]
    """MNN's schema, version 0.0.0."""
    int8_tensors: tuple[str, ...]
    """Output tensors of the layers that must be int8 in the converted graph."""


def compression(onnx_path: Path, layers: Sequence[LayerScales]) -> Compression:
    """The compression parameters of `layers` for the graph in `onnx_path`.

    Raises:
        EngineError: the ONNX has no convolution with the weights of a layer, or more than one.
    """
    source = read_source(onnx_path)
    convolutions: dict[str, list[onnx.NodeProto]] = {}
    for node in source.model.graph.node:
        if node.op_type == "Conv":
            convolutions.setdefault(node.input[1], []).append(node)
    made = [_layer(source, convolutions.get(f"{scales.layer}.weight", []), scales) for scales in layers]
    return Compression(parameters=parameters(made), int8_tensors=tuple(layer.output for layer in made))


def _layer(source: Source, found: Sequence[onnx.NodeProto], scales: LayerScales) -> Int8Layer:
    weight = f"{scales.layer}.weight"
    if len(found) != 1:
        raise EngineError(f"{source.name}: {len(found)} convolutions have the weights {weight}, expected one")
    (conv,) = found
    return Int8Layer(
        input=conv.input[0],
        weight=weight,
        output=(fused_activation(source, conv) or conv).output[0],
        input_scale=scales.input_step,
        output_scale=scales.output_step,
        weight_scales=scales.weight_steps,
    )
