"""Any ONNX to a proven MNN model, or a refusal that names the operator or the reason.

Read and check, look for what is known to go wrong, convert in a child process, audit what was asked, and
prove parity with ONNX Runtime on several inputs, repeated, at several shapes. Only then does the file appear.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from fleet.device.errors import EngineError, UserError
from fleet.device.preprocess import Preprocess
from tasks.mnn.calibration import Calibration, open_calibration
from tasks.mnn.calibration_checks import KnownImages
from tasks.mnn.converter import publish
from tasks.mnn.onnx_inputs import graph_inputs, parse_shapes
from tasks.mnn.onnx_job import Job
from tasks.mnn.onnx_layers import Layers
from tasks.mnn.onnx_parity import Parity
from tasks.mnn.onnx_plan import Inputs
from tasks.mnn.onnx_read import read_onnx
from tasks.mnn.request import ConvertOptions
from tasks.mnn.source import op_name

RUNS = 6
"""Input sets a shape; one of each distribution."""


@dataclass(frozen=True, kw_only=True)
class AnyConversion:
    """What became of one ONNX."""

    ok: bool
    source: Path
    """The ONNX."""
    source_bytes: int
    """Of the ONNX with its external data; 0 when it could not be read."""
    output: Path | None
    """The .mnn; None when refused."""
    size_bytes: int | None
    ops: Mapping[str, int]
    """Operators of the ONNX with their counts."""
    unsupported: Sequence[str]
    """Operators that the converter does not know or is known to get wrong."""
    parity: Parity | None
    reason: str
    """Why it was refused; when it was not, its notes and the number of its int8 layers in one line."""
    notes: Sequence[str] = ()
    """What a user should know: rewrites, what was not proven, few images."""
    layers: Layers | None = None
    """What became of the layers with weights; None when refused."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON-able record of `edgeloop convert --json`."""
        return {
            "ok": self.ok,
            "output": str(self.output) if self.output else None,
            "size_bytes": self.size_bytes,
            "ops": dict(sorted(self.ops.items())),
            "unsupported": list(self.unsupported),
            "parity": self.parity.to_dict() if self.parity else None,
            "reason": self.reason,
        }


def convert_any(
    onnx_path: Path,
    out: Path,
    *,
    options: ConvertOptions | None = None,
    int8: bool = False,
    calibration: Path | None = None,
    preprocess: Preprocess | None = None,
    shapes: Sequence[str] = (),
    runs: int = RUNS,
    seed: int = 0,
    datasets: Mapping[str, Path] | None = None,
) -> AnyConversion:
    """Convert `onnx_path` to `out` if, and only if, the result can be shown to compute the same.

    Args:
        onnx_path: Any ONNX model of up to 2 GiB; external data lies beside it.
        out: Where the .mnn goes. On a refusal it is neither made nor touched.
        options: Storage of the weights, compression parameters, business tag and time limit; fp32 when None.
        int8: Quantise convolutions to int8 with scales measured on `calibration`, and store the weights
            of the others in 8 bits.
        calibration: Folder of real images, neither trained on nor tested on; also inputs for parity.
        preprocess: How an image of `calibration` becomes an input; None: ImageNet's mean and deviation at the
            input's size.
        shapes: What to run dynamic inputs at, as NAME=1,3,224,224, once for each size; chosen here
            when empty.
        runs: Random input sets a shape.
        seed: Of the random inputs.
        datasets: Prepared datasets by name: calibration on their training or test images is warned about.

    Returns:
        The result; `ok` is False when the engine, its converter or the proof failed.

    Raises:
        UserError: a file or an option that cannot be used.
    """
    options = options or ConvertOptions()
    _check_options(options, int8=int8, calibration=calibration, preprocess=preprocess, runs=runs)
    _check_out(onnx_path, out)
    asked = parse_shapes(shapes)
    try:
        model = read_onnx(onnx_path)
    except EngineError as error:
        return _refused(onnx_path, 0, {}, [], error.reason)
    ops, source_bytes = _op_counts(model), model.ByteSize()
    with tempfile.TemporaryDirectory(prefix="edgeloop-any-") as name:
        job = Job(folder=Path(name), name=onnx_path.name, original=model, options=options)
        try:
            images = (
                open_calibration(calibration, graph_inputs(model), preprocess, asked) if calibration else None
            )
            said = _checked(images, datasets or {}) if int8 and images else []
            proven = job.run(Inputs(shapes=asked, runs=runs, seed=seed), images, int8=int8)
        except EngineError as error:
            unsupported, reason = job.explain(error)
            return _refused(onnx_path, source_bytes, ops, unsupported, reason)
        except MemoryError as error:
            raise _no_memory(onnx_path) from error
        int8_count = proven.layers.int8_count
        size_bytes = proven.mnn.stat().st_size
        publish(proven.mnn, out)
    return AnyConversion(
        ok=True,
        source=onnx_path,
        source_bytes=source_bytes,
        output=out,
        size_bytes=size_bytes,
        ops=ops,
        unsupported=[],
        parity=proven.parity,
        reason="; ".join([*said, *proven.notes, *([f"{int8_count} layers compute in int8"] if int8 else [])]),
        notes=proven.notes,
        layers=proven.layers,
    )


def _no_memory(onnx_path: Path) -> UserError:
    return UserError(
        f"{onnx_path}: this machine has too little memory to compare its outputs",
        allowed="a model whose outputs fit into memory for each of a dozen input sets",
        next_step="give a smaller --shape, or convert on a machine with more memory",
    )


def _checked(images: Calibration, datasets: Mapping[str, Path]) -> list[str]:
    """What is wrong with the calibration images; on stderr, too, where a program's user sees it."""
    known, notes = [], []
    for name, prepared in datasets.items():
        try:
            known.append(KnownImages.of(prepared, f"the dataset of {name}"))
        except UserError as error:
            notes.append(f"calibration images not compared with the dataset of {name}: {error.got}")
    notes += images.warnings(known)
    for note in notes:
        print(f"convert: {note}", file=sys.stderr)
    return notes


def _check_out(onnx_path: Path, out: Path) -> None:
    """Refuse an output that would overwrite the input or replace what is no plain file: a link, a device."""
    same = out.exists() and onnx_path.exists() and out.samefile(onnx_path)
    if same or out.is_symlink() or (out.exists() and not out.is_file()) or not out.name:
        raise UserError(
            f"output {str(out)!r}" + (", which is the model itself" if same else ""),
            allowed="the path of a file, new or to be replaced, that is no link, folder or device and not the"
            " input",
            next_step="choose another --out",
        )


def _check_options(
    options: ConvertOptions,
    *,
    int8: bool,
    calibration: Path | None,
    preprocess: Preprocess | None,
    runs: int,
) -> None:
    for wrong, got, allowed, next_step in (
        (
            int8 and calibration is None,
            "--int8 without --calibration",
            "a folder of 100 to 500 real images, on which the scales of int8 are measured",
            "add --calibration FOLDER",
        ),
        (
            preprocess is not None and calibration is None,
            "--preprocess without --calibration",
            "a record of how images become inputs, together with a folder of images",
            "add --calibration FOLDER, or leave --preprocess out",
        ),
        (
            int8 and (options.compression is not None or options.fp16),
            "--int8 together with --compression or --fp16",
            "one of them: --int8 measures the scales that --compression would bring",
            "leave one of them out",
        ),
        (
            calibration is not None and not calibration.is_dir(),
            f"--calibration {calibration}, which is no folder",
            "an existing folder of images",
            "correct the path",
        ),
        (runs < 1, f"runs={runs}", "1 or more", "leave it out for the default"),
    ):
        if wrong:
            raise UserError(got, allowed=allowed, next_step=next_step)


def _refused(
    source: Path, source_bytes: int, ops: Mapping[str, int], unsupported: Sequence[str], reason: str
) -> AnyConversion:
    return AnyConversion(
        ok=False,
        source=source,
        source_bytes=source_bytes,
        output=None,
        size_bytes=None,
        ops=ops,
        unsupported=unsupported,
        parity=None,
        reason=reason,
    )


def _op_counts(model: onnx.ModelProto) -> Counter[str]:
    """Operator types of the main graph; other domains as `domain::Type`."""
    return Counter(op_name(node) for node in model.graph.node)
