"""Any ONNX to a proven MNN model, or a refusal that names the operator or the reason.

Read and check, look for what is known to go wrong, convert in a child process, audit what was asked, and
prove parity with ONNX Runtime on several inputs, repeated, at several shapes. Only then does the file appear.
"""

import json
import re
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import onnx

from fleet.device.errors import EngineError, UserError
from fleet.device.preprocess import Preprocess
from tasks.mnn.converter import ConvertOptions, convert
from tasks.mnn.onnx_culprit import Culprit, diverging_node, failing_node
from tasks.mnn.onnx_inputs import BATCHES, graph_inputs, parse_shapes
from tasks.mnn.onnx_lint import Finding, lint
from tasks.mnn.onnx_parity import DifferenceError, Parity, check_parity, tolerance_for
from tasks.mnn.onnx_plan import Inputs, UnprovenError, plan_parity
from tasks.mnn.onnx_ptq import Q_MAX, Calibration, fold, open_calibration, quantise
from tasks.mnn.onnx_read import read_onnx, with_shapes, write_onnx
from tasks.mnn.onnx_rewrite import rewrite

RUNS = 6
"""Input sets a shape; one of each distribution."""


@dataclass(frozen=True, kw_only=True)
class AnyConversion:
    """What became of one ONNX."""

    ok: bool
    output: Path | None
    """The .mnn; None when refused."""
    size_bytes: int | None
    ops: Mapping[str, int]
    """Operators of the ONNX with their counts."""
    unsupported: Sequence[str]
    """Operators that the converter does not know or is known to get wrong."""
    parity: Parity | None
    reason: str
    """Why it was refused; when it was not, what was rewritten to get there, or empty."""

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
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
) -> AnyConversion:
    """Convert `onnx_path` to `out` if, and only if, the result can be shown to compute the same.

    Args:
        onnx_path: Any ONNX model of up to 2 GiB; external data lies beside it.
        out: Where the .mnn goes. On a refusal it is neither made nor touched.
        options: Storage of the weights, compression parameters, business tag and time limit; fp32 when None.
        int8: Quantise convolutions to int8 with scales measured on `calibration`, and store the weights
            of the others in 8 bits.
        calibration: Folder of real images, neither trained on nor tested on; also inputs for parity.
        preprocess: How an image becomes an input; None: ImageNet's mean and deviation at the input's size.
        shapes: What to run dynamic inputs at, as NAME=1,3,224,224, once for each size; chosen here
            when empty.
        runs: Random input sets a shape.
        seed: Of the random inputs.

    Returns:
        The result; `ok` is False when the engine, its converter or the proof failed.

    Raises:
        UserError: a file or an option that cannot be used.
    """
    options = options or ConvertOptions()
    _check_options(options, int8=int8, calibration=calibration, runs=runs)
    asked = parse_shapes(shapes)
    try:
        model = read_onnx(onnx_path)
    except EngineError as error:
        return _refused({}, [], error.reason)
    ops = _op_counts(model)
    with tempfile.TemporaryDirectory(prefix="edgeloop-any-") as name:
        job = _Job(folder=Path(name), name=onnx_path.name, original=model, options=options)
        try:
            images = open_calibration(calibration, graph_inputs(model), preprocess) if calibration else None
            parity = job.run(Inputs(shapes=asked, runs=runs, seed=seed), images, int8=int8)
        except EngineError as error:
            unsupported, reason = job.explain(error)
            return _refused(ops, unsupported, reason)
        _publish(job.mnn, out)
    return AnyConversion(
        ok=True,
        output=out,
        size_bytes=out.stat().st_size,
        ops=ops,
        unsupported=[],
        parity=parity,
        reason="; ".join(job.notes),
    )


def _check_options(options: ConvertOptions, *, int8: bool, calibration: Path | None, runs: int) -> None:
    problem = ""
    if int8 and calibration is None:
        problem = "--int8 without --calibration"
    elif int8 and (options.compression is not None or options.fp16):
        problem = "--int8 together with compression parameters or fp16"
    elif calibration is not None and not calibration.is_dir():
        problem = f"calibration folder {calibration}, which is none"
    elif runs < 1:
        problem = f"runs={runs}"
    if problem:
        raise UserError(
            problem,
            allowed="--int8 with --calibration FOLDER of real images; or no --int8; at least one run",
            next_step="correct the options of `edgeloop convert`",
        )


def _refused(ops: Mapping[str, int], unsupported: Sequence[str], reason: str) -> AnyConversion:
    return AnyConversion(
        ok=False, output=None, size_bytes=None, ops=ops, unsupported=unsupported, parity=None, reason=reason
    )


@dataclass
class _Job:
    """The files and findings of one conversion, kept so that a failure can be explained."""

    folder: Path
    name: str
    original: onnx.ModelProto
    options: ConvertOptions
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def mnn(self) -> Path:
        return self.folder / "model.mnn"

    @property
    def rewritten(self) -> Path:
        return self.folder / "rewritten" / self.name

    def run(self, inputs: Inputs, images: Calibration | None, *, int8: bool) -> Parity:
        """Everything from lint to parity.

        Raises:
            EngineError: the model is refused.
            UserError: the shapes asked for or an image cannot be used.
        """
        timeout_s = self.options.timeout_s
        original = self.folder / "original.onnx"
        write_onnx(self.original, original)
        rewritten, self.notes = rewrite(self.original)
        model = with_shapes(rewritten)
        self.findings = lint(model)
        if certain := [finding for finding in self.findings if finding.certain]:
            raise EngineError("; ".join(str(finding) for finding in certain[:_MOST_NAMED]))
        self.rewritten.parent.mkdir()
        write_onnx(rewritten, self.rewritten)
        if images is not None:
            sizes = _batch_sizes(self.original)
            some = [feeds for size in sizes for feeds in islice(images.feeds(size), inputs.runs)]
            inputs = replace(inputs, images=some)
        if not int8:
            # Also the cheap first test of an int8 model: what fails in float fails in int8.
            convert(self.rewritten, self.mnn, self.options)
        inputs = replace(inputs, only_images=int8, largest=_input_ranges(self.options))
        plan = plan_parity(original, self.original, inputs, timeout_s=timeout_s)
        if constant := plan.constant_outputs():
            self.notes.append(
                f"outputs that are the same for every input prove little: {', '.join(constant)}"
            )
        if int8 and images is not None:
            self._quantise(images)
        return check_parity(self.mnn, plan, tolerance_for(model, self.options), timeout_s=timeout_s)

    def _quantise(self, images: Calibration) -> None:
        folded = self.folder / "folded" / self.name
        folded.parent.mkdir()
        model = with_shapes(fold(self.rewritten, folded))
        compression = quantise(model, images, self.folder)
        self.options = replace(self.options, compression=compression, weight_bits=8)
        self.rewritten.write_bytes(folded.read_bytes())
        made = convert(self.rewritten, self.mnn, self.options)
        self.notes.append(f"{len(made.audit.int8_layers)} layers compute in int8")
        if images.warning:
            self.notes.append(images.warning)

    def explain(self, error: EngineError) -> tuple[list[str], str]:
        """The operators to blame, and the error in one line with the node that causes it."""
        said = _UNSUPPORTED.search(error.engine_said)
        blamed = {op.removeprefix("ONNX::") for op in said[1].split()} if said else set()
        reason = f"{error.reason}: {_in_short(error.engine_said)}" if error.engine_said else error.reason
        certain = {finding.op for finding in self.findings if finding.certain}
        if isinstance(error, UnprovenError) or certain:
            return sorted(blamed | certain), reason
        culprit = self._culprit(error)
        if culprit is None:
            suspects = (f"suspected: {finding}" for finding in self.findings[:_MOST_NAMED])
            return sorted(blamed), "; ".join([reason, *suspects])
        known = {finding.node: str(finding) for finding in self.findings}
        return sorted(blamed | {culprit.op}), f"{reason}; first at {known.get(culprit.node) or culprit}"

    def _culprit(self, error: EngineError) -> Culprit | None:
        """The first node that goes wrong, where there is a model to look into."""
        if not self.rewritten.exists():
            return None
        timeout_s = self.options.timeout_s
        if isinstance(error, DifferenceError):
            return diverging_node(self.rewritten, self.mnn, error.feeds, error.tolerance, timeout_s=timeout_s)
        return failing_node(self.rewritten, timeout_s=timeout_s)


_MOST_NAMED = 3
_UNSUPPORTED = re.compile(r"These Op Not Support: ([^;]*)")
_NOISE = re.compile(r"The device supports|Start to|ONNX Model|^\s*$")


def _in_short(said: str) -> str:
    """The engine's words without its greetings, in one line."""
    lines = [line.strip() for line in re.split(r"[\n;]", said) if not _NOISE.search(line)]
    return "; ".join(lines)[:500]


def _op_counts(model: onnx.ModelProto) -> Counter[str]:
    """Operator types of the main graph; other domains as `domain::Type`."""
    return Counter(
        f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type
        for node in model.graph.node
    )


def _batch_sizes(model: onnx.ModelProto) -> tuple[int, ...]:
    """Images that one run of the model takes: as declared, or the sizes that a dynamic batch is run at."""
    size = graph_inputs(model)[0].dims[0]
    return (size,) if isinstance(size, int) else BATCHES


def _input_ranges(options: ConvertOptions) -> dict[str, float]:
    """Largest |value| of the tensors that int8 layers read: beyond it int8 clamps, which is no error."""
    if options.compression is None:
        return {}
    document = json.loads(options.compression.read_text(encoding="utf-8"))
    records = [layer["input"][0] for part in document["algo"] for layer in part["quantParams"]["layer"]]
    return {record["name"]: Q_MAX * float(record["scales"][0]) for record in records}


def _publish(made: Path, out: Path) -> None:
    """Copy beside `out`, then rename: a reader sees the old file or the whole new one."""
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, temporary)
        temporary.replace(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"{out}: {error.strerror}",
            allowed="a file path in a folder one can write to, on a disk with space",
            next_step="choose another --out",
        ) from error
