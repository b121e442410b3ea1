"""What no drawn input can show, for want of bits or of sizes tried: told from the graph, said aloud.

Measured on MNN 3.6.1: int64 and float64 are narrowed to 32 bits, some operators compute integers in float32,
a softmax over another axis than the last does not subtract the maximum first, and pools and slices of some
sizes come out with other shapes than ONNX's.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx

from tasks.mnn.onnx_facts import extents
from tasks.mnn.onnx_lint import OVERFLOWS, lint
from tasks.mnn.source import Source, attribute

# Operators that pass values on as they are, and their operands that hold them.
_CARRIERS = frozenset(
    {
        "Cast",
        "Concat",
        "Expand",
        "Flatten",
        "Identity",
        "Reshape",
        "Slice",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Unsqueeze",
    }
)
# Operators that let an index count from the end, and the operand that holds the indices.
_COUNTING = {
    "GatherElements": 1,
    "GatherND": 1,
    "ScatterElements": 1,
    "ScatterND": 1,
    "Scatter": 1,
    "OneHot": 0,
}
_TO_THE_END = 2**31 - 1
_UNTRIED = "the engine may cut elsewhere than ONNX, and only the sizes tried are proven (--shape tries more)"
_POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})
_INTEGER_ARITHMETIC = frozenset(
    {
        "Abs",
        "Add",
        "BitShift",
        "Clip",
        "CumSum",
        "Div",
        "Max",
        "Mean",
        "Min",
        "Mod",
        "Mul",
        "Neg",
        "Pow",
        "Range",
    }
    | {"ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Sub", "Sum"}
)


def index_inputs(model: onnx.ModelProto) -> frozenset[str]:
    """Signed integer inputs that an operator uses as indices which may count from the end."""
    signed = {onnx.TensorProto.INT32, onnx.TensorProto.INT64}
    return frozenset(
        name
        for name in _inputs_of(model, signed)
        if any(_COUNTING.get(node.op_type) == operand for node, operand in _uses(model, name))
    )


def limits(model: onnx.ModelProto) -> list[str]:
    """Sentences on what was not proven, for the result of a conversion that was.

    Args:
        model: With inferred shapes.
    """
    said = []
    if doubles := _inputs_of(model, {onnx.TensorProto.DOUBLE}):
        said.append(f"float64 inputs are computed in float32: {', '.join(doubles)}")
    for name in _inputs_of(model, {onnx.TensorProto.INT32, onnx.TensorProto.INT64}):
        found = {node.op_type for node, _ in _uses(model, name)} & _INTEGER_ARITHMETIC
        if found:
            said.append(
                f"the integer input {name!r} goes into {', '.join(sorted(found))}: integers are computed in"
                " 32 bits, by some operators in float32, so values beyond 2^24 are not proven"
            )
    source, known = Source(name="", model=model, sha256=""), extents(model)
    if any(_rounds_up(node, known) for node in model.graph.node):
        said.append(f"pools with ceil_mode on a dynamic size, whose last window may be padding: {_UNTRIED}")
    if any(_cuts(node, known, source) for node in model.graph.node):
        said.append(f"slices of a dynamic axis, which may be shorter than the slice: {_UNTRIED}")
    if inner := [finding.node for finding in lint(model) if finding.why == OVERFLOWS]:
        said.append(
            f"softmax over an axis that is not the last, {', '.join(inner[:3])}: wrong where its input leaves"
            " -80 to 80"
        )
    return said


Extents = Mapping[str, tuple[int | None, ...]]


def _rounds_up(node: onnx.NodeProto, known: Extents) -> bool:
    """Whether a pool's last window may lie wholly in the padding: the engine keeps it, ONNX does not."""
    if node.op_type not in _POOLS or not attribute(node, "ceil_mode", 0):
        return False
    return None in known.get(node.input[0], (None,) * 3)[2:]


def _cuts(node: onnx.NodeProto, known: Extents, source: Source) -> bool:
    """Whether a slice begins or ends inside a dynamic axis: the engine cuts short ones unlike ONNX."""
    if node.op_type != "Slice":
        return False
    axes_of = known.get(node.input[0])
    starts, ends, axes = (
        source.value(name).astype(np.int64).reshape(-1) if name in source.constants else None
        for name in (*node.input[1:4], "", "", "")[:3]
    )
    if axes_of is None or starts is None or ends is None:
        return True
    numbers = range(len(starts)) if axes is None else (int(axis) for axis in axes)
    inside = (start != 0 or end < _TO_THE_END for start, end in zip(starts, ends, strict=True))
    return any(axes_of[axis] is None and cut for axis, cut in zip(numbers, inside, strict=True))


def _inputs_of(model: onnx.ModelProto, types: set[int]) -> list[str]:
    constants = {tensor.name for tensor in model.graph.initializer}
    return [
        value.name
        for value in model.graph.input
        if value.name not in constants and value.type.tensor_type.elem_type in types
    ]


def _uses(model: onnx.ModelProto, name: str) -> Iterator[tuple[onnx.NodeProto, int]]:
    """Nodes of the main graph that read a tensor, or one that holds the same values, with the operand."""
    carried = {name}
    for node in model.graph.node:  # in topological order
        for operand, tensor in enumerate(node.input):
            if tensor in carried:
                yield node, operand
                if node.op_type in _CARRIERS and (operand == 0 or node.op_type == "Concat"):
                    carried.update(node.output)
