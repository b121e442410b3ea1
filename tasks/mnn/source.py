"""What an ONNX file promises, read without running it: names, shapes, operators, constants, digest."""

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from fleet.device.errors import UserError

# Operators whose second operand the converter may store with fewer bits.
WEIGHTED_OPS = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Source:
    """One ONNX file as the converter will read it."""

    path: Path
    model: onnx.ModelProto
    """Without external data."""
    sha256: str
    """Of the file and of every external data file it names."""
    inputs: dict[str, tuple[int, ...]]
    """Graph inputs that are no initialisers; -1 where the extent is symbolic."""
    outputs: dict[str, tuple[int, ...]]
    constants: dict[str, onnx.TensorProto]
    """Initialisers and Constant nodes by tensor name."""

    @property
    def op_counts(self) -> Counter[str]:
        """Operator types of the main graph; custom domains as `domain::Type`."""
        return Counter(
            f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
            for node in self.model.graph.node
        )

    def weight_names(self) -> set[str]:
        """Constants that are weights of a convolution or matrix product."""
        return {
            name
            for node in self.model.graph.node
            if node.op_type in WEIGHTED_OPS
            for name in node.input[:2]
            if name in self.constants and len(self.constants[name].dims) >= 2
        }


def read_source(path: Path) -> Source:
    """Read an ONNX file's promises.

    Raises:
        UserError: it is missing, no ONNX, has no nodes or outputs, or its external data is missing.
    """
    if not path.is_file() or path.stat().st_size == 0:
        raise _unusable(path, "is missing, empty or no file")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise _unusable(path, f"is no ONNX protobuf ({error})") from error
    graph = model.graph
    if not graph.node or not graph.output or not model.opset_import:
        raise _unusable(path, f"has {len(graph.node)} nodes, {len(graph.output)} outputs, no usable graph")
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            constants.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    return Source(
        path=path,
        model=model,
        sha256=_digest(path, model),
        inputs={i.name: _shape(i) for i in graph.input if i.name not in constants},
        outputs={o.name: _shape(o) for o in graph.output},
        constants=constants,
    )


def constant_bytes(tensor: onnx.TensorProto) -> int:
    """Size of a constant's values as stored by ONNX."""
    itemsize: int = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return math.prod(tensor.dims) * itemsize


def _digest(path: Path, model: onnx.ModelProto) -> str:
    """SHA-256 of the model file, then of its external files in the order of their names."""
    digest = hashlib.sha256()
    _feed(digest, path)
    for name, end in sorted(_external_files(model).items()):
        external = path.parent / name
        if not external.is_file() or external.stat().st_size < end:
            raise _unusable(
                path, f"needs {end} bytes of external data in {name!r}, which is missing or shorter"
            )
        _feed(digest, external)
    return digest.hexdigest()


def _feed(digest: "hashlib._Hash", path: Path) -> None:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)


def _external_files(model: onnx.ModelProto) -> dict[str, int]:
    """External data files to the number of bytes the model reads from each."""
    ends: dict[str, int] = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {e.key: e.value for e in tensor.external_data}
            length = int(entry.get("length", constant_bytes(tensor)))
            name = entry.get("location", "")
            ends[name] = max(ends.get(name, 0), int(entry.get("offset", 0)) + length)
    return ends


def _shape(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    dims = value.type.tensor_type.shape.dim
    return tuple(d.dim_value if d.HasField("dim_value") else -1 for d in dims)


def _unusable(path: Path, why: str) -> UserError:
    return UserError(
        f"{path} {why}",
        allowed="an ONNX file with a graph, and its external data beside it",
        next_step="export the model again, e.g. torch.onnx.export(model.eval(), x, path, dynamo=False)",
    )
