"""The inputs that a graph declares, and the shapes to run it at.

A graph that declares a dynamic axis is run at two sizes of that axis.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import onnx

from fleet.device.errors import UserError

Shapes = Mapping[str, tuple[int, ...]]

# Sizes tried for dynamic axes until the graph runs: (pixels of a spatial axis, length of another).
_FIRST_SIZES = ((64, 16), (224, 16), (32, 8), (16, 4), (8, 2), (640, 32), (4, 1))
# What spatial axes grow by for the second shape, and what other axes do; a size may have an upper limit.
_GROWTHS = ((32, 64), (32, 32), (1, 2), (64, 64), (160, 160), (-32, -32))
_LENGTHENINGS = (8, -1)
BATCHES = (1, 3)
"""Batch sizes that a dynamic batch axis is run at."""
FLOATS = ("float16", "float32", "float64")
MOST_BYTES = 1 << 28
"""Of all inputs of one run: a proof holds a dozen such sets and their outputs at once."""


@dataclass(frozen=True, kw_only=True)
class GraphInput:
    """One input as the graph declares it."""

    name: str
    dtype: str
    """numpy name."""
    dims: tuple[int | str, ...]
    """Extents; a string names a dynamic axis, the same string the same extent."""
    kinds: tuple[str, ...] = field(default=())
    """What a dynamic axis seems to be: batch, channel, spatial or length."""


def graph_inputs(model: onnx.ModelProto) -> tuple[GraphInput, ...]:
    """The inputs that a caller must feed.

    Raises:
        UserError: an input is no tensor, or has a dtype no engine input can have.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    found = []
    for value in model.graph.input:
        if value.name in constants:
            continue
        if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
            raise UserError(
                f"input {value.name!r} is no tensor with a known number of axes",
                allowed="tensors; an axis may be dynamic",
                next_step="export the model again with declared input shapes",
            )
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)).name
        if dtype not in (*FLOATS, "int8", "uint8", "int32", "int64", "bool"):
            raise UserError(
                f"input {value.name!r} has dtype {dtype}",
                allowed="float16, float32, float64, int8, uint8, int32, int64, bool",
                next_step="cast the input before the model",
            )
        dims = _dims(value)
        found.append(
            GraphInput(name=value.name, dtype=dtype, dims=dims, kinds=_kinds(model, value.name, dims))
        )
    return tuple(found)


def _dims(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    dims = value.type.tensor_type.shape.dim
    unnamed = [f"{value.name}[{axis}]" if axis else "batch of every input" for axis in range(len(dims))]
    return tuple(
        d.dim_value if d.HasField("dim_value") and d.dim_value > 0 else d.dim_param or unnamed[axis]
        for axis, d in enumerate(dims)
    )


def _kinds(model: onnx.ModelProto, name: str, dims: tuple[int | str, ...]) -> tuple[str, ...]:
    """A guess from the position alone: it only decides which sizes are tried first."""
    readers = [node.op_type for node in model.graph.node if name in node.input]
    kinds = []
    for axis in range(len(dims)):
        if axis == 0:
            kinds.append("batch")
        elif len(dims) < 4:
            kinds.append("length")
        elif (
            axis == 1
            and not isinstance(dims[-1], int)
            and (set(readers) & {"Conv", "ConvTranspose"} or len(dims) > 4)
        ):
            kinds.append("channel")
        else:
            kinds.append("spatial")
    return tuple(kinds)


def is_dynamic(inputs: Sequence[GraphInput]) -> bool:
    """Whether any axis is dynamic."""
    return any(isinstance(d, str) for graph_input in inputs for d in graph_input.dims)


def first_shapes(inputs: Sequence[GraphInput], model: onnx.ModelProto) -> list[Shapes]:
    """Shapes to try first, small ones before large ones; static inputs give exactly one."""
    channels = _channels(model)
    candidates = []
    for pixels, length in _FIRST_SIZES:
        by_kind = {"batch": BATCHES[0], "channel": channels, "spatial": pixels, "length": length}

        def size_of(g: GraphInput, axis: int, by_kind: dict[str, int] = by_kind) -> int:
            return by_kind[g.kinds[axis]]

        candidates.append(_assigned(inputs, size_of))
    return _distinct(candidates)


def other_shapes(inputs: Sequence[GraphInput], first: Shapes) -> list[Shapes]:
    """Shapes with every dynamic axis other than in `first`; several, as some graphs need square inputs."""
    one, other = BATCHES
    taken = {first[g.name][0] for g in inputs if g.dims and isinstance(g.dims[0], str)}
    batch = one if other in taken else other
    candidates = []
    for grow, longer in product(_GROWTHS, _LENGTHENINGS):

        def size_of(g: GraphInput, axis: int, grow: tuple[int, int] = grow, longer: int = longer) -> int:
            size = first[g.name][axis]
            grown = {"channel": size, "spatial": size + grow[axis % 2], "length": size + longer}
            return batch if g.kinds[axis] == "batch" else max(grown[g.kinds[axis]], 1)

        candidates.append(_assigned(inputs, size_of))
    return [shapes for shapes in _distinct(candidates) if shapes != first]


def _assigned(inputs: Sequence[GraphInput], size_of: Callable[[GraphInput, int], int]) -> Shapes:
    """Every dynamic axis gets the size that `size_of` gives to the first axis of its name."""
    values: dict[str, int] = {}
    return {
        g.name: tuple(
            values.setdefault(dim, size_of(g, axis)) if isinstance(dim, str) else dim
            for axis, dim in enumerate(g.dims)
        )
        for g in inputs
    }


def _distinct(candidates: Sequence[Shapes]) -> list[Shapes]:
    """In order, without repetitions: an axis that is fixed leaves many of them equal."""
    return [shapes for i, shapes in enumerate(candidates) if shapes not in candidates[:i]]


def _channels(model: onnx.ModelProto) -> int:
    """Channels the first convolution reads, for graphs that leave even that axis open; else 3."""
    weights = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Conv" and node.input[1] in weights:
            groups = next((a.i for a in node.attribute if a.name == "group"), 1)
            return int(weights[node.input[1]][1]) * groups
    return 3


def parse_shapes(texts: Sequence[str]) -> dict[str, list[tuple[int, ...]]]:
    """Shapes as a user writes them, NAME=1,3,224,224; a name given several times has several.

    Raises:
        UserError: a text of another form.
    """
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for text in texts:
        name, separator, extents = text.rpartition("=")
        if not separator or not name or not re.fullmatch(r"\d{1,6}(,\d{1,6})*", extents):
            raise UserError(
                f"--shape {text!r}",
                allowed="NAME=N,N,... with the input's name and its extents, e.g. images=1,3,224,224",
                next_step="correct --shape; repeat it for several sizes or inputs",
            )
        shapes.setdefault(name, []).append(tuple(int(n) for n in extents.split(",")))
    return shapes


def explicit_shapes(
    inputs: Sequence[GraphInput], asked: Mapping[str, Sequence[tuple[int, ...]]]
) -> list[Shapes]:
    """The shapes a user asked for, static inputs added; the k-th shapes of all inputs go together.

    Raises:
        UserError: an unknown input, a shape that contradicts the graph, or counts that do not match.
    """
    known = {g.name: g for g in inputs}
    count = max(len(shapes) for shapes in asked.values())
    for name, shapes in asked.items():
        if name not in known:
            raise _bad_shape(f"shape for {name!r}, which is no input", inputs)
        if len(shapes) not in (1, count):
            raise _bad_shape(f"{len(shapes)} shapes for {name!r}, but {count} for another input", inputs)
        for shape in shapes:
            dims = known[name].dims
            fits = len(shape) == len(dims) and min(shape, default=1) > 0
            if not fits or any(isinstance(d, int) and d != s for d, s in zip(dims, shape, strict=True)):
                raise _bad_shape(f"shape {shape} for {name!r}", inputs)
    for g in inputs:
        if g.name not in asked and any(isinstance(d, str) for d in g.dims):
            raise _bad_shape(f"no shape for the dynamic input {g.name!r}", inputs)
    return [
        {
            g.name: tuple(asked[g.name][k % len(asked[g.name])])
            if g.name in asked
            else tuple(int(d) for d in g.dims)
            for g in inputs
        }
        for k in range(count)
    ]


def check_affordable(inputs: Sequence[GraphInput], shapes: Shapes) -> None:
    """See that a run's inputs can be held in memory.

    Raises:
        UserError: they are too large to be tried.
    """
    total = sum(math.prod(shapes[g.name]) * np.dtype(g.dtype).itemsize for g in inputs)
    if total > MOST_BYTES:
        at = " ".join(f"{name}={','.join(map(str, shape))}" for name, shape in shapes.items())
        raise UserError(
            f"inputs of {total / 1e6:,.0f} MB at {at}",
            allowed=f"at most {MOST_BYTES / 1e6:.0f} MB in all: a dozen input sets are run and compared, at"
            " two sizes of each dynamic axis",
            next_step="give a smaller --shape, or export the model with a smaller or dynamic input",
        )


def _bad_shape(got: str, inputs: Sequence[GraphInput]) -> UserError:
    declared = "; ".join(f"{g.name}={','.join(map(str, g.dims))}" for g in inputs)
    return UserError(
        got,
        allowed=f"extents that fit {declared}",
        next_step="give --shape name=1,3,224,224, once for each size to prove, for every dynamic input",
    )
