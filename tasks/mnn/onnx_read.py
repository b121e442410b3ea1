"""Reading an ONNX from anywhere: checked, bounded, its external data confined, and written out as one file.

The converter and ONNX Runtime are native code that follows whatever paths and sizes a file names; they get to
see only what passed here.
"""

from collections.abc import Iterator
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import external_data_helper

from fleet.device.errors import EngineError, UserError

_MAX_BYTES = (1 << 31) - (1 << 20)  # a protobuf message ends at 2 GiB
_LONGEST = 500  # characters of what is said of a file, which may quote a name of any length from it
_NEXT = "export the model again, e.g. torch.onnx.export(model.eval(), x, path, dynamo=False)"


def read_onnx(path: Path) -> onnx.ModelProto:
    """Load and check a model, external data included.

    Raises:
        UserError: missing, damaged, too large, or external data that is missing, short or outside the model's
            folder.
        EngineError: a graph that onnx.checker rejects.
    """
    try:
        found = path.is_file()
    except OSError as error:  # a name that is too long
        raise _no_file(path, error.strerror or str(error)) from error
    if not found:
        raise _no_file(path)
    if not 0 < path.stat().st_size <= _MAX_BYTES:
        raise _unusable(f"{path} has {path.stat().st_size} bytes", f"1 to {_MAX_BYTES} bytes")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except (DecodeError, OSError, ValueError) as error:
        raise _unusable(f"{path} is no ONNX protobuf ({error})", "an .onnx file") from error
    if not model.graph.node or not model.graph.output:
        raise _unusable(f"{path} has no nodes or no outputs", "a graph that computes something")
    _check_opset(path, model)
    _load_external(path, model)
    _check_graph(path, model)
    return model


def with_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with the shape of every tensor, as far as it can be inferred; what the graph declares gives way.

    Raises:
        EngineError: the shapes contradict each other.
    """
    try:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError) as error:
        raise EngineError(f"the graph's shapes contradict each other: {_first_line(error)}") from error


def write_onnx(model: onnx.ModelProto, path: Path) -> None:
    """Write the model as one file."""
    path.write_bytes(model.SerializeToString(deterministic=True))


def _check_graph(path: Path, model: onnx.ModelProto) -> None:
    """Ask onnx.checker; it insists on shapes of outputs, which exporters may leave out and engines ignore.

    Raises:
        EngineError: a graph that it rejects.
    """
    open_outputs = [
        o.type.tensor_type for o in model.graph.output if not o.type.tensor_type.HasField("shape")
    ]
    for output in open_outputs:
        output.shape.SetInParent()
    try:
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, ValueError) as error:
        raise EngineError(f"{path.name} is no valid ONNX: {_first_line(error)}") from error
    finally:
        for output in open_outputs:
            output.ClearField("shape")


def _check_opset(path: Path, model: onnx.ModelProto) -> None:
    newest = onnx.defs.onnx_opset_version()
    opsets = [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")]
    if len(opsets) != 1 or not 1 <= opsets[0] <= newest:
        raise _unusable(f"{path} imports the ONNX operator sets {opsets}", f"one, of version 1 to {newest}")


def _load_external(path: Path, model: onnx.ModelProto) -> None:
    """Read the external data into the model; onnx itself confines it to the model's folder.

    Raises:
        UserError: a location outside the folder, data that is missing or too short, or more than a model may
        have.
    """
    total = path.stat().st_size
    try:
        for tensor in _tensors(model.graph):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                info = external_data_helper.ExternalDataInfo(tensor)
                # A tensor without a length takes the file from its offset to its end.
                total += (path.parent / info.location).stat().st_size if info.length is None else info.length
        if total > _MAX_BYTES:
            raise _unusable(f"{path} and its external data have {total} bytes", f"at most {_MAX_BYTES} bytes")
        external_data_helper.load_external_data_for_model(model, str(path.parent))
    except (OSError, ValueError, TypeError, RuntimeError, onnx.checker.ValidationError) as error:
        raise UserError(  # RuntimeError: what the system says of a path, such as a name that is too long
            f"{path}: external data: {_first_line(error)}",
            allowed="data files in the model's own folder, as long as the model says",
            next_step="put the files that were exported with the model beside it, or export it as one file",
        ) from error


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every tensor stored in a graph and its subgraphs."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _first_line(error: Exception) -> str:
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


def _no_file(path: Path, why: str = "") -> UserError:
    here = path.parent
    models = sorted(p.name for p in here.glob("*.onnx") if p.is_file()) if not why and here.is_dir() else []
    if why:
        got = f"{str(path)[:_LONGEST]!r}: {why}"
    elif path.exists():
        got = f"{path} is no file but a folder or a device"
    elif here.is_dir():
        got = f"there is no file {path}"
    else:
        got = f"there is no file {path}, nor the folder it would be in"
    return UserError(
        got,
        allowed="the path of an .onnx file" + (f"; {here} has {', '.join(models[:5])}" if models else ""),
        next_step="correct the path",
    )


def _unusable(got: str, allowed: str) -> UserError:
    return UserError(got, allowed=allowed, next_step=_NEXT)
