"""Learned scales as MNN's compression parameters, the JSON form of its MNN_compression.proto.

The converter finds a layer by the name of its output tensor after it has fused the activation, and silently
leaves a layer float whose name it does not find. So names are read from the exported ONNX, never made up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from fleet.device.errors import EngineError
from tasks.nn.fakequant import Q_MAX
from tasks.nn.quantized import LayerScales

_BITS = 8
_RELU6_RANGE = (0.0, 6.0)


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
    graph = onnx.load(str(onnx_path), load_external_data=False).graph
    convolutions: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        if node.op_type == "Conv":
            convolutions.setdefault(node.input[1], []).append(node)
    records, names = [], []
    for scales in layers:
        weight_name = f"{scales.layer}.weight"
        found = convolutions.get(weight_name, [])
        if len(found) != 1:
            raise EngineError(
                f"{onnx_path}: {len(found)} convolutions have the weights {weight_name}, expected one"
            )
        names.append(_fused_output(graph, found[0]))
        records.append(_record(found[0].input[0], weight_name, names[-1], scales))
    algorithm = {"type": "QUANTIZE", "quantParams": {"layer": records}}
    return Compression(parameters={"version": "0.0.0", "algo": [algorithm]}, int8_tensors=tuple(names))


def _record(input_name: str, weight_name: str, output_name: str, scales: LayerScales) -> dict[str, Any]:
    clamp = {"bits": _BITS, "clampMin": -Q_MAX, "clampMax": Q_MAX}
    return {
        "input": [{"name": input_name, "scales": [scales.input_step], "zeroPoint": 0, **clamp}],
        "weight": [{"name": weight_name, "scales": list(scales.weight_steps), **clamp}],
        "output": [{"name": output_name, "scales": [scales.output_step], "zeroPoint": 0, **clamp}],
    }


def _fused_output(graph: onnx.GraphProto, conv: onnx.NodeProto) -> str:
    """The name of the tensor a convolution writes once the converter has fused a Relu or Clip(0, 6) into
    it.
    """
    readers = [node for node in graph.node if conv.output[0] in node.input]
    is_output = any(conv.output[0] == out.name for out in graph.output)
    if len(readers) == 1 and not is_output and (readers[0].op_type == "Relu" or _is_relu6(graph, readers[0])):
        return str(readers[0].output[0])
    return str(conv.output[0])


def _is_relu6(graph: onnx.GraphProto, node: onnx.NodeProto) -> bool:
    if node.op_type != "Clip" or len(node.input) != 3:
        return False
    limits = tuple(_constant(graph, name) for name in node.input[1:])
    return limits == _RELU6_RANGE


def _constant(graph: onnx.GraphProto, name: str) -> float | None:
    for initializer in graph.initializer:
        if initializer.name == name:
            return float(onnx.numpy_helper.to_array(initializer))
    for node in graph.node:
        if node.op_type == "Constant" and name in node.output:
            return float(onnx.numpy_helper.to_array(node.attribute[0].t))
    return None
