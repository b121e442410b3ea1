"""Which node of an ONNX a failed conversion or a failed parity starts at."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx

from fleet.device.errors import EngineError
from tasks.mnn.converter import convert
from tasks.mnn.onnx_read import with_shapes, write_onnx
from tasks.mnn.onnx_runs import run_bisect
from tasks.mnn.request import ConvertOptions

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A node to blame."""

    op: str
    node: str
    """Its name, or its output's."""
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.op} {self.node!r}" + (f" ({self.detail})" if self.detail else "")


def diverging_node(
    onnx_path: Path, mnn: Path, feeds: Mapping[str, Array], tolerance: float, *, timeout_s: float
) -> Culprit | None:
    """The first node whose value in the engine leaves the reference's; None when it cannot be told."""
    found = run_bisect(onnx_path, mnn, feeds, tolerance=tolerance, timeout_s=timeout_s)
    return Culprit(op=found["op"], node=found["node"], detail=found["text"]) if found else None


def failing_node(onnx_path: Path, *, timeout_s: float) -> Culprit | None:
    """The last node of the shortest prefix of the graph that does not convert and open, by halving.

    None when the whole graph converts: then the failure lies elsewhere.
    """
    model = with_shapes(onnx.load(str(onnx_path)))
    # Nodes that compute a shape are left out: a graph of nothing else runs no operator.
    int64 = onnx.TensorProto.INT64
    values = (*model.graph.value_info, *model.graph.output)
    typed = {value.name for value in values if value.type.tensor_type.elem_type != int64}
    nodes = [
        n for n in model.graph.node if n.op_type != "Constant" and typed.issuperset(filter(None, n.output))
    ]
    plain = ConvertOptions(timeout_s=timeout_s)
    if _converts(model, plain):
        return None
    if not nodes:
        return None
    good, bad = -1, len(nodes) - 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if _converts(_prefix(model, nodes[middle]), plain):
            good = middle
        else:
            bad = middle
    return Culprit(op=nodes[bad].op_type, node=nodes[bad].name or nodes[bad].output[0])


def _converts(model: onnx.ModelProto, options: ConvertOptions) -> bool:
    with tempfile.TemporaryDirectory(prefix="edgeloop-prefix-") as name:
        path = Path(name) / "prefix.onnx"
        write_onnx(model, path)
        try:
            convert(path, path.with_suffix(".mnn"), options)
        except EngineError:
            return False
    return True


def _prefix(model: onnx.ModelProto, last: onnx.NodeProto) -> onnx.ModelProto:
    """The part of the graph that `last` needs, with the outputs of `last` as its outputs."""
    producers = {tensor: node for node in model.graph.node for tensor in node.output}
    needed: set[str] = set()
    waiting = list(last.output)
    while waiting:
        tensor = waiting.pop()
        if tensor and tensor not in needed:
            needed.add(tensor)
            waiting += producers[tensor].input if tensor in producers else []
    part = onnx.ModelProto()
    part.CopyFrom(model)
    kept = [node for node in model.graph.node if needed & set(node.output)]
    known = {v.name: v for v in (*model.graph.value_info, *model.graph.output)}
    del part.graph.node[:], part.graph.output[:]
    part.graph.node.extend(kept)
    part.graph.output.extend(known[tensor] for tensor in last.output if tensor)
    for field in (part.graph.initializer, part.graph.input):
        unused = [value for value in field if value.name not in needed]
        for value in unused:
            field.remove(value)
    return part
