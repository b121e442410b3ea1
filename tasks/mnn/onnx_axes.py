"""Dynamic axes that a graph promises: they must move with the inputs, or a size was baked in at export."""

from collections.abc import Sequence

import onnx

from fleet.device.errors import EngineError
from tasks.mnn.onnx_inputs import GraphInput, Shapes

_BAKED = "a size was baked in when the ONNX was exported"


class UnprovenError(EngineError):
    """The ONNX itself is at fault: it does not run, or not as it declares."""


Sizes = Sequence[tuple[Shapes, dict[str, set[tuple[int, ...]]]]]
"""The shapes the inputs had, and those each output took: one entry for each set of shapes tried."""


def check_declared(model: onnx.ModelProto, declared: Sequence[GraphInput], sizes: Sizes) -> list[str]:
    """Look at every dynamic axis that an output declares.

    Returns:
        What is declared wrongly but computed rightly: an axis labelled like an input's that has another size
        and moves with it, as exporters write it for an image that is enlarged.

    Raises:
        UnprovenError: an axis that stays what it was when the inputs change.
    """
    said = []
    for output in model.graph.output:
        for axis, dim in enumerate(output.type.tensor_type.shape.dim):
            if dim.dim_param:
                said += _check_axis(output.name, axis, dim.dim_param, declared, sizes)
    return said


def _check_axis(
    output: str, axis: int, symbol: str, declared: Sequence[GraphInput], sizes: Sizes
) -> list[str]:
    seen: dict[int, set[int]] = {}
    wrong = ""
    for shapes, taken in sizes:
        promised = {d: n for g in declared for d, n in zip(g.dims, shapes[g.name], strict=True)}.get(symbol)
        found = {shape[axis] for shape in taken[output]}
        seen.setdefault(-1 if promised is None else promised, set()).update(found)
        if promised is not None and found != {promised} and not wrong:
            wrong = (
                f"output {output!r} declares axis {axis} to be {symbol!r} like an input, but it is "
                f"{min(found)} at {as_text(shapes)}"
            )
    if wrong:
        moves = len(seen) > 1 and len({min(found) for found in seen.values()}) == len(seen)
        if moves and all(len(found) == 1 for found in seen.values()):
            return [wrong]
        raise UnprovenError(f"{wrong}: {_BAKED}")
    everywhere = set().union(*seen.values())
    if len(sizes) > 1 and len(everywhere) == 1 and not _is_generated(symbol):
        at = " and at ".join(as_text(shapes) for shapes, _ in sizes)
        raise UnprovenError(
            f"output {output!r} declares axis {axis} dynamic ({symbol!r}), but it is {everywhere.pop()} at "
            f"{at}: {_BAKED}"
        )
    return []


def _is_generated(symbol: str) -> bool:
    """Whether an exporter made the name up because it could not compute the extent: it promises nothing."""
    return "_dim_" in symbol or symbol.startswith(("unk__", "unk_", "?"))


def as_text(shapes: Shapes) -> str:
    """Shapes as a user would write them."""
    return " ".join(f"{name}={','.join(map(str, shape))}" for name, shape in shapes.items())
