"""Horizontal bars with their labels and values beside them: what ranks is readable without an axis."""

from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt
from markupsafe import Markup

from tasks.report.pairing import ClassRow
from tasks.report.text import columns, shorten, signed
from tasks.report.theme import CHAR_PX, WIDTH, Record, chart, color, svg

LABEL_COLUMNS = 22
_ROW_PX = 19


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar."""

    label: str
    value: float
    words: str
    """The value as it is written at the bar's end."""
    hue: str
    """The CSS variable that colours it."""
    ring: float | None = None
    """A second value, drawn as a ring."""


def bars(items: Sequence[Bar], *, alt_text: str, label_columns: int = LABEL_COLUMNS) -> Markup:
    """Bars from zero to the right, those below zero to the left, in the order given."""
    labels = [shorten(item.label, label_columns) for item in items]
    rings = [item.ring for item in items if item.ring is not None]
    gap = 10 if rings else 5
    left = int(max(columns(label) for label in labels) * CHAR_PX) + 2 * gap
    right = int(max(columns(item.words) for item in items) * CHAR_PX) + gap
    left_words = right if min(item.value for item in items) < 0 else 0
    low, high = min(0.0, *rings, *(i.value for i in items)), max(0.0, *rings, *(i.value for i in items))
    x_scale = alt.Scale(domain=[low, high if high > low else low + 1], nice=False, zero=False)
    y_scale = alt.Scale(domain=[0, len(items)], reverse=True, nice=False)
    layers = _layers([_record(*pair) for pair in enumerate(items)], x_scale, y_scale, gap)
    names = [{"middle": index + 0.5, "label": label} for index, label in enumerate(labels)]
    text = chart(names).mark_text(align="right", fontSize=11, color=color("ink"), x=-gap - left_words)
    layers.append(text.encode(y=alt.Y("middle:Q", axis=None, scale=y_scale), text="label:N"))
    return svg(
        layers,
        width=WIDTH - left - right - left_words,
        height=_ROW_PX * len(items),
        alt_text=alt_text,
        padding={"left": left + left_words, "right": right, "top": 2, "bottom": 2},
    )


def _record(index: int, item: Bar) -> Record:
    return {
        "top": index + 0.2,
        "middle": index + 0.5,
        "bottom": index + 0.8,
        "zero": 0,
        "value": item.value,
        "end": max(item.value, item.ring) if item.ring is not None and item.value >= 0 else item.value,
        "hue": item.hue,
        "words": item.words,
        "ring": item.ring,
    }


def _layers(values: Sequence[Record], x_scale: alt.Scale, y_scale: alt.Scale, gap: int) -> list[alt.Chart]:
    def x(field: str) -> alt.X:
        return alt.X(f"{field}:Q", axis=None, scale=x_scale)

    def y(field: str) -> alt.Y:
        return alt.Y(f"{field}:Q", axis=None, scale=y_scale)

    hues = sorted({value["hue"] for value in values})
    hue = alt.Color("hue:N", legend=None, scale=alt.Scale(domain=hues, range=[color(h) for h in hues]))
    layers = [
        chart(values).mark_rect().encode(x=x("value"), x2="zero:Q", y=y("top"), y2="bottom:Q", color=hue)
    ]
    for align, side in (("right", -1), ("left", 1)):
        chosen = [value for value in values if (value["value"] < 0) is (side < 0)]
        if chosen:
            words = chart(chosen).mark_text(align=align, dx=gap * side, fontSize=11, color=color("muted"))
            layers.append(words.encode(x=x("end"), y=y("middle"), text="words:N"))
    ringed = [value for value in values if value["ring"] is not None]
    if ringed:
        ring = chart(ringed).mark_point(filled=False, opacity=1, size=45, strokeWidth=1.6, color=color("ink"))
        layers.append(ring.encode(x=x("ring"), y=y("middle")))
    return layers


def class_deltas(rows: Sequence[ClassRow]) -> Markup:
    """What each class gained or lost, in percentage points."""
    items = [
        Bar(
            label=row.label,
            value=row.delta_pp,
            words=signed(row.delta_pp, 1),
            hue="bad" if row.delta_pp < 0 else "good",
        )
        for row in rows
    ]
    worst = "; ".join(f"{shorten(row.label, 40)} {signed(row.delta_pp, 1)} pp" for row in rows[:5])
    return bars(items, alt_text=f"Change of accuracy by class in percentage points, worst first: {worst}")
