"""What the engine's number formats cannot hold and no drawn input can show: told from the graph, said aloud.

Measured on MNN 3.6.1: int64 and float64 are narrowed to 32 bits, some operators compute integers in float32,
and a softmax over another axis than the last does not subtract the maximum first.
"""

from collections.abc import Iterator

import onnx

from tasks.mnn.onnx_lint import OVERFLOWS, lint
from tasks.mnn.source import attribute

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
    if _is_dynamic(model):
        if any(node.op_type in _POOLS and attribute(node, "ceil_mode", 0) for node in model.graph.node):
            said.append(
                "pools with ceil_mode: the engine keeps a last window that lies wholly in the padding, ONNX"
                " does not; sizes other than those tried are not proven (--shape tries more)"
            )
        if any(node.op_type == "Slice" for node in model.graph.node):
            said.append(
                "slices of a dynamic axis: an axis shorter than a slice's start or end is cut elsewhere than"
                " in ONNX; sizes other than those tried are not proven (--shape tries more)"
            )
    if inner := [finding.node for finding in lint(model) if finding.why == OVERFLOWS]:
        said.append(
            f"softmax over an axis that is not the last, {', '.join(inner[:3])}: wrong where its input leaves"
            " -80 to 80"
        )
    return said


def _is_dynamic(model: onnx.ModelProto) -> bool:
    """Whether an axis other than the first, which is the batch, has no fixed size."""
    return any(
        not dim.HasField("dim_value")
        for value in model.graph.input
        for dim in value.type.tensor_type.shape.dim[1:]
    )


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
