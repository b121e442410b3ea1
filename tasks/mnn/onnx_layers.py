"""Which layers of an ONNX the engine can compute in int8, and why the others stay float."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx

from tasks.mnn.int8_record import fused_activation
from tasks.mnn.source import Source, attribute

_FUSED = frozenset({"BatchNormalization", "Clip", "Relu"})
_AVERAGES = frozenset({"GlobalAveragePool", "AveragePool", "ReduceMean"})


@dataclass(frozen=True, kw_only=True)
class FloatLayer:
    """A convolution or matrix product with fixed weights that computes in float."""

    op: str
    name: str
    """Of its node; of its output where the node has none."""
    why: str


@dataclass(frozen=True, kw_only=True)
class Layers:
    """What became of the layers with weights."""

    int8_count: int
    """Layers that compute in int8."""
    floats: tuple[FloatLayer, ...]
    """The others, where int8 was asked for; empty where it was not."""
    storage: Mapping[str, int]
    """Layers by how their weights are stored."""
    ops_count: int
    """Operators of the converted graph."""
    int8_ops_ran: int | None
    """Operators that computed in int8 when the model ran; None when its shapes are dynamic."""


def why_float(source: Source, node: onnx.NodeProto) -> str:
    """Why the engine computes a layer with weights in float; empty when it can be int8."""
    if node.op_type != "Conv":
        return f"the engine has no int8 {node.op_type} with learned scales"
    if node.input[1] not in source.constants:
        return "its weights are computed, not fixed"
    if node.input[0] not in source.producers:
        return "it reads the model's input"
    if wrong := _wrong_pooling(source, node):
        return wrong
    dims = source.constants[node.input[1]].dims
    groups = attribute(node, "group", 1)
    if len(dims) != 4:
        return f"its kernel has {len(dims) - 2} axes, not 2"
    if groups not in (1, dims[0]) or (groups != 1 and dims[1] != 1):
        return f"it is a grouped convolution (group={groups})"
    if {node.output[0], int8_output(source, node)} & set(source.outputs):
        return "its result is an output of the model"
    return ""


def int8_output(source: Source, conv: onnx.NodeProto) -> str:
    """The tensor by which the converter finds a convolution: its output after the fused activation."""
    return str((fused_activation(source, conv) or conv).output[0])


def float_layers(model: onnx.ModelProto, int8: Collection[str]) -> tuple[FloatLayer, ...]:
    """The layers with fixed weights that are not int8.

    Args:
        model: As it was converted.
        int8: Output tensors of the layers that are.
    """
    source = Source(name="", model=model, sha256="")
    layers = [node for node in model.graph.node if source.weights_of(node)]
    return tuple(
        FloatLayer(
            op=node.op_type,
            name=node.name or node.output[0],
            why=why_float(source, node) or "the compression parameters do not name it",
        )
        for node in layers
        if not set(_names(source, node)) & set(int8)
    )


def _names(source: Source, layer: onnx.NodeProto) -> list[str]:
    """The tensors by which the converter may know a layer: its output, and those of what is fused into it."""
    names = [layer.output[0]]
    while (node := source.sole_reader(names[-1])) is not None and node.op_type in _FUSED:
        names.append(node.output[0])
    return names


def _wrong_pooling(source: Source, conv: onnx.NodeProto) -> str:
    """What is wrong with the pooling that a convolution reads; empty where nothing is.

    Averages are quantised with the scale of their result before they are taken, and maxima of negative values
    are wrong on x86: only a MaxPool right after a Relu is safe.
    """
    node = source.producers[conv.input[0]]
    if node.op_type == "MaxPool":
        before = source.producers.get(node.input[0])
        if before is None or before.op_type != "Relu":
            return "it reads a MaxPool that is not right behind a Relu, which goes wrong in int8 on x86"
    if node.op_type in _AVERAGES:
        return f"it reads a {node.op_type}, which the engine rounds wrongly in int8"
    return ""
