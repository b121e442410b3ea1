"""Values for the inputs of a graph of which only the ONNX is known.

A graph that is right on one lucky input proves little, so every input is drawn from several distributions.
The plain ones are what a model expects; `ties` has equal values, `small` shows an epsilon that was lost,
`wide` saturates. Others are drawn once each where they can show something: zeros, pixels, negative indices.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from tasks.mnn.onnx_inputs import FLOATS, GraphInput, Shapes
from tasks.mnn.onnx_limits import index_inputs

Array = npt.NDArray[Any]

PLAIN = ("normal", "unit", "negative")
DISTRIBUTIONS = (*PLAIN, "ties", "wide", "small")
BYTES = "bytes"
"""0 to 255 everywhere, for graphs that narrow to 8 bits."""
SPARSE, ZEROS = "sparse", "zeros"
"""Half of the values zero, and all of them: what divides by a norm or a deviation."""
PIXELS = "pixels"
"""0 to 255 in every input that may be a picture: the exponential of the engine ends at about 88."""
FROM_END = "from the end"
"""-1 and 0 in every input that is used as an index which ONNX lets count from the end."""
_ALL = (*DISTRIBUTIONS, BYTES, SPARSE, ZEROS, PIXELS, FROM_END)

_INTEGER_LIMITS = (2, 1, 4, 8)  # exclusive upper bounds: small enough to be valid indices of small axes
# Ties keep off zero and halves, where engines may round either way, unless a graph rounds.
_TIE_STEP, _TIE_SHIFT, _HALF_STEP = 0.37, 0.05, 0.5
_CHANNELS, _FEWEST_PX = (1, 3, 4), 4
_RANKING = frozenset({"TopK", "NonMaxSuppression"})  # among equal values any order may be meant


def extra_kinds(model: onnx.ModelProto, inputs: Sequence[GraphInput], shapes: Shapes) -> tuple[str, ...]:
    """The distributions that this graph needs beyond the usual ones, raw pixels last."""
    operators = {node.op_type for node in model.graph.node}
    floats = any(g.dtype in FLOATS for g in inputs)
    wanted = {
        BYTES: any(map(_narrows, model.graph.node)),
        SPARSE: floats,
        ZEROS: floats and not operators & _RANKING,
        FROM_END: bool(index_inputs(model)),
        PIXELS: bool(pictures(inputs, shapes)),
    }
    return tuple(kind for kind, needed in wanted.items() if needed)


def pictures(inputs: Sequence[GraphInput], shapes: Shapes) -> set[str]:
    """Float inputs that may be batches of pictures, by their shape alone.

    Four axes with 1, 3 or 4 channels first or last; one channel, which a mask has too, only where there is no
    other float input.
    """
    floats = [g.name for g in inputs if g.dtype in FLOATS]
    found = set()
    for name in floats:
        shape = shapes[name]
        if len(shape) != 4:
            continue
        sides = {shape[1]: shape[2:], shape[3]: shape[1:3]}
        for channels, side in sides.items():
            if channels in _CHANNELS and min(side) >= _FEWEST_PX and (channels > 1 or len(floats) == 1):
                found.add(name)
    return found


def seeded_feeds(
    inputs: Sequence[GraphInput],
    shapes: Shapes,
    kind: str,
    seed: int,
    *,
    halves: bool = False,
    indices: frozenset[str] = frozenset(),
) -> dict[str, Array]:
    """One set of inputs.

    Args:
        inputs: What the graph declares.
        shapes: Extents of every input.
        kind: A distribution; of integers and booleans the limits vary.
        seed: Same seed, same values.
        halves: Let `ties` be multiples of one half, for graphs that round.
        indices: Inputs that `from the end` is meant for.
    """
    number = _ALL.index(kind)
    rng = np.random.default_rng([seed, number])
    ties = (_HALF_STEP, 0.0) if halves else (_TIE_STEP, _TIE_SHIFT)
    shown = pictures(inputs, shapes)
    feeds = {}
    for g in inputs:
        shape = shapes[g.name]
        if g.dtype in FLOATS:
            drawn = kind if kind in _FLOAT_KINDS and (kind != PIXELS or g.name in shown) else "normal"
            feeds[g.name] = _floats(rng, shape, drawn, ties).astype(g.dtype)
        elif kind == FROM_END and g.name in indices:
            feeds[g.name] = (np.arange(math.prod(shape)) % 2 - 1).reshape(shape).astype(g.dtype)
        else:
            feeds[g.name] = _integers(rng, shape, g.dtype, number)
    return feeds


def _narrows(node: onnx.NodeProto) -> bool:
    """Whether it casts to 8 bits."""
    narrow = {onnx.TensorProto.UINT8, onnx.TensorProto.INT8}
    return node.op_type == "Cast" and any(a.name == "to" and a.i in narrow for a in node.attribute)


def _integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, number: int) -> Array:
    if dtype == "bool":
        return rng.random(shape) < (0.5, 0.1, 0.9)[number % 3]
    if dtype in {"uint8", "int8"}:  # pixels, never indices
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max + 1, shape).astype(dtype)
    return rng.integers(0, _INTEGER_LIMITS[number % len(_INTEGER_LIMITS)], shape).astype(dtype)


_Draw = Callable[[np.random.Generator, tuple[int, ...], tuple[float, float]], Array]
_FLOAT_KINDS: dict[str, _Draw] = {
    "normal": lambda rng, shape, _: rng.standard_normal(shape),
    "unit": lambda rng, shape, _: rng.random(shape),
    "negative": lambda rng, shape, _: -rng.random(shape),
    "ties": lambda rng, shape, ties: rng.integers(-5, 6, shape) * ties[0] + ties[1],
    "wide": lambda rng, shape, _: 10 * rng.standard_normal(shape),
    "small": lambda rng, shape, _: 0.01 * rng.standard_normal(shape),
    BYTES: lambda rng, shape, _: rng.integers(0, 256, shape),
    SPARSE: lambda rng, shape, _: rng.standard_normal(shape) * (rng.random(shape) < 0.5),
    ZEROS: lambda _rng, shape, _: np.zeros(shape),
    PIXELS: lambda rng, shape, _: rng.integers(0, 256, shape),
}


def _floats(rng: np.random.Generator, shape: tuple[int, ...], kind: str, ties: tuple[float, float]) -> Array:
    return np.asarray(_FLOAT_KINDS[kind](rng, shape, ties))
