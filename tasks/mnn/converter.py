"""MNN's converter behind a guard: a child process, everything it says read, everything it writes checked.

The converter exits 0 without a file, reports success for broken models, crashes, and stamps a random uuid
into its output. `convert` turns each of these into one error or into the same bytes every time. It never goes
through the wheel's command line, which installs packages and uploads arguments.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.device.engine import ENGINE_VERSION, TensorSpec
from fleet.device.errors import EngineError, UserError
from fleet.lab.child import run_child
from tasks.mnn.audit import Audit, audit
from tasks.mnn.graph import MnnGraph, parse_graph
from tasks.mnn.half import rounded_to_half
from tasks.mnn.onnx_read import write_onnx
from tasks.mnn.request import ConvertOptions, refusals
from tasks.mnn.source import Source, read_source

__all__ = ["Conversion", "ConvertOptions", "convert", "dump", "publish", "supported_ops"]

_CHILD = Path(__file__).with_name("converter_child.py")
_COPIES = 4  # of a model that lie in the temporary folder at once: ONNX, result, and two for its dump
_UUID = re.compile(rb"\x24\0\0\0([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\0")  # a flatbuffer string
# Words of failure, looked for in lines that carry no tensor name.
_FAILURE = re.compile(
    r"\berror|\bfail|not support|don't support|unsupport|invalid|mismatch|can't|cannot|unknown|unexpected"
    r"|assert|abort|exception",
    re.IGNORECASE,
)
_NAMES = re.compile(r"^(input|output)Tensors *:|Check it out ==> ")
_USUAL = re.compile(r"^The device supports|^Start to |^Don't has bizCode|ONNX Model (ir|opset) version")
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # a write that fails names no file
_SUBGRAPHS = "please use MNN::Express::Module"


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A model that was converted, opened, audited and, where its shapes are static, run once."""

    path: Path
    source_sha256: str
    """Of the ONNX file."""
    sha256: str
    size_bytes: int
    engine_version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    int8_ops_ran: int | None
    """Operators that computed in int8 when the model ran; None when its shapes are dynamic."""
    audit: Audit


def convert(onnx: Path, out: Path, options: ConvertOptions | None = None) -> Conversion:
    """Convert `onnx` to `out`, which is replaced only after every check has passed.

    Args:
        onnx: The model; external data lies beside it.
        out: Where the .mnn goes; its folder is made.
        options: What is asked; plain fp32 when None.

    Returns:
        What was written; the same ONNX and options give the same bytes.

    Raises:
        UserError: the ONNX or an option cannot be used, or `out` cannot be written.
        EngineError: the converter crashed, hung or complained, or its model does not run or pass the audit.
    """
    options = options or ConvertOptions()
    source = read_source(onnx)
    _refuse(source, refusals(source, options))
    with _scratch(spare_bytes=_COPIES * source.model.ByteSize()) as folder:
        checked, made = folder / "model.onnx", folder / "model.mnn"
        write_onnx(rounded_to_half(source) if options.fp16 else source.model, checked)
        said = _run(["convert", *_arguments(checked, made, options)], folder, source.name, options.timeout_s)
        _check_said(source.name, said, made)
        _set_uuid(made, checked, options)
        seen = _inspect(made, source, options.timeout_s)
        size_bytes = made.stat().st_size
        found = audit(source, dump(made, timeout_s=options.timeout_s), size_bytes, options)
        _refuse(source, list(found.reasons))
        sha256 = hashlib.sha256(made.read_bytes()).hexdigest()
        publish(made, out)
    return Conversion(
        path=out,
        source_sha256=source.sha256,
        sha256=sha256,
        size_bytes=size_bytes,
        engine_version=ENGINE_VERSION,
        inputs=tuple(_spec(record) for record in seen["inputs"]),
        outputs=tuple(_spec(record) for record in seen["outputs"]),
        int8_ops_ran=seen["ran"] and seen["ran"]["int8_ops"],
        audit=found,
    )


def dump(mnn: Path, *, timeout_s: float = 600.0) -> MnnGraph:
    """The graph of a converted model.

    Raises:
        EngineError: the converter cannot read it.
    """
    with _scratch() as folder:
        stripped, made = folder / "stripped.mnn", folder / "model.json"
        arguments = ["--MNNModel", str(stripped), "--optimizeLevel", "0", "--saveExternalData"]
        said = ""
        for model, step in ((mnn.resolve(), arguments), (stripped, ["--JsonFile", str(made)])):
            said += _run(
                ["convert", "-f", "MNN", "--modelFile", str(model), *step], folder, mnn.name, timeout_s
            )
        if not made.is_file():
            raise EngineError(f"{mnn.name}: the converter could not dump it", engine_said=_words(said))
        weights = stripped.with_name(f"{stripped.name}.weight")
        return parse_graph(
            made.read_text(encoding="utf-8"), weights.read_bytes() if weights.exists() else b""
        )


def supported_ops() -> frozenset[str]:
    """ONNX operator types that this engine's converter knows."""
    with _scratch() as folder:
        said = _run(["convert", "-f", "ONNX", "--OP"], folder, "operator list", 60.0)
    names = said.partition("support Ops")[2].partition("Total:")[0].split()
    if not names:
        raise EngineError("the converter listed no operators", engine_said=_words(said))
    return frozenset(names)


def publish(made: Path, out: Path) -> None:
    """Copy beside `out`, read the copy back, then rename: a reader sees the old file or the whole new one.

    Raises:
        UserError: `out` cannot be written, or holds something else than was written.
    """
    temporary = out.with_name(f".{uuid.uuid4().hex}")  # short: `out` may have the longest name there is
    data = made.read_bytes()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # some disks are full only now
        if temporary.read_bytes() != data:
            raise OSError(errno.EIO, "what was written there reads back as something else")  # noqa: TRY301
        temporary.replace(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(
            f"{out}: {error.strerror}",
            allowed="a file path in a folder one can write to, on a sound disk with space",
            next_step="choose another path for the model",
        ) from error


def _arguments(checked: Path, made: Path, options: ConvertOptions) -> list[str]:
    arguments = ["-f", "ONNX", "--modelFile", str(checked), "--MNNModel", str(made)]
    arguments += ["--bizCode", options.biz_code]
    if options.fp16:
        arguments.append("--fp16")
    if options.weight_bits is not None:
        arguments += ["--weightQuantBits", str(options.weight_bits)]
    if options.compression is not None:
        arguments += ["--compressionParamsFile", str(options.compression.resolve())]
    return arguments


@contextlib.contextmanager
def _scratch(spare_bytes: int = 0) -> Iterator[Path]:
    """A folder for children to work in: the converter spills large weights into its working directory."""
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < spare_bytes:
        raise _no_scratch(f"{free} bytes free, {spare_bytes} needed")
    try:
        scratch = tempfile.TemporaryDirectory(prefix="edgeloop-convert-")
    except OSError as error:
        raise _no_scratch(error.strerror or str(error)) from error
    with scratch as name:
        try:
            yield Path(name)
        except OSError as error:
            if error.errno in _NO_ROOM or str(error.filename).startswith(name):
                raise _no_scratch(error.strerror or str(error)) from error
            raise


def _no_scratch(why: str) -> UserError:
    return UserError(
        f"temporary folder {tempfile.gettempdir()}: {why}",
        allowed=f"a folder one can write to, with space for {_COPIES} copies of the model",
        next_step="free space, or set TMPDIR to another folder",
    )


def _run(command: list[str], folder: Path, model_name: str, timeout_s: float) -> str:
    """Run a child in `folder` to its end and return all it printed.

    Raises:
        EngineError: it hung, crashed or exited with an error.
    """
    who = "the converter" if command[0] == "convert" else "the engine"
    ended = run_child([sys.executable, "-P", str(_CHILD), *command], cwd=folder, timeout_s=timeout_s)
    if ended.failure:
        raise EngineError(f"{model_name}: {who} {ended.failure}", engine_said=_words(ended.said))
    return ended.said


def _words(said: str) -> str:
    """What a child said beyond what every conversion prints."""
    lines = (line.strip() for line in said.splitlines())
    return "; ".join(line for line in lines if line and not _USUAL.search(line) and not _NAMES.search(line))


def _refuse(source: Source, reasons: list[str]) -> None:
    if reasons:
        raise EngineError(f"{source.name}: {'; '.join(reasons)}")


def _check_said(name: str, said: str, made: Path) -> None:
    lines = [line.strip() for line in said.splitlines() if not _NAMES.search(line)]
    complaints = "; ".join(line for line in lines if _FAILURE.search(line))
    if not made.is_file() or made.stat().st_size == 0:
        raise EngineError(f"{name}: the converter wrote no file", engine_said=complaints or _words(said))
    if complaints:
        raise EngineError(f"{name}: the converter complained", engine_said=complaints)
    if _SUBGRAPHS in said:
        raise EngineError(
            f"{name}: has subgraphs (If, Loop, LSTM, GRU, ...), which an engine session cannot run",
            engine_said=next(line for line in lines if _SUBGRAPHS in line),
        )


def _set_uuid(made: Path, checked: Path, options: ConvertOptions) -> None:
    """Replace the random model uuid by one that names the source, the options and the engine."""
    compression = options.compression.read_bytes() if options.compression else b""
    asked = [ENGINE_VERSION, options.biz_code, options.fp16, options.weight_bits]
    parts = (checked.read_bytes(), json.dumps(asked).encode(), compression)
    key = b"".join(hashlib.sha256(part).digest() for part in parts)
    derived = str(uuid.UUID(bytes=hashlib.sha256(key).digest()[:16], version=5)).encode()
    data = made.read_bytes()
    found = _UUID.findall(data)
    if len(found) != 1:  # a tensor's name looks like one too
        found = [dump(made, timeout_s=options.timeout_s).uuid.encode()]
    before, *after = data.split(b"\x24\0\0\0" + found[0] + b"\0")
    if len(after) != 1:
        raise EngineError(f"{made.name}: the model uuid {found[0].decode()} occurs {len(after)} times")
    made.write_bytes(before + b"\x24\0\0\0" + derived + b"\0" + after[0])


def _inspect(made: Path, source: Source, timeout_s: float) -> dict[str, Any]:
    """What the engine sees when it opens and runs the model, in a child: some models crash it."""
    result = made.with_suffix(".inspect.json")
    _run(["inspect", str(made), str(result)], made.parent, source.name, timeout_s)
    seen: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    for side, promised in (("inputs", source.inputs), ("outputs", source.outputs)):
        shapes = {record["name"]: record["shape"] for record in seen[side]}
        if set(shapes) != set(promised):
            raise EngineError(
                f"{source.name}: the converted {side} are {sorted(shapes)}, the ONNX's {sorted(promised)}"
            )
        for name, shape in promised.items():
            if seen["ran"] and -1 not in shape and list(shape) != shapes[name]:
                raise EngineError(
                    f"{source.name}: {name!r} has the shape {shapes[name]}, in the ONNX {list(shape)}"
                )
    return seen


def _spec(record: dict[str, Any]) -> TensorSpec:
    return TensorSpec(name=record["name"], shape=tuple(record["shape"]), dtype=record["dtype"])
