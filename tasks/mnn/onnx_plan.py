"""What a converted model has to reproduce: shapes, inputs, and what ONNX Runtime makes of them.

The reference is ONNX Runtime without graph optimisations, which evaluates the graph as written. With
optimisations it must agree with itself, or there is no reference.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from fleet.device.errors import UserError
from fleet.lab.child import PAST_LIMIT
from tasks.mnn.onnx_axes import UnprovenError, as_text, check_declared
from tasks.mnn.onnx_compare import compare_output
from tasks.mnn.onnx_draws import (
    DISTRIBUTIONS,
    PIXELS,
    PLAIN,
    ZEROS,
    extra_kinds,
    seeded_feeds,
)
from tasks.mnn.onnx_inputs import (
    GraphInput,
    Shapes,
    check_affordable,
    explicit_shapes,
    first_shapes,
    graph_inputs,
    is_dynamic,
    other_shapes,
)
from tasks.mnn.onnx_limits import index_inputs
from tasks.mnn.onnx_runs import Done, Outputs, Planned, Side, run_plan

Array = npt.NDArray[Any]
Feeds = Mapping[str, Array]

IMAGES = "images"
"""The kind of a sample that was made from real pictures."""
_AMBIGUOUS = 1e-2  # two answers of ONNX Runtime further apart than this are no rounding
_ROUNDING = frozenset({"Round", "QuantizeLinear"})  # halves go to the even neighbour


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One set of inputs with what the reference makes of it."""

    feeds: Feeds
    want: Outputs
    kind: str
    """The distribution the inputs were drawn from, or `images`."""
    rounding: Mapping[str, float] = field(default_factory=dict)
    """By output, how far ONNX Runtime is from itself with optimisations, in units of the output's range."""

    @property
    def plain(self) -> bool:
        """Whether the inputs are of an ordinary kind, so that even infinities must agree."""
        return self.kind in (*PLAIN, IMAGES)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything the engine has to reproduce; one group of samples for each shape."""

    shapes: tuple[Shapes, ...]
    samples: tuple[tuple[Sample, ...], ...]
    notes: tuple[str, ...] = ()
    """What is declared wrongly in the ONNX and computed rightly all the same."""

    def divided(self) -> tuple["Plan", "Plan | None"]:
        """The samples of a range that a model may be made for, and the raw pixels if there are any."""
        usual = tuple(tuple(s for s in group if s.kind != PIXELS) for group in self.samples)
        far = [tuple(s for s in group if s.kind == PIXELS) for group in self.samples]
        tried = [(shapes, group) for shapes, group in zip(self.shapes, far, strict=True) if group]
        pixels = Plan(shapes=tuple(s for s, _ in tried), samples=tuple(g for _, g in tried))
        return replace(self, samples=usual), pixels if tried else None

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
    largest: Mapping[str, float] = field(default_factory=dict)
    """Largest |value| of an input that the model is made for; others are as drawn."""


def plan_parity(path: Path, model: onnx.ModelProto, inputs: Inputs, *, timeout_s: float) -> Plan:
    """Choose shapes and inputs, and compute the reference.

    Args:
        path: The model as one file.
        model: The same, parsed, with the shapes that the graph itself declares.
        inputs: Where shapes and values come from.
        timeout_s: Limit of each child process.

    Raises:
        UserError: the shapes asked for contradict the graph, or the model runs at no shape that images have.
        UnprovenError: there is no usable reference, or an axis that the graph declares dynamic is not.
    """
    declared = graph_inputs(model)
    halves = any(node.op_type in _ROUNDING for node in model.graph.node)
    indices = index_inputs(model)

    def run(feeds: Sequence[Feeds], side: Side) -> list[Done]:
        return run_plan(side, path, [Planned(f) for f in feeds], timeout_s=timeout_s)

    def draw(shapes: Shapes, kind: str, seed: int) -> Feeds:
        feeds = seeded_feeds(declared, shapes, kind, seed, halves=halves, indices=indices)
        return {name: _scaled(value, inputs.largest.get(name)) for name, value in feeds.items()}

    def attempt(shapes: Shapes) -> tuple[list[Sample], str]:
        check_affordable(declared, shapes)
        drawn = list(_draw(declared, shapes, inputs, extra_kinds(model, declared, shapes), draw))
        done = run([feeds for feeds, _ in drawn], "reference")
        samples = [
            Sample(feeds=feeds, want=one.outputs, kind=kind)
            for (feeds, kind), one in zip(drawn, done, strict=True)
            if one.outputs is not None and not (kind == ZEROS and _has_nan(one.outputs))
        ]
        if done[0].error.startswith(PAST_LIMIT):  # another shape would take as long again
            raise UnprovenError(f"no reference at {as_text(shapes)}: ONNX Runtime {done[0].error}")
        return samples, done[0].error

    of_images = [{name: value.shape for name, value in feeds.items()} for feeds in inputs.images[:1]]
    candidates = [*of_images, *first_shapes(declared, model)]
    groups = [
        (shapes, _agreed(samples, run([s.feeds for s in samples], "optimized")))
        for shapes, samples in _choose_shapes(declared, candidates, inputs.shapes, attempt)
    ]
    if inputs.images and not any(sample.kind == IMAGES for _, group in groups for sample in group):
        raise UserError(
            f"calibration images as {as_text(of_images[0])}",
            allowed=f"a shape that the model runs at, such as {as_text(groups[0][0])}",
            next_step="give --preprocess with the `size_px` and `layout` of the model's input",
        )
    taken = [(s, {name: {x.want[name].shape for x in g} for name in g[0].want}) for s, g in groups]
    notes = check_declared(model, declared, taken)
    return Plan(
        shapes=tuple(s for s, _ in groups), samples=tuple(tuple(g) for _, g in groups), notes=tuple(notes)
    )


def _draw(
    declared: Sequence[GraphInput],
    shapes: Shapes,
    inputs: Inputs,
    extras: Sequence[str],
    draw: Callable[[Shapes, str, int], Feeds],
) -> Iterable[tuple[Feeds, str]]:
    """Input sets at one shape, each with its kind; real pictures show what range pixels have."""
    fitting = [f for f in inputs.images if all(f[g.name].shape == tuple(shapes[g.name]) for g in declared)]
    for feeds in fitting[: None if inputs.only_images else inputs.runs]:
        yield feeds, IMAGES
    if fitting and inputs.only_images:
        return
    for k in range(inputs.runs):
        round_number, number = divmod(k, len(DISTRIBUTIONS))
        kind = DISTRIBUTIONS[number]
        yield draw(shapes, kind, inputs.seed + round_number), kind
    for kind in extras:
        if kind != PIXELS or not (inputs.images or inputs.largest):
            yield draw(shapes, kind, inputs.seed), kind


def _has_nan(outputs: Outputs) -> bool:
    return any(value.dtype.kind == "f" and np.isnan(value).any() for value in outputs.values())


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


def _agreed(samples: Sequence[Sample], again: Sequence[Done]) -> list[Sample]:
    """ONNX Runtime must agree with itself: a graph it reads in two ways, or a random one, proves nothing.

    Returns:
        The samples with how far it is from itself; a special one that it fails on is left out.
    """
    kept = []
    for sample, done in zip(samples, again, strict=True):
        usual = sample.kind in DISTRIBUTIONS or sample.kind == IMAGES
        if done.outputs is None:
            if usual:
                raise UnprovenError(f"no reference: ONNX Runtime with optimisations {done.error}")
            continue
        errors = {
            name: compare_output(done.outputs[name], want, plain=False).max_rel_error
            for name, want in sample.want.items()
        }
        for name, error in errors.items():
            if sample.plain and error > _AMBIGUOUS:
                raise UnprovenError(
                    f"no reference: with and without graph optimisations ONNX Runtime gives two answers for "
                    f"output {name!r}, {error:.3g} of its range apart; the graph is random or ambiguous"
                )
        kept.append(replace(sample, rounding=errors))
    return kept
