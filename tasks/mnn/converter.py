"""MNN's converter behind a guard: a child process, everything it says read, everything it writes checked.

The converter exits 0 without a file, reports success for broken models, crashes, and stamps a random uuid
into its output. `convert` turns each of these into one error or into the same bytes every time. It never goes
through the wheel's command line, which installs packages and uploads arguments.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.device.engine import ENGINE_VERSION, TensorSpec
from fleet.device.errors import EngineError, UserError
from tasks.mnn.graph import MnnGraph, parse_graph
from tasks.mnn.source import Source, read_source

_CHILD = Path(__file__).with_name("converter_child.py")
_UUID = re.compile(rb"\x24\0\0\0([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\0")  # a flatbuffer string
# Words of failure, looked for in lines that carry no tensor name.
_FAILURE = re.compile(
    r"\berror|\bfail|not support|don't support|unsupport|invalid|mismatch|can't|cannot|unknown|assert|abort"
    r"|exception|MNN::Express::Module",
    re.IGNORECASE,
)
_NAMES_ONLY = re.compile(r"^(input|output)Tensors *:|Check it out ==> ")
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """What is asked of the converter; everything but the timeout goes into the model's uuid."""

    biz_code: str = "edgeloop"
    """Business tag stored in the model."""
    fp16: bool = False
    """Store weights in half precision."""
    weight_bits: int | None = None
    """8: weight-only int8 of the layers that `compression` does not name; None: as in the ONNX."""
    compression: Path | None = None
    """MNN's compression parameters (JSON): the scales of the int8 layers."""
    timeout_s: float = 600.0
    """Limit for each step of the conversion."""


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """A model that was converted, opened and, where its shapes are static, run once."""

    path: Path
    source_sha256: str
    """Of the ONNX and its external data."""
    sha256: str
    size_bytes: int
    engine_version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    log: tuple[str, ...]
    """Everything the converter said, line by line."""


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
        EngineError: the converter crashed, hung, complained, or wrote nothing or a model that does not open.
    """
    options = options or ConvertOptions()
    source = read_source(onnx)
    with tempfile.TemporaryDirectory(prefix="edgeloop-convert-") as folder:
        made = Path(folder) / "model.mnn"
        said = _run(["convert", *_arguments(source, made, options)], onnx.name, options.timeout_s)
        _check_said(onnx.name, said, made)
        _set_uuid(made, source, options)
        seen = _inspect(made, onnx.name, options.timeout_s)
        _check_interface(source, seen)
        _publish(made, out)
    data = out.read_bytes()
    return Conversion(
        path=out,
        source_sha256=source.sha256,
        sha256=hashlib.sha256(data).hexdigest(),
        size_bytes=len(data),
        engine_version=str(seen["engine_version"]),
        inputs=tuple(TensorSpec(**{**s, "shape": tuple(s["shape"])}) for s in seen["inputs"]),
        outputs=tuple(TensorSpec(**{**s, "shape": tuple(s["shape"])}) for s in seen["outputs"]),
        log=tuple(said.splitlines()),
    )


def dump(mnn: Path, *, timeout_s: float = 600.0) -> MnnGraph:
    """The graph of a converted model.

    Raises:
        EngineError: the converter cannot read it.
    """
    return parse_graph(_dump_json(mnn, timeout_s))


def _dump_json(mnn: Path, timeout_s: float) -> str:
    """The model as the converter prints it: JSON with every operator, scale and weight."""
    with tempfile.TemporaryDirectory(prefix="edgeloop-dump-") as folder:
        made = Path(folder) / "model.json"
        arguments = ["-f", "MNN", "--modelFile", str(mnn.resolve()), "--JsonFile", str(made)]
        said = _run(["convert", *arguments], mnn.name, timeout_s)
        if not made.is_file():
            raise EngineError(f"{mnn.name}: the converter could not dump it", engine_said=said.strip())
        return made.read_text(encoding="utf-8")


def _arguments(source: Source, made: Path, options: ConvertOptions) -> list[str]:
    arguments = ["-f", "ONNX", "--modelFile", str(source.path.resolve()), "--MNNModel", str(made)]
    arguments += ["--bizCode", options.biz_code]
    if options.fp16:
        arguments.append("--fp16")
    if options.weight_bits is not None:
        arguments += ["--weightQuantBits", str(options.weight_bits)]
    if options.compression is not None:
        arguments += ["--compressionParamsFile", str(options.compression.resolve())]
    return arguments


def _run(command: list[str], model_name: str, timeout_s: float) -> str:
    """Run the child to its end and return all it printed.

    Raises:
        EngineError: it hung, crashed or exited with an error.
    """
    limits = f"{8 * _GIB},{4 * _GIB},{int(timeout_s) + 60}"
    argv = [sys.executable, "-P", str(_CHILD), limits, *command]
    with tempfile.TemporaryFile() as sink:
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        ) as child:
            try:
                code = child.wait(timeout_s)
            except subprocess.TimeoutExpired as error:
                raise EngineError(
                    f"{model_name}: {command[0]} ran past its limit of {timeout_s:g} s"
                ) from error
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
        sink.seek(0)
        said = sink.read().decode("utf-8", "replace")
    if code != 0:
        how = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        raise EngineError(f"{model_name}: {command[0]} {how}", engine_said=said.strip())
    return said


def _check_said(name: str, said: str, made: Path) -> None:
    lines = [line.strip() for line in said.splitlines() if not _NAMES_ONLY.search(line)]
    complaints = [line for line in lines if _FAILURE.search(line)]
    if complaints or not made.is_file() or made.stat().st_size == 0:
        what = "wrote no file" if not made.is_file() else "complained"
        raise EngineError(f"{name}: the converter {what}", engine_said="; ".join(complaints or lines))


def _set_uuid(made: Path, source: Source, options: ConvertOptions) -> None:
    """Replace the random model uuid by one that names the source and the options."""
    data = made.read_bytes()
    found = _UUID.findall(data)
    if len(found) != 1:
        found = [dump(made, timeout_s=options.timeout_s).uuid.encode()]  # a tensor's name looks like one
    compression = options.compression.read_bytes() if options.compression else b""
    asked = [source.sha256, ENGINE_VERSION, options.biz_code, options.fp16, options.weight_bits]
    key = json.dumps(asked).encode() + compression
    derived = str(uuid.UUID(bytes=hashlib.sha256(key).digest()[:16], version=5)).encode()
    made.write_bytes(data.replace(b"\x24\0\0\0" + found[0] + b"\0", b"\x24\0\0\0" + derived + b"\0"))


def _inspect(made: Path, name: str, timeout_s: float) -> dict[str, Any]:
    """What the engine sees when it opens and runs the model, in a child: some models crash it."""
    result = made.with_suffix(".inspect.json")
    _run(["inspect", str(made), str(result)], name, timeout_s)
    seen: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return seen


def _check_interface(source: Source, seen: dict[str, Any]) -> None:
    for side, promised in (("inputs", source.inputs), ("outputs", source.outputs)):
        names = [spec["name"] for spec in seen[side]]
        if sorted(names) != sorted(promised):
            raise EngineError(
                f"{source.path.name}: the model's {side} are {names}, the ONNX's {sorted(promised)}"
            )


def _publish(made: Path, out: Path) -> None:
    """Copy beside `out`, then rename: a reader sees the old file or the whole new one."""
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(made.read_bytes())
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"{out}: {error.strerror}",
            allowed="a file path in a folder one can write to, on a disk with space",
            next_step="choose another --out",
        ) from error
