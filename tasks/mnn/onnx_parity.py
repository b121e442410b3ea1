"""Parity of a converted model with its ONNX: many inputs, repeated, in fresh sessions, at several shapes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from fleet.device.errors import EngineError
from tasks.mnn.compare import Comparison, combine
from tasks.mnn.int8_record import int8_layers
from tasks.mnn.onnx_inputs import Shapes
from tasks.mnn.onnx_plan import Feeds, Plan, Sample, compare_output
from tasks.mnn.onnx_runs import Done, Planned, run_plan
from tasks.mnn.request import ConvertOptions
from tasks.mnn.source import WEIGHTED_OPS

# Two bytes that fresh memory is filled with: who reads before writing sees other values in the second run.
_MALLOC_FILLS = (0xDD, 0x48)
_REPEATED = 3  # inputs that run again in a second session, in reverse order

# What MNN 3.6.1 computes less exactly than float32 can: measured on single operators, by output range.
_EXACT = 1e-4
_FLOAT_LAYER = 5e-5  # Winograd convolutions: random VGG-11 errs by 6.7e-5, Inception-v3 by up to 7.5e-5
_HALF = 1e-3  # float16 tensors round at other places; a batch norm on 2, 3 or 5 axes loses its epsilon
_ROUGH = 2e-3  # one formula for Erf and Gelu, 2e-4 off; 1e-3 where the output's range is small
_ROUGH_OPS = frozenset({"Erf", "Gelu"})
_FP16_WEIGHTS, _FP16_LAYER = 5e-3, 1e-3
# Independent errors add up in quadrature; rounding to 8 bits errs by about 1/254 of the range a layer.
_W8_LAYER, _INT8_LAYER, _LEAST_COSINE = 0.02, 0.05, 0.98
_W8_MOST, _INT8_MOST = 0.1, 0.2


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What counts as equal."""

    max_rel_error: float
    """Largest error in units of the output's range; for integers the share that may differ."""
    min_cosine: float = -1.0
    """Smallest cosine between output and reference."""


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
        return Tolerance(max_rel_error=error, min_cosine=_LEAST_COSINE)
    if options.weight_bits is not None:
        error = min(_W8_LAYER * depth, _W8_MOST)
        return Tolerance(max_rel_error=error, min_cosine=_LEAST_COSINE)
    if options.fp16:
        return Tolerance(max_rel_error=max(_FP16_WEIGHTS, _FP16_LAYER * depth))
    if any(node.op_type in _ROUGH_OPS for node in model.graph.node):
        return Tolerance(max_rel_error=_ROUGH)
    return Tolerance(
        max_rel_error=_HALF if _is_half(model) else max(_EXACT, min(_FLOAT_LAYER * depth, _HALF))
    )


def _is_half(model: onnx.ModelProto) -> bool:
    values = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in values}
    norms = (node for node in model.graph.node if node.op_type == "BatchNormalization")
    half = onnx.TensorProto.FLOAT16
    return any(value.type.tensor_type.elem_type == half for value in values) or any(
        ranks.get(node.input[0], 4) != 4 for node in norms
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
    results = []
    for fill in _MALLOC_FILLS:
        done = run_plan("engine", mnn, planned, timeout_s=timeout_s, malloc_fill=fill)
        results += [_judge(sample, one, tolerance) for (sample, _), one in zip(order, done, strict=True)]
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


def _judge(sample: Sample, done: Done, tolerance: Tolerance) -> Comparison:
    at = " ".join(f"{name}{list(value.shape)}" for name, value in sample.feeds.items())
    if done.outputs is None:
        raise EngineError(f"the converted model does not run at {at}", engine_said=done.error)
    parts = []
    for name, want in sample.want.items():
        if name not in done.outputs:
            raise EngineError(f"the converted model has no output {name!r}")
        part = compare_output(done.outputs[name], want, plain=sample.plain)
        if not part.max_rel_error <= tolerance.max_rel_error or part.cosine < tolerance.min_cosine:
            detail = part.reason or f"relative error {part.max_rel_error:.3g}, cosine {part.cosine:.5f}"
            raise DifferenceError(
                f"output {name!r} of the converted model differs from ONNX Runtime at {at}: {detail}, "
                f"allowed {tolerance.max_rel_error:g}",
                feeds=sample.feeds,
                tolerance=tolerance.max_rel_error,
            )
        parts.append(part)
    return combine(parts)
