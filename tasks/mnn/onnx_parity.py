"""Parity of a converted model with its ONNX: many inputs, repeated, in fresh sessions, at several shapes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from fleet.device.errors import EngineError
from tasks.mnn.compare import Comparison, combine
from tasks.mnn.int8_record import int8_layers
from tasks.mnn.onnx_compare import Part, compare_output, parts
from tasks.mnn.onnx_draws import BYTES, FROM_END, PIXELS, ZEROS
from tasks.mnn.onnx_facts import ranks
from tasks.mnn.onnx_inputs import Shapes
from tasks.mnn.onnx_plan import Array, Feeds, Plan, Sample
from tasks.mnn.onnx_runs import Done, Planned, run_plan
from tasks.mnn.request import ConvertOptions
from tasks.mnn.source import WEIGHTED_OPS

# Two bytes that fresh memory is filled with: who reads before writing sees other values in the second run.
_MALLOC_FILLS = (0xDD, 0x48)
_REPEATED = 3  # inputs that run again in a second session, in reverse order

# What MNN 3.6.1 computes less exactly than float32 can: measured on single operators, by output range.
_EXACT = 1e-4
_FLOAT_LAYER = 5e-5  # Winograd convolutions: random VGG-11 errs by 6.7e-5, Inception-v3 by up to 7.5e-5
_WIDE_LAYER = 6e-4  # single convolutions with square kernels of 4 to 7: docs/results/conv_error.md
_WIDE = range(4, 8)
_HALF = 1e-3  # float16 tensors round at other places; a batch norm on 2, 3 or 5 axes loses its epsilon
_ROUGH = 2e-3  # one formula for Erf and Gelu, 2e-4 off; 1e-3 where the output's range is small
_ROUGH_OPS = frozenset({"Erf", "Gelu"})
_FP16_WEIGHTS, _FP16_LAYER = 5e-3, 1e-3
# Independent errors add up in quadrature; rounding to 8 bits errs by about 1/254 of the range a layer.
_W8_LAYER, _INT8_LAYER, _LEAST_COSINE = 0.02, 0.06, 0.98  # int8: the largest error of up to 32 images
_W8_MOST, _INT8_MOST = 0.1, 0.2
_OWN_ROUNDING = 10.0  # times ONNX Runtime's distance from itself

# What is said of inputs that are not what a model usually gets, and what to do about them.
_AMONG = {
    ZEROS: " for inputs that are all zero",
    FROM_END: " for indices of -1, which ONNX counts from the end",
    PIXELS: " for raw pixels of 0 to 255",
}
_HINTS = {
    PIXELS: "; smaller inputs agree. If the model gets normalised pixels, give --calibration FOLDER and"
    " --preprocess FILE: then it is proven on real images in the range they have",
}


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What counts as equal."""

    max_rel_error: float
    """Largest error in units of the output's range; for integers the share that may differ."""
    min_cosine: float = -1.0
    """Smallest cosine between output and reference."""
    lossy: bool = False
    """Fewer bits than float32 were asked for: small parts of an output are judged more mildly."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """A proof that held."""

    max_rel_error: float
    min_cosine: float
    runs: int
    """Engine runs compared, over all shapes, inputs, sessions and repetitions."""
    shapes: tuple[Shapes, ...]
    tolerance: Tolerance

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record."""
        return {
            "max_rel_error": self.max_rel_error,
            "min_cosine": self.min_cosine,
            "runs": self.runs,
            "shapes": [{name: list(shape) for name, shape in s.items()} for s in self.shapes],
            "tolerance": self.tolerance.max_rel_error,
        }


class DifferenceError(EngineError):
    """The engine ran and computed something else; carries the inputs that show it."""

    def __init__(self, reason: str, *, feeds: Feeds, tolerance: float) -> None:
        """Keep what the search for the culprit needs."""
        super().__init__(reason)
        self.feeds, self.tolerance = feeds, tolerance


def tolerance_for(model: onnx.ModelProto, options: ConvertOptions) -> Tolerance:
    """What a right conversion of a graph can still be off by.

    Args:
        model: With inferred shapes.
        options: How it was converted.
    """
    depth = max(sum(node.op_type in WEIGHTED_OPS for node in model.graph.node), 1) ** 0.5
    if options.compression is not None:
        error = min(_INT8_LAYER * len(int8_layers(options.compression)) ** 0.5, _INT8_MOST)
        return Tolerance(max_rel_error=error, min_cosine=_LEAST_COSINE, lossy=True)
    if options.weight_bits is not None:
        error = min(_W8_LAYER * depth, _W8_MOST)
        return Tolerance(max_rel_error=error, min_cosine=_LEAST_COSINE, lossy=True)
    if options.fp16:
        return Tolerance(max_rel_error=max(_FP16_WEIGHTS, _FP16_LAYER * depth), lossy=True)
    if any(node.op_type in _ROUGH_OPS for node in model.graph.node):
        return Tolerance(max_rel_error=_ROUGH)
    if _is_half(model):
        return Tolerance(max_rel_error=_HALF)
    layers = [node for node in model.graph.node if node.op_type in WEIGHTED_OPS]
    error = sum((_WIDE_LAYER if _is_wide(node) else _FLOAT_LAYER) ** 2 for node in layers) ** 0.5
    return Tolerance(max_rel_error=max(_EXACT, min(error, _HALF)))


def _is_wide(node: onnx.NodeProto) -> bool:
    """Whether it is a convolution that the engine computes in the fast and rough way for wide kernels."""
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    kernel = given.get("kernel_shape", [])
    plain = {1} >= {given.get("group", 1), *given.get("strides", []), *given.get("dilations", [])}
    return node.op_type == "Conv" and len(kernel) == 2 and kernel[0] == kernel[1] in _WIDE and plain


def _is_half(model: onnx.ModelProto) -> bool:
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    known = ranks(model)
    norms = (node for node in model.graph.node if node.op_type == "BatchNormalization")
    half = onnx.TensorProto.FLOAT16
    return any(value.type.tensor_type.elem_type == half for value in values) or any(
        known.get(node.input[0], 4) != 4 for node in norms
    )


def check_parity(mnn: Path, plan: Plan, tolerance: Tolerance, *, timeout_s: float) -> Parity:
    """Run the engine on everything in `plan` and compare.

    Each shape gets a session in which every input runs, the first twice, and a second one that takes some in
    reverse; a last session alternates between the shapes. All of it happens twice, with other values in fresh
    memory.

    Raises:
        DifferenceError: it computed something else; the reason says at which inputs.
        EngineError: it crashed, hung or failed, or nothing could be compared.
    """
    order = _order(plan)
    planned = [Planned(sample.feeds, fresh) for sample, fresh in order]
    judges = {id(s): judge for group in plan.samples for s, judge in _judges(group, tolerance)}
    results = []
    for fill in _MALLOC_FILLS:
        done = run_plan("engine", mnn, planned, timeout_s=timeout_s, malloc_fill=fill)
        # Raw pixels come last: a difference there says less than one anywhere else.
        pairs = sorted(zip(order, done, strict=True), key=lambda pair: pair[0][0].kind == PIXELS)
        results += [judges[id(sample)].judge(sample, one) for (sample, _), one in pairs]
    total = combine(results)
    if total.finite_count == 0:
        raise EngineError("nothing was proven: the ONNX gives NaN or infinity for every input tried")
    return Parity(
        max_rel_error=total.max_rel_error,
        min_cosine=total.cosine,
        runs=len(results),
        shapes=plan.shapes,
        tolerance=tolerance,
    )


def _order(plan: Plan) -> list[tuple[Sample, bool]]:
    """Samples in the order of their runs, each with whether a new session starts with it."""
    order = []
    for samples in plan.samples:
        order += [(samples[0], True), (samples[0], False), *((sample, False) for sample in samples[1:])]
        order += [(sample, k == 0) for k, sample in enumerate(reversed(samples[:_REPEATED]))]
    if len(plan.samples) > 1:
        alternating = [samples[0] for samples in (*plan.samples, *plan.samples)]
        order += [(sample, k == 0) for k, sample in enumerate(alternating)]
    return order


@dataclass(frozen=True, kw_only=True)
class _Judge:
    """What the outputs of a group of samples are measured in."""

    tolerance: Tolerance
    parts: Mapping[str, tuple[Part, ...]]
    least_ranges: Mapping[str, float]

    def judge(self, sample: Sample, done: Done) -> Comparison:
        """Compare one run; raises as `check_parity` does."""
        at = " ".join(f"{name}{list(value.shape)}" for name, value in sample.feeds.items())
        among = _AMONG.get(sample.kind, "")
        if done.outputs is None:
            raise EngineError(
                f"the converted model does not run at {at}{among}",
                engine_said=done.error,
            )
        compared = []
        for name, want in sample.want.items():
            if name not in done.outputs:
                raise EngineError(f"the converted model has no output {name!r}")
            allowed = self.tolerance.max_rel_error
            if sample.kind == PIXELS:  # far out of range, rounding alone may count for more
                allowed = max(allowed, _OWN_ROUNDING * sample.rounding.get(name, 0.0))
            part = compare_output(
                done.outputs[name],
                want,
                plain=sample.plain,
                least_range=self.least_ranges.get(name, 0.0) if sample.kind == ZEROS else 0.0,
            )
            detail = self._difference(name, done.outputs[name], want, part, allowed)
            if detail:
                raise DifferenceError(
                    f"output {name!r} of the converted model differs from ONNX Runtime at {at}"
                    f"{among}: {detail}, allowed {allowed:g}{_HINTS.get(sample.kind, '')}",
                    feeds=sample.feeds,
                    tolerance=allowed,
                )
            compared.append(part)
        return combine(compared)

    def _difference(self, name: str, got: Array, want: Array, found: Comparison, allowed: float) -> str:
        """What is wrong with an output, as a whole or in its worst part; empty when nothing is."""
        if not found.max_rel_error <= allowed or found.cosine < self.tolerance.min_cosine:
            return found.reason or f"relative error {found.max_rel_error:.3g}, cosine {found.cosine:.5f}"
        for part in self.parts.get(name, ()):
            error, where = part.worst(got, want)
            if error > allowed:
                return f"relative error {error:.3g} at {where}"
        return ""


def _judges(group: Sequence[Sample], tolerance: Tolerance) -> Iterator[tuple[Sample, _Judge]]:
    """Every sample of one shape with its judge; far out of range an output may be larger than elsewhere."""
    usual = [sample for sample in group if sample.kind not in (PIXELS, BYTES)]
    varied = [sample for sample in usual if sample.kind != ZEROS]
    ranges = {name: max((_range(s.want[name]) for s in varied), default=0.0) for name in group[0].want}

    def judge(seen: Sequence[Sample]) -> _Judge:
        found = {
            name: parts(
                [s.want[name] for s in seen], tolerance=tolerance.max_rel_error, lossy=tolerance.lossy
            )
            for name in group[0].want
        }
        return _Judge(tolerance=tolerance, parts=found, least_ranges=ranges)

    shared = judge(usual)
    for sample in group:
        yield sample, judge([*usual, sample]) if sample.kind in (PIXELS, BYTES) else shared


def _range(want: Array) -> float:
    finite = want[np.isfinite(want)] if want.dtype.kind == "f" else want[:0]
    return float(np.ptp(finite.astype(np.float64))) if finite.size else 0.0
