"""One conversion of an arbitrary ONNX, from lint to parity, with what is needed to explain its failure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import onnx

from fleet.device.errors import EngineError, UserError
from tasks.mnn.calibration import Calibration
from tasks.mnn.converter import Conversion, convert
from tasks.mnn.int8_record import Q_MAX, int8_layers
from tasks.mnn.onnx_axes import UnprovenError
from tasks.mnn.onnx_culprit import Culprit, diverging_node, failing_node
from tasks.mnn.onnx_inputs import BATCHES, graph_inputs
from tasks.mnn.onnx_layers import Layers, float_layers
from tasks.mnn.onnx_limits import limits
from tasks.mnn.onnx_lint import Finding, lint
from tasks.mnn.onnx_parity import DifferenceError, Parity, check_parity, tolerance_for
from tasks.mnn.onnx_plan import Inputs, Plan, plan_parity
from tasks.mnn.onnx_ptq import fold, quantisable, quantise
from tasks.mnn.onnx_read import with_shapes, write_onnx
from tasks.mnn.onnx_rewrite import Rewritten, rewrites
from tasks.mnn.onnx_steps import step
from tasks.mnn.request import ConvertOptions
from tasks.mnn.support import unknown_nodes

_IN_FLOAT = "; in float it is proven: leave --int8 out, or try --weight-bits 8"
_MOST_NAMED = 3
_MOST_PROVING = 32  # images that an int8 model is proven on, but for one batch that is larger
_UNSUPPORTED = re.compile(r"These Op Not Support: ([^;]*)")
_NOISE = re.compile(r"The device supports|Start to|ONNX Model|^\s*$")


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One way to say the graph, and what the converter made of it."""

    path: Path
    mnn: Path
    model: onnx.ModelProto
    """The graph with inferred shapes."""
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Proven:
    """A conversion that computes what its ONNX does."""

    mnn: Path
    parity: Parity
    layers: Layers
    notes: tuple[str, ...]
    """What a user should know: rewrites, what was not proven, few images."""


@dataclass(kw_only=True)
class Job:
    """The conversion of one graph in a folder of its own."""

    folder: Path
    name: str
    """Of the file, for messages."""
    original: onnx.ModelProto
    options: ConvertOptions
    findings: list[Finding] = field(default_factory=list)
    failed: Attempt | None = None
    """What to look into when there was an error."""
    proven_in_float: bool = False
    """Whether int8 was tried after the model had been proven without it."""

    def run(self, inputs: Inputs, images: Calibration | None, *, int8: bool) -> Proven:
        """Convert, and prove what came out.

        Raises:
            EngineError: the model is refused.
            UserError: the shapes asked for or an image cannot be used.
        """
        original = self.folder / "original.onnx"
        write_onnx(self.original, original)
        ways = rewrites(self.original)
        found = lint(with_shapes(ways[0].model))
        named = {finding.node for finding in found if finding.certain}
        self.findings = found + [f for f in _unknown(ways[0].model) if f.node not in named]
        if certain := [finding for finding in self.findings if finding.certain]:
            raise EngineError("; ".join(str(finding) for finding in certain[:_MOST_NAMED]))
        if images is not None:
            sizes = _batch_sizes(self.original, inputs)
            some = [feeds for size in sizes for feeds in islice(images.feeds(size), inputs.runs)]
            if not some:
                raise UserError(
                    f"{len(images.files)} calibration images",
                    allowed=f"at least {min(sizes)}, which one run of the model takes",
                    next_step="add images of the scene, or export the model with a smaller or dynamic batch",
                )
            inputs = replace(inputs, images=some)
        inputs = replace(inputs, largest=_input_ranges(self.options))
        plan = self._plan(inputs)
        proven, attempt = self._first_proven(ways, plan)
        said = [*plan.notes, *limits(attempt.model)]
        if constant := plan.constant_outputs():
            said.append(f"outputs that are the same for every input prove little: {', '.join(constant)}")
        proven = replace(proven, notes=(*proven.notes, *said))
        if not int8 or images is None:
            return proven
        self.proven_in_float = True
        return self._quantised(attempt, images, inputs, proven.notes)

    def _first_proven(self, ways: Sequence[Rewritten], plan: Plan) -> tuple[Proven, Attempt]:
        """The first way that converts and computes the same; the first way's error when there is none."""
        errors: list[tuple[Attempt, EngineError]] = []
        for number, way in enumerate(ways):
            attempt = self._attempt(f"way-{number}", way)
            try:
                return self._proven(attempt, plan, self.options), attempt
            except EngineError as error:
                errors.append((attempt, error))
        self.failed, first = errors[0]
        raise first

    def _attempt(self, folder_name: str, way: Rewritten) -> Attempt:
        path = self.folder / folder_name / self.name
        path.parent.mkdir()
        write_onnx(way.model, path)
        mnn = path.with_name("model.mnn")
        return Attempt(path=path, mnn=mnn, model=with_shapes(way.model), notes=way.notes)

    def _proven(self, attempt: Attempt, plan: Plan, options: ConvertOptions) -> Proven:
        usual, far = plan.divided()
        if far is None or not (options.fp16 or options.weight_bits is not None):
            parity, layers = self._checked(attempt, plan, options)
            return Proven(mnn=attempt.mnn, parity=parity, layers=layers, notes=attempt.notes)
        parity, layers = self._checked(attempt, usual, options)
        # In fewer bits, rounding alone moves a saturated softmax: what overflows is told in float32.
        proven = attempt.mnn.rename(attempt.mnn.with_name("proven.mnn"))
        self._checked(attempt, far, ConvertOptions(timeout_s=options.timeout_s))
        return Proven(mnn=proven, parity=parity, layers=layers, notes=attempt.notes)

    def _plan(self, inputs: Inputs) -> Plan:
        """The shapes, the inputs and the reference."""
        with step("ONNX Runtime computes the reference"):
            path, timeout_s = self.folder / "original.onnx", self.options.timeout_s
            return plan_parity(path, self.original, inputs, timeout_s=timeout_s)

    def _checked(self, attempt: Attempt, plan: Plan, options: ConvertOptions) -> tuple[Parity, Layers]:
        """Convert to `attempt.mnn`, and compare."""
        with step(f"the converter writes {_storage(options)}, and it is audited"):
            made = convert(attempt.path, attempt.mnn, options)
        tolerance = tolerance_for(attempt.model, options)
        with step(f"the engine runs {sum(map(len, plan.samples))} input sets, several times each"):
            parity = check_parity(attempt.mnn, plan, tolerance, timeout_s=options.timeout_s)
        return parity, _layers(attempt, made, options)

    def _quantised(
        self, attempt: Attempt, images: Calibration, inputs: Inputs, notes: tuple[str, ...]
    ) -> Proven:
        """The same model in int8, after it was proven in float: what fails there fails here.

        Its scales are measured on some of the images, and it is proven on others.
        """
        timeout_s = self.options.timeout_s
        with step("ONNX Runtime folds the batch norms"):
            folded = fold(attempt.path, self.folder / "folded.onnx", timeout_s=timeout_s)
        self.failed = self._attempt("int8", Rewritten(model=folded, notes=notes))
        layers = quantisable(self.failed.model)
        sizes = _batch_sizes(self.original, inputs)
        split = images.split(max(sizes))
        compression = quantise(self.failed.model, layers, split.measured, self.folder, timeout_s=timeout_s)
        unseen = [feeds for size in sizes for feeds in split.kept.feeds(size, max(size, _MOST_PROVING))]
        inputs = replace(inputs, images=unseen, only_images=True)
        plan = self._plan(inputs)
        options = replace(self.options, compression=compression, weight_bits=8)
        proven = self._proven(self.failed, plan, options)
        return replace(proven, notes=(*proven.notes, *([split.warning] if split.warning else [])))

    def explain(self, error: EngineError) -> tuple[list[str], str]:
        """The operators to blame, and the error in one line with the node that causes it."""
        blamed, reason = self._explained(error)
        return blamed, reason + (_IN_FLOAT if self.proven_in_float else "")

    def _explained(self, error: EngineError) -> tuple[list[str], str]:
        said = _UNSUPPORTED.search(error.engine_said)
        blamed = {op.removeprefix("ONNX::") for op in said[1].split()} if said else set()
        reason = f"{error.reason}: {_in_short(error.engine_said)}" if error.engine_said else error.reason
        certain = {finding.op for finding in self.findings if finding.certain}
        if isinstance(error, UnprovenError) or certain or self.failed is None:
            return sorted(blamed | certain), reason
        culprit = self._culprit(error, self.failed)
        if culprit is None:
            suspects = (f"suspected: {finding}" for finding in self.findings[:_MOST_NAMED])
            return sorted(blamed), "; ".join([reason, *suspects])
        # A node's first finding is its most telling one.
        known = {finding.node: str(finding) for finding in reversed(self.findings)}
        return sorted(blamed | {culprit.op}), f"{reason}; first at {known.get(culprit.node) or culprit}"

    def _culprit(self, error: EngineError, failed: Attempt) -> Culprit | None:
        """The first node that goes wrong; None when the whole graph converts and nothing diverges."""
        timeout_s = self.options.timeout_s
        with step("looking for the operator that goes wrong"):
            if isinstance(error, DifferenceError):
                return diverging_node(
                    failed.path, failed.mnn, error.feeds, error.tolerance, timeout_s=timeout_s
                )
            return failing_node(failed.path, timeout_s=timeout_s)


def _storage(options: ConvertOptions) -> str:
    if options.compression is not None:
        return "int8"
    return "int8 weights" if options.weight_bits else "fp16" if options.fp16 else "fp32"


def _layers(attempt: Attempt, made: Conversion, options: ConvertOptions) -> Layers:
    """What became of the layers with weights."""
    found = made.audit
    return Layers(
        int8_count=len(found.int8_layers),
        floats=float_layers(attempt.model, found.int8_layers) if options.compression else (),
        storage=found.weights,
        ops_count=sum(found.ops.values()),
        int8_ops_ran=made.int8_ops_ran,
    )


def _unknown(model: onnx.ModelProto) -> list[Finding]:
    why = "the converter has no such operator"
    return [
        Finding(op=node.op_type, node=node.name or node.output[0], why=why, certain=True)
        for node in unknown_nodes(model)
    ]


def _in_short(said: str) -> str:
    """The engine's words without its greetings, in one line."""
    lines = [line.strip() for line in re.split(r"[\n;]", said) if not _NOISE.search(line)]
    return "; ".join(lines)[:500]


def _batch_sizes(model: onnx.ModelProto, inputs: Inputs) -> tuple[int, ...]:
    """Images that one run of a model with one input takes: as asked for, as declared, or chosen here."""
    (image,) = graph_inputs(model)
    if asked := inputs.shapes.get(image.name):
        return tuple(dict.fromkeys(shape[0] for shape in asked))
    size = image.dims[0]
    return (size,) if isinstance(size, int) else BATCHES


def _input_ranges(options: ConvertOptions) -> dict[str, float]:
    """Largest |value| of the tensors that int8 layers read: beyond it int8 clamps, which is no error."""
    return {layer.input: Q_MAX * layer.input_scale for layer in int8_layers(options.compression)}
