"""MNN's own post-training quantisation behind a guard: a child process, its words read, its graph audited.

The tool says "Quantize model done!" over models that are still float, ignores the list of layers to skip in
one of its three methods, and corrupts its heap in another: `quantise` turns each into an error or into a
number one can read. It never goes through the wheel's command line, which installs packages
and uploads arguments.
"""

import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import cv2
import numpy as np
import numpy.typing as npt

from fleet.device.errors import EngineError, UserError
from fleet.device.preprocess import Preprocess
from fleet.lab.child import run_child
from tasks.mnn.converter import convert, dump
from tasks.mnn.graph import MnnGraph, MnnOp
from tasks.mnn.source import read_source

Method = Literal["KL", "ADMM", "EMA"]
METHODS: tuple[Method, ...] = get_args(Method)

_CONFIG, _RESULT = "config.json", "result.json"
_CHILD = Path(__file__).with_name("ptq_child.py")
_BATCH = 32  # of EMA, which averages ranges over batches
_CLAMP = 127
_FAILURE = re.compile(
    r"\berror|\bfail|not support|unsupport|invalid|can't|cannot|abort|exception", re.IGNORECASE
)
_NAMES = re.compile(r"Tensors *:|skip quant op name|Check it out ==> ")


@dataclass(frozen=True, kw_only=True)
class ToolResult:
    """A model that MNN's tool quantised, opened and run once."""

    path: Path
    int8_layers: tuple[str, ...]
    """Convolutions (the engine's linear layers among them) with int8 weights and int8 arithmetic."""
    float_layers: tuple[str, ...]
    """Those that stayed float."""
    not_skipped: tuple[str, ...]
    """Layers that were to stay float and are int8 all the same."""
    int8_ops_count: int
    """Operators that computed in int8 in a run."""


def quantise(
    onnx: Path,
    images: npt.NDArray[np.uint8],
    preprocess: Preprocess,
    out: Path,
    method: Method,
    *,
    skip: Sequence[str] = (),
    timeout_s: float = 600.0,
) -> ToolResult:
    """Quantise a float model with MNN's own tool.

    Args:
        onnx: The float model, batch norms folded.
        images: Calibration images, uint8 RGB [N, H, W, 3]; the tool gets them as the preprocess resizes them.
        preprocess: How an image becomes an input.
        out: Where the int8 model goes, written only when it is one.
        method: How the tool finds activation scales.
        skip: Operators to leave float: output tensors of the ONNX's layers. ADMM leaves the first one, too.
        timeout_s: Limit for the child; ADMM takes a fifth of a second an image and more.

    Raises:
        UserError: there are no images.
        EngineError: the tool crashed, hung or complained, or what it wrote is not int8 or does not run.
    """
    if len(images) == 0:
        raise UserError(
            "0 calibration images",
            allowed="at least 1, better 100 to 1000 of the real scene",
            next_step="raise prepare's calibration share in params.yaml",
        )
    with tempfile.TemporaryDirectory(prefix="edgeloop-ptq-") as name:
        folder = Path(name)
        plain = _operators(onnx, folder)
        left = [op for op in plain if any(_is_of(op, tensor) for tensor in skip)]
        if method == "ADMM":  # it cannot quantise what reads its packed input (see the child)
            left += [op for op in plain[:1] if op not in left]
        names = [op.name for op in left]
        pictures = _write_images(images, preprocess, folder / "images")
        (folder / _CONFIG).write_text(
            json.dumps(_config(pictures, len(images), preprocess, method, names)), encoding="utf-8"
        )
        made = folder / "int8.mnn"
        _run_tool(onnx, folder, method, timeout_s)
        found = audit_tool(dump(made), plain, names, method)
        seen = json.loads((folder / _RESULT).read_text(encoding="utf-8"))
        if not seen["int8_ops"]:
            raise EngineError(f"MNN's {method}: the model says int8 and no operator ran in int8")
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, out)
    return ToolResult(path=out, int8_ops_count=seen["int8_ops"], **found)


def _run_tool(onnx: Path, folder: Path, method: str, timeout_s: float) -> None:
    """Run the child in `folder`, which holds its configuration, and listen to what it says."""
    files = [folder / name for name in ("float.mnn", "int8.mnn", _CONFIG, _RESULT)]
    argv = [sys.executable, "-P", str(_CHILD), str(onnx.resolve()), *map(str, files)]
    ended = run_child(argv, timeout_s=timeout_s, cwd=folder)
    lines = [line.strip() for line in re.split(r"[\r\n]+", ended.said) if line.strip()]
    if ended.failure:
        raise EngineError(f"MNN's {method}: {ended.failure}", engine_said=_words(lines))
    if complaints := [line for line in lines if _FAILURE.search(line) and not _NAMES.search(line)]:
        raise EngineError(f"MNN's {method} complained", engine_said="; ".join(complaints))


def audit_tool(
    graph: MnnGraph, plain: Sequence[MnnOp], skipped: Sequence[str], method: str
) -> dict[str, Any]:
    """What a quantised graph holds, as fields of `ToolResult`.

    Args:
        graph: Of the model that the tool wrote.
        plain: The layers with weights of the float model.
        skipped: Names of those that were to stay float.
        method: For the message.

    Raises:
        EngineError: a layer that was to be int8 is not, or a scale is no positive number.
    """
    layers = [op for op in graph.ops if op.weight_type]
    int8 = [op for op in layers if op.int8]
    wanted = len(plain) - len(skipped)
    if len(int8) < wanted:
        floating = [op.name for op in layers if not op.int8 and op.name not in skipped]
        raise EngineError(
            f"MNN's {method} said it was done, but {len(int8)} of the {wanted} layers asked for are int8;"
            f" still float: {', '.join(floating[:5]) or 'all'}"
        )
    broken = [name for name, scale in graph.scales.items() if not (math.isfinite(scale) and scale >= 0)]
    if broken:
        raise EngineError(f"MNN's {method}: scales that are no numbers at {', '.join(broken[:5])}")
    # EMA gives layers new names, so what it did not skip is known by number only.
    named = {op.name for op in int8}
    ignored = [name for name in skipped if name in named] or list(skipped)[: len(int8) - wanted]
    return {
        "int8_layers": tuple(op.outputs[0] for op in int8),
        "float_layers": tuple(op.outputs[0] for op in layers if not op.int8),
        "not_skipped": tuple(ignored),
    }


def _operators(onnx: Path, folder: Path) -> list[MnnOp]:
    """The layers with weights of the float model, converted."""
    convert(onnx, folder / "plain.mnn")
    return [op for op in dump(folder / "plain.mnn").ops if op.weight_type]


def _is_of(op: MnnOp, tensor: str) -> bool:
    """Whether an operator came from the ONNX node that writes `tensor`; a Gemm's name gets an ending."""
    return op.name == tensor or op.name.startswith(f"{tensor}__")


def _write_images(images: npt.NDArray[np.uint8], preprocess: Preprocess, folder: Path) -> Path:
    """Resized here, as PNG: the tool's own resizing would be another than the device's."""
    folder.mkdir()
    for number, image in enumerate(images):
        resized = preprocess.resize(image)
        if not cv2.imwrite(str(folder / f"{number:06d}.png"), resized[..., ::-1]):  # OpenCV writes BGR
            raise EngineError(f"calibration image {number} could not be written to {folder}")
    return folder


def _config(
    pictures: Path, count: int, preprocess: Preprocess, method: Method, skip: Sequence[str]
) -> dict[str, Any]:
    """The tool's configuration, in its own words (docs/tools/quant.md of MNN)."""
    return {
        "format": preprocess.color_order,
        "mean": [255 * value for value in preprocess.mean],
        "normal": [1 / (255 * value) for value in preprocess.std],
        "width": preprocess.size_px,
        "height": preprocess.size_px,
        "path": str(pictures),
        "used_image_num": count,
        "feature_quantize_method": method,
        "weight_quantize_method": "MAX_ABS",
        "feature_clamp_value": _CLAMP,
        "weight_clamp_value": _CLAMP,
        "batch_size": min(_BATCH, count),
        "quant_bits": 8,
        "skip_quant_op_names": list(skip),
        "input_type": "image",
    }


def _words(lines: Sequence[str]) -> str:
    """The last of what it said, without its counters."""
    return "; ".join([line for line in lines if not line.endswith("%")][-5:])


def layer_tensors(onnx: Path, layers: Sequence[str]) -> Iterator[str]:
    """Output tensors of the ONNX nodes that hold the weights of `layers` (module names)."""
    weights = {f"{name}.weight" for name in layers}
    for node in read_source(onnx).model.graph.node:
        if weights & set(node.input):
            yield node.output[0]
