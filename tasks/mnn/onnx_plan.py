"""What a converted model has to reproduce: shapes, inputs, and what ONNX Runtime makes of them.

The reference is ONNX Runtime without graph optimisations, which evaluates the graph as written. With
optimisations it must agree with itself, or there is no reference.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from fleet.device.errors import EngineError
from fleet.lab.child import PAST_LIMIT
from tasks.mnn.compare import Comparison, compare
from tasks.mnn.onnx_inputs import (
    DISTRIBUTIONS,
    PIXELS,
    PLAIN,
    GraphInput,
    Shapes,
    explicit_shapes,
    first_shapes,
    graph_inputs,
    is_dynamic,
    other_shapes,
    seeded_feeds,
)
from tasks.mnn.onnx_runs import Done, Outputs, Planned, Side, run_plan

Array = npt.NDArray[Any]
Feeds = Mapping[str, Array]

_INFINITE = 1e30  # the engine writes large numbers where ONNX says infinity
_AMBIGUOUS = 1e-2  # two answers of ONNX Runtime further apart than this are no rounding
_ROUNDING = frozenset({"Round", "QuantizeLinear"})  # halves go to the even neighbour


class UnprovenError(EngineError):
    """The ONNX itself is at fault: it does not run, or not as it declares."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One set of inputs with what the reference makes of it."""

    feeds: Feeds
    want: Outputs
    plain: bool
    """Whether the inputs are of an ordinary kind, so that even infinities must agree."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything the engine has to reproduce; one group of samples for each shape."""

    shapes: tuple[Shapes, ...]
    samples: tuple[tuple[Sample, ...], ...]

    def constant_outputs(self) -> list[str]:
        """Outputs that no input changes, such as the zero logits of an untrained head: they prove little."""
        first = self.samples[0][0].want
        values = {name: [s.want[name] for group in self.samples for s in group] for name in first}
        return [name for name, seen in values.items() if all(np.array_equal(v, seen[0]) for v in seen)]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Where the inputs come from."""

    shapes: Mapping[str, Sequence[tuple[int, ...]]]
    """Asked for, by input name; empty for shapes chosen here."""
    runs: int
    """Input sets a shape."""
    seed: int
    images: Sequence[Feeds] = ()
    """Inputs made from real images, used first at the shape they have."""
    only_images: bool = False
    """Leave random inputs out: int8 scales are meant for real ones."""
    largest: Mapping[str, float] | None = None
    """Largest |value| of an input that the model is made for; others are as drawn."""


def plan_parity(path: Path, model: onnx.ModelProto, inputs: Inputs, *, timeout_s: float) -> Plan:
    """Choose shapes and inputs, and compute the reference.

    Args:
        path: The model as one file.
        model: The same, parsed, with the shapes that the graph itself declares.
        inputs: Where shapes and values come from.
        timeout_s: Limit of each child process.

    Raises:
        UserError: the shapes asked for contradict the graph.
        UnprovenError: there is no usable reference, or an axis that the graph declares dynamic is not.
    """
    declared = graph_inputs(model)
    halves = any(node.op_type in _ROUNDING for node in model.graph.node)
    kinds = (*DISTRIBUTIONS, PIXELS) if any(map(_narrows, model.graph.node)) else DISTRIBUTIONS

    def run(feeds: Sequence[Feeds], side: Side) -> list[Done]:
        return run_plan(side, path, [Planned(f) for f in feeds], timeout_s=timeout_s)

    def attempt(shapes: Shapes) -> tuple[list[Sample], str]:
        drawn = list(_draw(declared, shapes, inputs, kinds, halves=halves))
        done = run([feeds for feeds, _ in drawn], "reference")
        samples = [
            Sample(feeds=feeds, want=one.outputs, plain=plain)
            for (feeds, plain), one in zip(drawn, done, strict=True)
            if one.outputs is not None
        ]
        if done[0].error.startswith(PAST_LIMIT):  # another shape would take as long again
            raise UnprovenError(f"no reference at {as_text(shapes)}: ONNX Runtime {done[0].error}")
        return samples, done[0].error

    of_images = [{name: value.shape for name, value in feeds.items()} for feeds in inputs.images[:1]]
    candidates = [*of_images, *first_shapes(declared, model)]
    groups = _choose_shapes(declared, candidates, inputs.shapes, attempt)
    for _, samples in groups:
        _check_reference(samples, run([s.feeds for s in samples], "optimized"))
    _check_declared(model, declared, groups)
    return Plan(shapes=tuple(s for s, _ in groups), samples=tuple(tuple(g) for _, g in groups))


def _draw(
    declared: Sequence[GraphInput], shapes: Shapes, inputs: Inputs, kinds: Sequence[str], *, halves: bool
) -> Iterable[tuple[Feeds, bool]]:
    """Input sets at one shape, each with whether it is of a plain kind."""
    fitting = [f for f in inputs.images if all(f[g.name].shape == tuple(shapes[g.name]) for g in declared)]
    for feeds in fitting[: inputs.runs]:
        yield feeds, True
    if fitting and inputs.only_images:
        return
    for k in range(inputs.runs + len(kinds) - len(DISTRIBUTIONS)):
        kind, round_number = kinds[k % len(kinds)], k // len(kinds)
        feeds = seeded_feeds(declared, shapes, kind, inputs.seed + round_number, halves=halves)
        yield (
            {name: _scaled(value, (inputs.largest or {}).get(name)) for name, value in feeds.items()},
            kind in PLAIN,
        )


def _narrows(node: onnx.NodeProto) -> bool:
    """Whether it casts to 8 bits."""
    narrow = {onnx.TensorProto.UINT8, onnx.TensorProto.INT8}
    return node.op_type == "Cast" and any(a.name == "to" and a.i in narrow for a in node.attribute)


def _scaled(value: Array, largest: float | None) -> Array:
    if largest is None or value.dtype.kind != "f":
        return value
    return (value * (largest / max(float(np.abs(value).max()), 1e-9))).astype(value.dtype)


Group = tuple[Shapes, list[Sample]]


def _choose_shapes(
    declared: Sequence[GraphInput],
    candidates: Iterable[Shapes],
    asked: Mapping[str, Sequence[tuple[int, ...]]],
    attempt: Any,
) -> list[Group]:
    """One shape for a static graph, at least two that differ in every dynamic axis for another."""
    if asked:
        groups = [
            _attempt_all(declared, [shapes], attempt, asked=True)
            for shapes in explicit_shapes(declared, asked)
        ]
    else:
        groups = [_attempt_all(declared, candidates, attempt, asked=False)]
    if not is_dynamic(declared) or len(groups) > 1:
        return groups
    errors = []
    for shapes in other_shapes(declared, groups[0][0]):
        samples, error = attempt(shapes)
        if samples:
            return [*groups, (shapes, samples)]
        errors.append(f"{as_text(shapes)}: {error}")
    axes = sorted({str(d) for g in declared for d in g.dims if isinstance(d, str)})
    raise UnprovenError(
        f"the ONNX declares the axes {', '.join(axes)} dynamic, but runs only at {as_text(groups[0][0])}: "
        f"a size was baked in when it was exported. At {errors[0]}"
    )


def _attempt_all(
    declared: Sequence[GraphInput], candidates: Iterable[Shapes], attempt: Any, *, asked: bool
) -> Group:
    """The first candidate that ONNX Runtime can run."""
    errors = []
    for shapes in candidates:
        samples, error = attempt(shapes)
        if samples:
            return shapes, samples
        errors.append(f"{as_text(shapes)}: {error}")
    hint = "or --shape is wrong" if asked else "or it needs a size that --shape NAME=1,3,224,224 must name"
    baked = f" A size was baked in when it was exported, {hint}." if is_dynamic(declared) else ""
    raise UnprovenError(
        f"ONNX Runtime does not run the ONNX, so nothing can be proven.{baked} At {errors[0]}"
    )


def as_text(shapes: Shapes) -> str:
    """Shapes as a user would write them."""
    return " ".join(f"{name}={','.join(map(str, shape))}" for name, shape in shapes.items())


def _check_reference(samples: Sequence[Sample], again: Sequence[Done]) -> None:
    """ONNX Runtime must agree with itself: a graph it reads in two ways, or a random one, proves nothing."""
    for sample, done in zip(samples, again, strict=True):
        if done.outputs is None:
            raise UnprovenError(f"no reference: ONNX Runtime with optimisations {done.error}")
        for name, want in sample.want.items():
            error = compare_output(done.outputs[name], want, plain=False).max_rel_error
            if sample.plain and error > _AMBIGUOUS:
                raise UnprovenError(
                    f"no reference: with and without graph optimisations ONNX Runtime gives two answers for "
                    f"output {name!r}, {error:.3g} of its range apart; the graph is random or ambiguous"
                )


def _check_declared(model: onnx.ModelProto, declared: Sequence[GraphInput], groups: Sequence[Group]) -> None:
    """A dynamic axis that an output declares must move: a traced size stays what it was at export."""
    for output in model.graph.output:
        for axis, dim in enumerate(output.type.tensor_type.shape.dim):
            if dim.dim_param:
                _check_axis(output.name, axis, dim.dim_param, declared, groups)


def _check_axis(
    output: str, axis: int, symbol: str, declared: Sequence[GraphInput], groups: Sequence[Group]
) -> None:
    baked = "a size was baked in when the ONNX was exported"
    seen = set()
    for shapes, samples in groups:
        promised = {d: n for g in declared for d, n in zip(g.dims, shapes[g.name], strict=True)}.get(symbol)
        sizes = {sample.want[output].shape[axis] for sample in samples}
        seen |= sizes
        if promised is not None and sizes != {promised}:
            raise UnprovenError(
                f"output {output!r} declares axis {axis} to be {symbol!r} like an input, but it is "
                f"{min(sizes)} at {as_text(shapes)}: {baked}"
            )
    if len(groups) > 1 and len(seen) == 1 and not _is_generated(symbol):
        at = " and at ".join(as_text(shapes) for shapes, _ in groups)
        raise UnprovenError(
            f"output {output!r} declares axis {axis} dynamic ({symbol!r}), but it is {seen.pop()} at {at}: "
            f"{baked}"
        )


def _is_generated(symbol: str) -> bool:
    """Whether an exporter made the name up because it could not compute the extent: it promises nothing."""
    return "_dim_" in symbol or symbol.startswith(("unk__", "unk_", "?"))


def compare_output(got: Array, want: Array, *, plain: bool) -> Comparison:
    """`compare`, but with a share of differing elements for integers, and the engine's notion of infinity.

    Args:
        got: The engine's output.
        want: The reference's; where it is NaN nothing is compared.
        plain: Compare infinities too, not only numbers.
    """
    if got.shape != want.shape or want.dtype.kind not in "biuf" or got.dtype.kind not in "biuf":
        return compare(got, want)
    if want.dtype.kind in "biu":
        result = compare(got, want)
        share = float((got != want).mean()) if want.size else 0.0
        return Comparison(
            max_abs_error=result.max_abs_error,
            max_rel_error=share,
            cosine=1.0 - share,
            finite_count=result.finite_count,
            reason=result.reason,
        )
    got, want = got.astype(np.float64), want.astype(np.float64)
    skipped = np.isnan(want) | (np.isinf(want) & (not plain))
    agreed = np.isinf(want) & (np.abs(got) > _INFINITE) & (np.sign(want) == np.sign(got))
    return compare(np.where(agreed, want, got)[~skipped], want[~skipped])
