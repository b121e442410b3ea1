"""Saying the same graph in words that MNN's converter understands.

The converter reads only the first operator set, ignores domains and functions, and takes zero or garbage for
some attributes that ONNX lets one leave out. Each rewrite keeps the meaning; parity with the graph as it came
is measured afterwards, so one that does not is found.
"""

from dataclasses import dataclass

import onnx
from onnx import inliner

_STANDARD = ("", "ai.onnx")
_WINDOWED = frozenset({"Conv", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"})


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """One way to say a graph."""

    model: onnx.ModelProto
    notes: tuple[str, ...]
    """A sentence for each rewrite; empty for the graph as it came."""


def rewrites(model: onnx.ModelProto) -> list[Rewritten]:
    """The ways to say a graph that are worth trying, the least changed first.

    The first has the model's functions inlined and its operator sets in order, where it needs that. The
    second, if it differs, also has every default of ONNX written out: that mends pooling without strides, but
    the converter refuses some values that it would have taken for granted.
    """
    least, notes = _in_order(model)
    explicit = onnx.ModelProto()
    explicit.CopyFrom(least)
    weights = {tensor.name: tensor.dims for tensor in explicit.graph.initializer}
    opset = explicit.opset_import[0].version
    written = [node.op_type for node in explicit.graph.node if _write_defaults(node, opset, weights)]
    ways = [Rewritten(model=least, notes=tuple(notes))]
    if written:
        said = f"wrote out the defaults of {', '.join(sorted(set(written)))}"
        ways.append(Rewritten(model=explicit, notes=(*notes, said)))
    return ways


def _in_order(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Functions inlined, ONNX's own operator set first."""
    notes = []
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    if copy.functions:
        notes.append(f"inlined the model's own functions {', '.join(sorted(f.name for f in copy.functions))}")
        copy = inliner.inline_local_functions(copy)
    first = copy.opset_import[0].domain
    if first not in _STANDARD:
        notes.append(f"put ai.onnx before {first!r} in the list of operator sets")
        ordered = sorted(copy.opset_import, key=lambda o: o.domain not in _STANDARD)
        del copy.opset_import[:]
        copy.opset_import.extend(ordered)
    return copy, notes


def _write_defaults(node: onnx.NodeProto, opset: int, weights: dict[str, list[int]]) -> bool:
    """Add the attributes that ONNX defines a default for and the node leaves out; whether there were any."""
    if node.domain not in _STANDARD or not onnx.defs.has(node.op_type, opset):
        return False
    before = len(node.attribute)
    present = {attribute.name for attribute in node.attribute}
    for name, attribute in onnx.defs.get_schema(node.op_type, opset).attributes.items():
        if name not in present and attribute.default_value.type != onnx.AttributeProto.UNDEFINED:
            node.attribute.append(attribute.default_value)
    if node.op_type in _WINDOWED:
        _write_window(node, present, weights)
    return len(node.attribute) > before


def _write_window(node: onnx.NodeProto, present: set[str], weights: dict[str, list[int]]) -> None:
    """The defaults of a sliding window depend on its rank, so the schema does not hold them."""
    kernel = next((list(a.ints) for a in node.attribute if a.name == "kernel_shape"), None)
    if kernel is None and len(node.input) > 1 and node.input[1] in weights:
        kernel = list(weights[node.input[1]][2:])
        node.attribute.append(onnx.helper.make_attribute("kernel_shape", kernel))
    if kernel is not None and "strides" not in present:
        node.attribute.append(onnx.helper.make_attribute("strides", [1] * len(kernel)))
