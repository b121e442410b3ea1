"""The confusion matrix: from a few classes with counts in the cells to a hundred as a pattern."""

from collections.abc import Sequence

import altair as alt
import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from tasks.report.pairing import Pairing, confusion
from tasks.report.text import columns, shorten
from tasks.report.theme import CHAR_PX, WIDTH, Record, chart, color, svg

MAX_CLASSES = 100
"""Above it only the classes with most errors are shown."""
_COUNTED = 30
"""Up to so many classes the cells hold counts."""
_RIGHT_EDGES, _WRONG_EDGES = (0.5, 0.8, 0.95), (0.03, 0.1, 0.25)
"""Shares of the true class where a stronger colour begins."""


def matrix(pairing: Pairing) -> Markup:
    """True classes down, predicted ones across; the stronger the colour the larger the share of the class."""
    counts = confusion(pairing, pairing.after_classes)
    kept = _most_errors(counts)
    totals, counts = counts.sum(axis=1)[kept], counts[np.ix_(kept, kept)]
    size = len(kept)
    limit, font_px = (12, 11) if size <= 10 else (22, 10) if size <= _COUNTED else (24, 9)
    labels = [shorten(pairing.labels[number], limit) for number in kept]
    room = int(max(columns(label) for label in labels) * CHAR_PX * font_px / 11) + 12
    cell_px = min(34, (WIDTH - room) // size) if size <= 10 else 18 if size <= _COUNTED else 11
    cells = _cells(counts, totals)
    layers = [*_grid(size), _squares(cells, size), *_names(labels, font_px)]
    if size <= _COUNTED:
        layers += _numbers(cells, size, min(11, cell_px // 2))
    right = int(np.trace(counts))
    return svg(
        layers,
        width=cell_px * size,
        height=cell_px * size,
        padding={"left": room, "right": 4, "top": room, "bottom": 4},
        alt_text=f"Confusion matrix of {size} classes: {right} images on the diagonal, "
        f"{int(counts.sum()) - right} beside it",
    )


def _most_errors(counts: npt.NDArray[np.int64]) -> list[int]:
    """All classes, or those with most errors as truth or as prediction, in their own order."""
    errors = counts.sum(axis=0) + counts.sum(axis=1) - 2 * np.diag(counts)
    return sorted(int(i) for i in np.argsort(-errors, kind="stable")[:MAX_CLASSES])


def _cells(counts: npt.NDArray[np.int64], totals: npt.NDArray[np.int64]) -> list[Record]:
    """One record a cell that is not empty."""
    cells: list[Record] = []
    for i, j in zip(*np.nonzero(counts), strict=True):
        share = float(counts[i, j] / totals[i])
        step = 1 + sum(share >= edge for edge in (_RIGHT_EDGES if i == j else _WRONG_EDGES))
        cells.append(
            {
                "row": int(i),
                "column": int(j),
                "row_end": int(i) + 1,
                "column_end": int(j) + 1,
                "row_middle": int(i) + 0.5,
                "column_middle": int(j) + 0.5,
                "step": f"{'right' if i == j else 'wrong'}-{step}",
                "strong": step >= 3,
                "count": int(counts[i, j]),
            }
        )
    return cells


def _x(field: str, size: int) -> alt.X:
    return alt.X(f"{field}:Q", axis=None, scale=alt.Scale(domain=[0, size], nice=False))


def _y(field: str, size: int) -> alt.Y:
    return alt.Y(f"{field}:Q", axis=None, scale=alt.Scale(domain=[0, size], reverse=True, nice=False))


def _grid(size: int) -> list[alt.Chart]:
    lines = [{"at": i, "start": 0, "end": size} for i in range(size + 1)]
    mark = chart(lines).mark_rule(color=color("line"), strokeWidth=0.6)
    return [
        mark.encode(x=_x("at", size), y=_y("start", size), y2="end:Q"),
        mark.encode(y=_y("at", size), x=_x("start", size), x2="end:Q"),
    ]


def _squares(cells: Sequence[Record], size: int) -> alt.Chart:
    steps = sorted({cell["step"] for cell in cells})
    hue = alt.Color("step:N", legend=None, scale=alt.Scale(domain=steps, range=[color(s) for s in steps]))
    x, y = _x("column", size), _y("row", size)
    return chart(cells).mark_rect().encode(x=x, x2="column_end:Q", y=y, y2="row_end:Q", color=hue)


def _names(labels: Sequence[str], font_px: int) -> list[alt.Chart]:
    names, size = [{"at": i + 0.5, "label": label} for i, label in enumerate(labels)], len(labels)
    down = chart(names).mark_text(align="right", fontSize=font_px, x=-5, color=color("muted"))
    across = chart(names).mark_text(align="left", angle=270, fontSize=font_px, y=-5, color=color("muted"))
    return [
        down.encode(y=_y("at", size), text="label:N"),
        across.encode(x=_x("at", size), text="label:N"),
    ]


def _numbers(cells: Sequence[Record], size: int, font_px: int) -> list[alt.Chart]:
    layers = []
    for strong, name in ((True, "on-strong"), (False, "ink")):
        chosen = [cell for cell in cells if cell["strong"] is strong]
        if chosen:
            text = chart(chosen).mark_text(fontSize=font_px, color=color(name))
            layers.append(text.encode(x=_x("column_middle", size), y=_y("row_middle", size), text="count:N"))
    return layers
