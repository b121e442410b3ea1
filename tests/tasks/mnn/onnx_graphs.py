"""Small ONNX graphs for tests, and ways to change one without changing what is wrong with it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Value = tuple[str, Sequence[int | str] | None] | tuple[str, Sequence[int | str] | None, int]


def node(op: str, inputs: str, outputs: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    """A node with its tensor names separated by blanks; `_` leaves an optional input out."""
    reads, writes = ["" if name == "_" else name for name in inputs.split()], outputs.split()
    return helper.make_node(op, reads, writes, name=f"{op}_{writes[0]}", domain=domain, **attributes)


def graph(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    constants: Mapping[str, Any] | None = None,
    *,
    opset: int = 17,
) -> onnx.ModelProto:
    """A model; values are (name, shape) or (name, shape, element type), a shape of None is left open."""
    tensors = [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()]
    made = helper.make_graph(
        list(nodes), "g", [_info(v) for v in inputs], [_info(v) for v in outputs], tensors
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)])
    model.ir_version = 8
    return model


def _info(value: Value) -> onnx.ValueInfoProto:
    element = value[2] if len(value) == 3 else TensorProto.FLOAT
    return helper.make_tensor_value_info(value[0], element, value[1])


def save(model: onnx.ModelProto, path: Path) -> Path:
    """Write a model and return its path."""
    path.write_bytes(model.SerializeToString())
    return path


def weights(*shape: int, seed: int = 0, scale: float = 0.5) -> np.ndarray:
    """Reproducible float32 weights."""
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def mutated(model: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """The same kind of graph: tensors and nodes renamed, weights drawn anew, layers before and behind.

    Float inputs are scaled by 3/4 before the graph and float outputs negated behind it.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    rng = np.random.default_rng(seed)
    for tensor in copy.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) > 1:
            values = numpy_helper.to_array(tensor)
            drawn = rng.permutation(values.ravel()).reshape(values.shape)
            tensor.CopyFrom(numpy_helper.from_array(drawn, tensor.name))
    _rename(copy.graph, {})
    _wrap(copy.graph)
    return copy


def _rename(part: onnx.GraphProto, outer: dict[str, str]) -> None:
    names = dict(outer)

    def new(name: str) -> str:
        return names.setdefault(name, f"blk.{len(names)}/t") if name else ""

    for value in (*part.input, *part.output, *part.value_info, *part.initializer):
        value.name = new(value.name)
    for index, item in enumerate(part.node):
        item.name = f"blk.{index}/{item.op_type}"
        for field in (item.input, item.output):
            renamed = [new(name) for name in field]
            del field[:]
            field.extend(renamed)
        for attribute in item.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                _rename(attribute.g, names)


def _wrap(part: onnx.GraphProto) -> None:
    constants = {tensor.name for tensor in part.initializer}
    floats = [v for v in (*part.input, *part.output) if v.type.tensor_type.elem_type == TensorProto.FLOAT]
    before, behind = [], []
    for value in floats:
        inner = f"{value.name}.inner"
        if value.name in constants:
            continue
        if value in part.input:
            _replace(part, value.name, inner, sides=("input",))
            before.append(helper.make_node("Mul", [value.name, "wrap.scale"], [inner], name=f"scale {inner}"))
        else:
            _replace(part, value.name, inner, sides=("input", "output"))
            behind.append(helper.make_node("Neg", [inner], [value.name], name=f"negate {inner}"))
    nodes = [*before, *part.node, *behind]
    del part.node[:]
    part.node.extend(nodes)
    if before:
        part.initializer.append(numpy_helper.from_array(np.array([0.75], np.float32), "wrap.scale"))


def _replace(part: onnx.GraphProto, old: str, new: str, *, sides: Sequence[str]) -> None:
    for item in part.node:
        for side in sides:
            names = getattr(item, side)
            replaced = [new if name == old else name for name in names]
            del names[:]
            names.extend(replaced)
