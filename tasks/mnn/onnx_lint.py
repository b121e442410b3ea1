"""What MNN's converter is known to get wrong, told from the graph alone.

Parity is the judge; these rules come first because they are cheap, name the operator, and see what a
comparison on a few inputs can miss. Every rule was measured on MNN 3.6.1: a finding is `certain` when no such
graph came out right, otherwise it is only named as the likely culprit when conversion or parity fails.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from tasks.mnn.onnx_facts import opset, ranks
from tasks.mnn.source import ONNX_DOMAINS, constant_tensor

OVERFLOWS = "over an axis that is not the last overflows where its input leaves -80 to 80"
"""`Finding.why` of a softmax that is right on small inputs only."""
_PER_AXIS_OPSET = 13  # before, a softmax flattened all axes from its own on


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One operator that will not survive, or may not."""

    op: str
    """Operator type, with its domain unless that is ONNX's own."""
    node: str
    """The node's name, or its output's."""
    why: str
    certain: bool

    def __str__(self) -> str:
        return f"{self.op} {self.node!r}: {self.why}"


@dataclass(frozen=True)
class Node:
    """A node with what the rules ask about it."""

    proto: onnx.NodeProto
    opset: int
    constants: dict[str, onnx.TensorProto]
    ranks: dict[str, int]
    used: frozenset[str]
    """Tensors that some node reads or the graph returns."""

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value, text decoded."""
        for attribute in self.proto.attribute:
            if attribute.name == name:
                value = onnx.helper.get_attribute_value(attribute)
                return value.decode() if isinstance(value, bytes) else value
        return default

    def constant(self, index: int) -> npt.NDArray[Any] | None:
        """The value of an input, when it is a constant."""
        names = self.proto.input
        if index >= len(names) or names[index] not in self.constants:
            return None
        return np.asarray(onnx.numpy_helper.to_array(self.constants[names[index]]))

    @property
    def rank(self) -> int | None:
        """Number of axes of the first input, when known."""
        return self.ranks.get(self.proto.input[0]) if self.proto.input else None

    def returns(self, index: int) -> bool:
        """Whether output `index` exists and is used."""
        return index < len(self.proto.output) and self.proto.output[index] in self.used


Rule = Callable[[Node], str]
"""Why the node goes wrong; empty when it does not."""


def lint(model: onnx.ModelProto) -> list[Finding]:
    """Every finding, in the order of the nodes, subgraphs included."""
    nodes = list(_nodes(model.graph))
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in nodes:
        tensor = constant_tensor(node)
        if tensor is not None:
            constants[node.output[0]] = tensor
    used = frozenset(name for node in nodes for name in node.input) | {o.name for o in model.graph.output}
    version, known_ranks = opset(model), ranks(model)
    findings: list[Finding] = []
    for proto in nodes:
        findings += _examine(Node(proto, version, constants, known_ranks, used))
    return findings


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _examine(node: Node) -> Iterator[Finding]:
    proto = node.proto
    name = proto.name or (proto.output[0] if proto.output else "")
    if proto.domain not in ONNX_DOMAINS:
        why = f"belongs to the domain {proto.domain!r}, but the converter reads only the operator's name"
        yield Finding(op=f"{proto.domain}::{proto.op_type}", node=name, why=why, certain=True)
        return
    for rules, certain in ((_CERTAIN, True), (_SUSPECT, False)):
        for rule in rules.get(proto.op_type, ()):
            if why := rule(node):
                yield Finding(op=proto.op_type, node=name, why=why, certain=certain)


def _always(why: str) -> Rule:
    return lambda _node: why


def _trained(node: Node) -> str:
    statistics = node.opset < 14 and any(node.returns(i) for i in range(1, 5))
    if node.attribute("training_mode", 0) or statistics:
        return "is in training mode: the model was exported without eval()"
    return ""


def _dropping(node: Node) -> str:
    training = node.constant(2)
    if training is not None and training.any():
        return "is in training mode: the model was exported without eval()"
    return ""


def _dilated(node: Node) -> str:
    dilations = node.attribute("dilations") or [1]
    return f"dilations={dilations} are ignored" if max(dilations) > 1 else ""


def _same_lower(node: Node) -> str:
    return "auto_pad=SAME_LOWER is read as SAME_UPPER" if node.attribute("auto_pad") == "SAME_LOWER" else ""


def _pool_indices(node: Node) -> str:
    return "its second output, the indices, is wrong" if node.returns(1) else ""


def _reduction(node: Node) -> str:
    reduction = node.attribute("reduction", "none")
    return f"reduction={reduction} is ignored" if reduction != "none" else ""


def _negative_indices(node: Node) -> str:
    indices = node.constant(1)
    if indices is not None and indices.size and indices.min() < 0:
        return "negative indices are not counted from the end"
    return ""


def _antialias(node: Node) -> str:
    return "antialias=1 is ignored" if node.attribute("antialias", 0) else ""


def _aspect(node: Node) -> str:
    policy = node.attribute("keep_aspect_ratio_policy", "stretch")
    return f"keep_aspect_ratio_policy={policy} is ignored" if policy != "stretch" else ""


def _resize(node: Node) -> str:
    mode, how = (
        node.attribute("mode", "nearest"),
        node.attribute("coordinate_transformation_mode", "half_pixel"),
    )
    nearest = node.attribute("nearest_mode", "round_prefer_floor")
    if node.attribute("axes") is not None:
        return "axes are ignored"
    if node.rank is not None and node.rank != 4:
        return f"mode={mode} on {node.rank} axes"
    return f"mode={mode}, coordinate_transformation_mode={how}, nearest_mode={nearest}"


def _flattening(node: Node) -> str:
    axis = node.attribute("axis", 1 if node.opset < _PER_AXIS_OPSET else -1)
    if node.rank is None or axis in (-1, node.rank - 1):
        return ""
    if node.opset < _PER_AXIS_OPSET:
        return (
            f"of opset {node.opset} flattens all axes from {axis} on; the converter takes axis {axis} alone"
        )
    return OVERFLOWS


def _negative_pads(node: Node) -> str:
    pads = node.constant(1)
    pads = np.asarray(node.attribute("pads") or [0]) if pads is None else pads
    return f"pads={pads.tolist()}: a negative pad crops" if pads.min() < 0 else ""


def _output_shape(node: Node) -> str:
    shape = node.attribute("output_shape")
    return f"output_shape={list(shape)} is ignored" if shape else ""


def _window_rank(node: Node) -> str:
    return f"on {node.rank} axes" if node.rank is not None and node.rank != 4 else ""


def _direction(node: Node) -> str:
    return f"direction={node.attribute('direction', 'forward')}"


def _selected_last(node: Node) -> str:
    return "select_last_index=1 is ignored" if node.attribute("select_last_index", 0) else ""


def _grid(node: Node) -> str:
    return f"mode={node.attribute('mode')}, padding_mode={node.attribute('padding_mode')}"


_QUANTISED = _always("is part of a quantised graph; export the float graph and quantise it with --int8")
_RANDOM = _always("draws random numbers, so no result can be checked")

_CERTAIN: dict[str, tuple[Rule, ...]] = {
    "BatchNormalization": (_trained,),
    "Dropout": (_dropping,),
    "MaxPool": (_dilated, _pool_indices),
    "AveragePool": (_dilated,),
    "ScatterElements": (_reduction, _negative_indices),
    "ScatterND": (_reduction,),
    "GatherElements": (_negative_indices,),
    "GatherND": (_negative_indices,),
    "ArgMax": (_selected_last,),
    "ArgMin": (_selected_last,),
    **dict.fromkeys(
        (
            "QuantizeLinear",
            "DynamicQuantizeLinear",
            "QLinearConv",
            "QLinearMatMul",
            "ConvInteger",
            "MatMulInteger",
        ),
        (_QUANTISED,),
    ),
    **dict.fromkeys(
        (
            "RandomNormal",
            "RandomNormalLike",
            "RandomUniform",
            "RandomUniformLike",
            "Bernoulli",
            "Multinomial",
        ),
        (_RANDOM,),
    ),
}

_SUSPECT: dict[str, tuple[Rule, ...]] = {
    "Cast": (lambda node: f"to {onnx.TensorProto.DataType.Name(node.attribute('to'))}",),
    "Conv": (_same_lower, _window_rank),
    "ConvTranspose": (_same_lower, _output_shape, _window_rank),
    "MaxPool": (_same_lower, _window_rank),
    "AveragePool": (_same_lower, _window_rank),
    "DequantizeLinear": (_QUANTISED,),
    "Resize": (_antialias, _aspect, _resize),
    "Upsample": (_resize,),
    "GridSample": (_grid,),
    "Softmax": (_flattening,),
    "LogSoftmax": (_flattening,),
    "Pad": (_negative_pads,),
    "LSTM": (_direction,),
    "GRU": (_direction,),
    "RNN": (_direction,),
    "If": (_always("the session interface runs no subgraphs"),),
    "Loop": (_always("the session interface runs no subgraphs"),),
    "Scan": (_always("the session interface runs no subgraphs"),),
    "TopK": (_always("equal values come in another order"),),
    "Where": (_always("an operand that is broadcast is read wrongly"),),
    "Round": (_always("halves do not go to the even neighbour"),),
}
