"""The report's figures. Each is drawn 360 px wide: as it is on a phone, somewhat larger on a desk."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import numpy.typing as npt
import pandas as pd
from markupsafe import Markup

from tasks.report.evidence import Champion
from tasks.report.pairing import ClassRow, Pairing, confusion
from tasks.report.rows import Row
from tasks.report.text import columns, shorten, signed
from tasks.report.theme import color, place_letters, svg

WIDTH = 360
_SHAPES = {"fp32": "circle", "fp16": "square", "w8": "triangle-up", "i8": "diamond"}
_LABEL_COLUMNS = 22
_CHAR_PX = 6.4
"""Of an 11 px label, on the generous side."""
_ROW_PX = 19
_LEFT_PX = 42
"""Room for the labels of a vertical axis."""
MATRIX_CLASSES = 100
"""Above it only the classes with most errors are in the matrix."""

Record = dict[str, Any]


def _data(values: Sequence[Record]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(values)))


def _scale(low: float, high: float, *, share: float = 0.08) -> tuple[float, float]:
    """A domain with some air; never empty."""
    air = (high - low) * share or abs(high) * share or 1.0
    return low - air, high + air


def _upright(**options: Any) -> alt.Axis:
    """A vertical axis whose title stands above it, where no label can be in its way."""
    return alt.Axis(
        titleAngle=0, titleAlign="left", titleBaseline="bottom", titleX=-_LEFT_PX + 2, titleY=-9, **options
    )


def front(
    rows: Sequence[Row], costs: Sequence[float], *, axis: str, champion: Champion | None, with_size: bool
) -> Markup:
    """Top-1 over one cost, a letter and a shape a variant; the line joins what nothing beats on both.

    Args:
        rows: Variants with a measured accuracy.
        costs: One a variant.
        axis: Name and unit of the cost.
        champion: Drawn too: as points where its cost is known, else as lines at its accuracy.
        with_size: Whether the cost is the size of the model file in MB, which is known of a champion.
    """
    intervals = [row.top1 for row in rows if row.top1]
    old = [(v.size_bytes / 1e6, 100 * v.top1) for v in champion.variants.values()] if champion else []
    tops = [100 * top1.value for top1 in intervals]
    lows, highs = [100 * i.low for i in intervals], [100 * i.high for i in intervals]
    x_low, x_high = 0.0, max([*costs, *(x for x, _ in old if with_size)]) * 1.12 or 1.0
    y_low, y_high = _scale(
        min([*lows, *(y for _, y in old)]), max([*highs, *(y for _, y in old)]), share=0.05
    )
    y_high = min(y_high, 101.0)
    width, height = WIDTH - _LEFT_PX - 10, 214
    points = [
        (width * (cost - x_low) / (x_high - x_low), height * (y_high - top) / (y_high - y_low))
        for cost, top in zip(costs, tops, strict=True)
    ]
    places = place_letters(points, width=width, height=height)
    values = [
        {
            "x": cost, "y": top, "low": low, "high": high, "letter": row.key, "precision": row.variant.precision,
            "lx": x_low + px / width * (x_high - x_low), "ly": y_high - py / height * (y_high - y_low),
        }
        for row, cost, top, low, high, (px, py) in zip(rows, costs, tops, lows, highs, places, strict=True)
    ]  # fmt: skip
    x = alt.X(
        "x:Q", title=axis, scale=alt.Scale(domain=[x_low, x_high], nice=False), axis=alt.Axis(tickCount=5)
    )
    y_scale = alt.Scale(domain=[y_low, y_high], nice=False, zero=False)
    y = alt.Y("y:Q", title="top-1 (%)", scale=y_scale, axis=_upright(tickCount=5))
    order = list(_SHAPES)
    hue = alt.Color(
        "precision:N", legend=None, scale=alt.Scale(domain=order, range=[color(p) for p in order])
    )
    shape = alt.Shape(
        "precision:N", legend=None, scale=alt.Scale(domain=order, range=[_SHAPES[p] for p in order])
    )
    layers = [
        _data(values)
        .mark_rule(opacity=0.45)
        .encode(x=x, y=alt.Y("low:Q", title="top-1 (%)"), y2="high:Q", color=hue),
        _data(_frontier(values))
        .mark_line(color=color("muted"), strokeDash=[3, 3], interpolate="step-after")
        .encode(x=x, y=y),
        *_champion_layers(old, x, y, with_size=with_size),
        _data(values).mark_point(filled=True, size=75, opacity=1).encode(x=x, y=y, color=hue, shape=shape),
        _data(values)
        .mark_text(fontSize=12, fontWeight="bold", color=color("ink"))
        .encode(x=alt.X("lx:Q"), y=alt.Y("ly:Q", title="top-1 (%)"), text="letter:N"),
    ]
    return svg(
        layers, width=width, height=height, padding={"left": _LEFT_PX, "right": 10, "top": 24, "bottom": 40},
        alt_text=f"Top-1 over {axis}: " + "; ".join(
            f"{row.name} {top:.2f} % at {cost:.3g}" for row, top, cost in zip(rows, tops, costs, strict=True)
        ),
    )  # fmt: skip


def _frontier(values: Sequence[Record]) -> list[Record]:
    """Those that no other variant beats in accuracy at the same cost or less."""
    best, kept = -1.0, []
    for value in sorted(values, key=lambda v: (v["x"], -v["y"])):
        if value["y"] > best:
            best = value["y"]
            kept.append({"x": value["x"], "y": value["y"]})
    return kept


def _champion_layers(
    old: Sequence[tuple[float, float]], x: alt.X, y: alt.Y, *, with_size: bool
) -> list[alt.Chart]:
    if not old:
        return []
    values = [{"x": size, "y": top1} for size, top1 in old]
    if with_size:
        mark = _data(values).mark_point(
            shape="cross", filled=False, size=110, strokeWidth=2, color=color("champion")
        )
        return [mark.encode(x=x, y=y)]
    return [_data(values).mark_rule(strokeDash=[6, 3], color=color("champion")).encode(y=y)]


def ladder(rungs: pd.DataFrame) -> Markup:
    """Validation accuracy over the share of channels removed, before and after fine-tuning."""
    values = [
        {"x": 100 * float(ratio), "y": 100 * float(top1), "kind": kind}
        for kind, column in (("cut", "val_top1_pruned"), ("tuned", "val_top1"))
        for ratio, top1 in zip(rungs["channels_removed_ratio"], rungs[column], strict=True)
    ]
    low, high = _scale(min(v["y"] for v in values), max(v["y"] for v in values))
    x = alt.X(
        "x:Q", title="channels removed (%)", axis=alt.Axis(tickCount=5),
        scale=alt.Scale(domain=[0, max(v["x"] for v in values) * 1.06 or 1.0], nice=False),
    )  # fmt: skip
    y = alt.Y(
        "y:Q", title="validation top-1 (%)", axis=_upright(tickCount=5),
        scale=alt.Scale(domain=[low, min(high, 101.0)], nice=False, zero=False),
    )  # fmt: skip
    layers = []
    for kind, hue, shape, dash in (("cut", "i8", "triangle-up", [4, 3]), ("tuned", "fp32", "circle", [1, 0])):
        chosen = _data([v for v in values if v["kind"] == kind])
        layers.append(chosen.mark_line(color=color(hue), strokeDash=dash).encode(x=x, y=y))
        layers.append(
            chosen.mark_point(filled=True, opacity=1, size=70, shape=shape, color=color(hue)).encode(x=x, y=y)
        )
    steps = "; ".join(f"{v['x']:.0f} % removed: {v['y']:.2f} %" for v in values if v["kind"] == "tuned")
    return svg(
        layers, width=WIDTH - _LEFT_PX - 10, height=190, padding={"left": _LEFT_PX, "right": 10, "top": 24, "bottom": 40},
        alt_text=f"Validation accuracy after fine-tuning, {steps}",
    )  # fmt: skip


def bars(
    items: Sequence[tuple[str, float, str, str]],
    *,
    alt_text: str,
    zero: float = 0.0,
    dots: Sequence[float] = (),
) -> Markup:
    """Labelled horizontal bars: what ranks is readable without an axis.

    Args:
        items: Label, value, the value in words, and the CSS variable that colours it.
        alt_text: Of the figure.
        zero: Where the bars start; those below it go to the left.
        dots: A second value an item, drawn as a ring.
    """
    labels = [shorten(label, _LABEL_COLUMNS) for label, *_ in items]
    left = int(max(columns(label) for label in labels) * _CHAR_PX) + 10
    said = int(max(columns(words) for _, _, words, _ in items) * _CHAR_PX) + (14 if dots else 10)
    shift = said if min(value for _, value, _, _ in items) < zero else 0
    numbers = [zero, *(value for _, value, _, _ in items), *dots]
    low, high = min(numbers), max(numbers)
    low, high = (low, high) if high > low else (zero, zero + 1)
    width = WIDTH - left - said - shift
    values = [
        {"y": i + 0.5, "top": i + 0.2, "bottom": i + 0.8, "zero": zero, "x": value, "hue": hue, "label": label,
         "words": words, "at": value, "dx": -5 if value < zero else 5, "dot": dots[i] if dots else None}
        for i, (label, (_, value, words, hue)) in enumerate(zip(labels, items, strict=True))
    ]  # fmt: skip
    x_scale = alt.Scale(domain=[low, high], nice=False, zero=False)
    y_scale = alt.Scale(domain=[0, len(items)], reverse=True, nice=False)
    x, y = alt.X("x:Q", axis=None, scale=x_scale), alt.Y("y:Q", axis=None, scale=y_scale)
    hues = sorted({hue for *_, hue in items})
    hue = alt.Color("hue:N", legend=None, scale=alt.Scale(domain=hues, range=[color(h) for h in hues]))
    layers = [
        _data(values)
        .mark_rect()
        .encode(x=x, x2="zero:Q", y=alt.Y("top:Q", axis=None, scale=y_scale), y2="bottom:Q", color=hue),
        _data(values)
        .mark_text(align="right", fontSize=11, color=color("ink"), x=-6 - shift)
        .encode(y=y, text="label:N"),
    ]
    for side, align in ((-1, "right"), (1, "left")):
        chosen = [v for v in values if (v["dx"] < 0) is (side < 0)]
        ends = [v | {"at": max(v["x"], v["dot"] if v["dot"] is not None else v["x"])} for v in chosen]
        if chosen:
            layers.append(
                _data(ends)
                .mark_text(align=align, dx=(9 if dots else 5) * side, fontSize=11, color=color("muted"))
                .encode(x=alt.X("at:Q", axis=None, scale=x_scale), y=y, text="words:N")
            )
    if dots:
        ring = _data(values).mark_point(filled=False, opacity=1, size=45, strokeWidth=1.6, color=color("ink"))
        layers.append(ring.encode(x=alt.X("dot:Q", axis=None, scale=x_scale), y=y))
    return svg(
        layers, width=width, height=_ROW_PX * len(items), alt_text=alt_text,
        padding={"left": left + shift, "right": said, "top": 2, "bottom": 2},
    )  # fmt: skip


def class_deltas(rows: Sequence[ClassRow]) -> Markup:
    """What each class gained or lost, in percentage points."""
    items = [
        (row.label, row.delta_pp, f"{signed(row.delta_pp, 1)}", "bad" if row.delta_pp < 0 else "good")
        for row in rows
    ]
    worst = "; ".join(f"{shorten(row.label, 40)} {signed(row.delta_pp, 1)} pp" for row in rows[:5])
    return bars(items, alt_text=f"Change of accuracy by class in percentage points, worst first: {worst}")


def matrix(pairing: Pairing) -> Markup:
    """True classes down, predicted across; shares of the true class in steps of colour, counts where they fit."""
    counts = confusion(pairing, pairing.after_classes)
    kept = _worst_classes(counts)
    counts, totals = counts[np.ix_(kept, kept)], counts.sum(axis=1)[kept]
    size = len(kept)
    cell, font = (30, 11) if size <= 10 else (18, 10) if size <= 30 else (11, 9)
    limit = 12 if size <= 10 else _LABEL_COLUMNS if size <= 30 else 30
    labels = [shorten(pairing.labels[number], limit) for number in kept]
    room = int(max(columns(label) for label in labels) * _CHAR_PX * font / 11) + 10
    if size <= 10:
        cell = min(30, (WIDTH - room) // size)
    cells = _cells(counts, totals)
    y_scale = alt.Scale(domain=[0, size], reverse=True, nice=False)
    x_scale = alt.Scale(domain=[0, size], nice=False)
    steps = sorted({c["step"] for c in cells})
    hue = alt.Color("step:N", legend=None, scale=alt.Scale(domain=steps, range=[color(s) for s in steps]))
    x, y = alt.X("x:Q", axis=None, scale=x_scale), alt.Y("y:Q", axis=None, scale=y_scale)
    middle_x, middle_y = alt.X("cx:Q", axis=None, scale=x_scale), alt.Y("cy:Q", axis=None, scale=y_scale)
    names = [{"at": i + 0.5, "label": label} for i, label in enumerate(labels)]
    lines = [{"at": i, "end": size, "start": 0} for i in range(size + 1)]
    layers = [
        _data(lines).mark_rule(color=color("line"), strokeWidth=0.6).encode(
            x=alt.X("at:Q", axis=None, scale=x_scale), y=alt.Y("start:Q", axis=None, scale=y_scale), y2="end:Q"),
        _data(lines).mark_rule(color=color("line"), strokeWidth=0.6).encode(
            y=alt.Y("at:Q", axis=None, scale=y_scale), x=alt.X("start:Q", axis=None, scale=x_scale), x2="end:Q"),
        _data(cells).mark_rect().encode(x=x, x2="x2:Q", y=y, y2="y2:Q", color=hue),
        _data(names).mark_text(align="right", fontSize=font, x=-5, color=color("muted")).encode(
            y=alt.Y("at:Q", axis=None, scale=y_scale), text="label:N"),
        _data(names).mark_text(align="left", angle=270, fontSize=font, y=-5, color=color("muted")).encode(
            x=alt.X("at:Q", axis=None, scale=x_scale), text="label:N"),
    ]  # fmt: skip
    if size <= 30:
        for strong, name in ((True, "on-strong"), (False, "ink")):
            chosen = [c for c in cells if c["strong"] is strong]
            if chosen:
                text = _data(chosen).mark_text(fontSize=min(11, cell // 2), color=color(name))
                layers.append(text.encode(x=middle_x, y=middle_y, text="count:N"))
    right, wrong = int(np.trace(counts)), int(counts.sum() - np.trace(counts))
    return svg(
        layers, width=cell * size, height=cell * size,
        padding={"left": room, "right": 4, "top": room, "bottom": 4},
        alt_text=f"Confusion matrix of {size} classes: {right} images on the diagonal, {wrong} beside it",
    )  # fmt: skip


def _worst_classes(counts: npt.NDArray[np.int64]) -> list[int]:
    """All classes, or those with most errors as truth or as prediction, in their own order."""
    size = len(counts)
    if size <= MATRIX_CLASSES:
        return list(range(size))
    errors = counts.sum(axis=0) + counts.sum(axis=1) - 2 * np.diag(counts)
    return sorted(int(i) for i in np.argsort(-errors, kind="stable")[:MATRIX_CLASSES])


def _cells(counts: npt.NDArray[np.int64], totals: npt.NDArray[np.int64]) -> list[Record]:
    """One record a cell that is not empty."""
    cells = []
    for i, j in zip(*np.nonzero(counts), strict=True):
        share = float(counts[i, j] / totals[i])
        edges = (0.5, 0.8, 0.95) if i == j else (0.03, 0.1, 0.25)
        step = 1 + sum(share >= edge for edge in edges)
        cells.append({
            "x": int(j), "x2": int(j) + 1, "y": int(i), "y2": int(i) + 1, "cx": int(j) + 0.5, "cy": int(i) + 0.5,
            "step": f"{'right' if i == j else 'wrong'}-{step}", "strong": step >= 3, "count": int(counts[i, j]),
        })  # fmt: skip
    return cells


def latency_histograms(samples: Mapping[str, npt.NDArray[np.float64]]) -> Markup:
    """One histogram a variant over one logarithmic axis, with marks at P50 and P99.

    Args:
        samples: The letter and name of a variant to its latencies in ms.
    """
    everything = np.concatenate(list(samples.values()))
    low = max(float(everything.min()), 1e-6)
    high = max(float(np.quantile(everything, 0.999)), low * 1.05)
    edges = np.geomspace(low, high, 61)
    width, row_px = WIDTH - 30, 62
    bars_, marks, names = [], [], []
    for index, (name, values_ms) in enumerate(samples.items()):
        counts, _ = np.histogram(np.clip(values_ms, low, high), edges)
        base = (index + 1) * row_px - 8
        tallest = max(int(counts.max()), 1)
        bars_ += [
            {"x": float(edges[i]), "x2": float(edges[i + 1]), "y": base, "y2": base - 34 * int(count) / tallest}
            for i, count in enumerate(counts) if count
        ]  # fmt: skip
        marks += [
            {"x": min(float(np.quantile(values_ms, q)), high), "y": base, "y2": base - 38, "what": what}
            for q, what in ((0.5, "P50"), (0.99, "P99"))
        ]
        names.append({"y": base - 45, "label": shorten(name, 50)})
    y_scale = alt.Scale(domain=[0, row_px * len(samples)], reverse=True, nice=False)
    x_scale = alt.Scale(type="log", domain=[low, high * 1.02], nice=False)
    ticks = [float(f"{v:.2g}") for v in np.geomspace(low, high, 6)[:]]
    x = alt.X(
        "x:Q", title="latency of one inference (ms, logarithmic)", scale=x_scale,
        axis=alt.Axis(values=sorted(set(ticks)), format=".2~g"),
    )  # fmt: skip
    y = alt.Y("y:Q", axis=None, scale=y_scale)
    layers = [
        _data(bars_).mark_rect(color=color("plain")).encode(x=x, x2="x2:Q", y=y, y2="y2:Q"),
        _data(marks).mark_rule(color=color("ink"), strokeWidth=1.4).encode(
            x=x, y=y, y2="y2:Q",
            strokeDash=alt.StrokeDash("what:N", legend=None, scale=alt.Scale(domain=["P50", "P99"], range=[[1, 0], [3, 2]])),
        ),
        _data(names).mark_text(align="left", fontSize=11, color=color("ink"), x=0).encode(y=y, text="label:N"),
    ]  # fmt: skip
    said = "; ".join(
        f"{name} P50 {np.quantile(v, 0.5):.3g} ms, P99 {np.quantile(v, 0.99):.3g} ms"
        for name, v in samples.items()
    )
    return svg(
        layers, width=width, height=row_px * len(samples), alt_text=f"Latency histograms: {said}",
        padding={"left": 12, "right": 18, "top": 2, "bottom": 38},
    )  # fmt: skip
