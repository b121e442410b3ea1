"""What an ONNX file promises, read without running it: names, shapes, operators, constants, digest."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx

from tasks.mnn.onnx_read import read_onnx

# Operators whose weights the converter can store with fewer bits.
WEIGHTED_OPS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
ONNX_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One ONNX file as the converter will read it."""

    name: str
    """File name, for messages."""
    model: onnx.ModelProto = field(repr=False)
    """Checked, with its weights inside."""
    sha256: str
    """Of the file itself."""

    @cached_property
    def constants(self) -> dict[str, onnx.TensorProto]:
        """Initialisers and the values of Constant nodes by tensor name."""
        found = {tensor.name: tensor for tensor in self.model.graph.initializer}
        for node in self.model.graph.node:
            tensor = constant_tensor(node)
            if tensor is not None:
                found[node.output[0]] = tensor
        return found

    @cached_property
    def producers(self) -> dict[str, onnx.NodeProto]:
        """Tensor name to the node that writes it."""
        return {name: node for node in self.model.graph.node for name in node.output if name}

    @cached_property
    def readers(self) -> Mapping[str, list[onnx.NodeProto]]:
        """Tensor name to the nodes of the main graph that read it."""
        found: defaultdict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.model.graph.node:
            for name in dict.fromkeys(node.input):
                found[name].append(node)
        return found

    @property
    def inputs(self) -> dict[str, tuple[int, ...]]:
        """Graph inputs that are no initialisers to their shapes; -1 where the extent is symbolic."""
        return {i.name: _shape(i) for i in self.model.graph.input if i.name not in self.constants}

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """Graph outputs to their shapes; -1 where the extent is symbolic, (-1,) where nothing is declared."""
        return {o.name: _shape(o) for o in self.model.graph.output}

    @property
    def op_counts(self) -> Counter[str]:
        """Operators of the main graph that compute, by type; foreign domains as `domain::Type`."""
        return Counter(op_name(node) for node in self.model.graph.node if node.op_type != "Constant")

    def weights_of(self, node: onnx.NodeProto) -> list[str]:
        """The constant weights of a convolution or matrix product, its bias not among them; else none."""
        if node.op_type not in WEIGHTED_OPS:
            return []
        return [n for n in node.input[:2] if n in self.constants and len(self.constants[n].dims) > 1]

    def value(self, name: str) -> npt.NDArray[np.generic]:
        """A constant's values."""
        array: npt.NDArray[np.generic] = onnx.numpy_helper.to_array(self.constants[name])
        return array

    def sole_reader(self, name: str) -> onnx.NodeProto | None:
        """The only node that reads a tensor which is no graph output."""
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self.outputs else None


def read_source(path: Path) -> Source:
    """Read and check an ONNX file.

    Raises:
        UserError: it cannot be used; see `tasks.mnn.onnx_read.read_onnx`.
    """
    model = read_onnx(path)
    return Source(name=path.name, model=model, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def op_name(node: onnx.NodeProto) -> str:
    """A node's type, with its domain when that is not ONNX's own."""
    return str(node.op_type if node.domain in ONNX_DOMAINS else f"{node.domain}::{node.op_type}")


def element_count(tensor: onnx.TensorProto) -> int:
    """Number of elements of a constant."""
    return math.prod(tensor.dims)


def attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    """An integer attribute of a node."""
    return next((int(a.i) for a in node.attribute if a.name == name), default)


def attribute_value(node: onnx.NodeProto, name: str) -> float | None:
    """A float attribute of a node; None where it is left out."""
    return next((float(a.f) for a in node.attribute if a.name == name), None)


def constant_tensor(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """The value of a Constant node, numbers as tensors; None for another node, text and sparse values."""
    if node.op_type != "Constant" or not node.attribute:
        return None
    given = node.attribute[0]
    if given.name == "value":
        tensor: onnx.TensorProto = given.t
        return tensor
    kinds = {"value_float": "float32", "value_floats": "float32", "value_int": "int64", "value_ints": "int64"}
    if given.name not in kinds:
        return None
    value = np.asarray(onnx.helper.get_attribute_value(given), kinds[given.name])
    made: onnx.TensorProto = onnx.numpy_helper.from_array(value)
    return made


def named(nodes: Iterable[onnx.NodeProto]) -> str:
    """Nodes for a message: `Type output`, at most five."""
    shown = [f"{op_name(node)} {node.output[0]!r}" for node in nodes]
    return ", ".join(shown[:5]) + (f" and {len(shown) - 5} more" if len(shown) > 5 else "")


def _shape(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    if not value.type.tensor_type.HasField("shape"):
        return (-1,)
    dims = value.type.tensor_type.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") else -1 for d in dims)
