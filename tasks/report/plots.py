"""The figures with axes: what accuracy costs, what pruning cost, how latency is distributed."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
import numpy.typing as npt
import pandas as pd
from markupsafe import Markup

from tasks.champion import Champion
from tasks.report.rows import Row
from tasks.report.text import shorten
from tasks.report.theme import WIDTH, Record, chart, color, place_letters, svg

_SHAPES = {"fp32": "circle", "fp16": "square", "w8": "triangle-up", "i8": "diamond"}
_LEFT_PX, _RIGHT_PX = 42, 10
_PADDING = {"left": _LEFT_PX, "right": _RIGHT_PX, "top": 24, "bottom": 40}
_PLOT_PX = WIDTH - _LEFT_PX - _RIGHT_PX
_FRONT_PX = 214
_BINS = 60
_ROW_PX = 62


def _air(low: float, high: float) -> tuple[float, float]:
    """A domain of shares in % with some room; never empty, never far above 100 %."""
    room = 0.06 * (high - low) or 1.0
    return low - room, min(high + room, 101.0)


def _upright(title: str, domain: tuple[float, float]) -> alt.Y:
    """A vertical axis whose title stands above it, where no label can be in its way."""
    axis = alt.Axis(
        tickCount=5, titleAngle=0, titleAlign="left", titleBaseline="bottom", titleX=-_LEFT_PX + 2, titleY=-9
    )
    scale = alt.Scale(domain=list(domain), nice=False, zero=False)
    return alt.Y("y:Q", title=title, scale=scale, axis=axis)


def front(
    rows: Sequence[Row], costs: Sequence[float], *, axis: str, champion: Champion | None, of_size: bool
) -> Markup:
    """Top-1 over one cost, a letter and a shape a variant; the line joins what nothing beats on both.

    Args:
        rows: Variants with a measured accuracy.
        costs: One a variant.
        axis: Name and unit of the cost.
        champion: Drawn too: as points over size, else as lines: its latency is of another day.
        of_size: Whether the cost is the size of the model file in MB.
    """
    old = _champion_points(champion)
    values = [_point(row, cost) for row, cost in zip(rows, costs, strict=True)]
    x_high = 1.12 * max([*costs, *(size for size, _ in old if of_size)]) or 1.0
    lowest, highest = min(v["low"] for v in values), max(v["high"] for v in values)
    y_domain = _air(min([lowest, *(y for _, y in old)]), max([highest, *(y for _, y in old)]))
    _place(values, x_high, y_domain)
    x_axis = alt.Axis(tickCount=5)
    x = alt.X("x:Q", title=axis, scale=alt.Scale(domain=[0, x_high], nice=False), axis=x_axis)
    y = _upright("top-1 (%)", y_domain)
    layers = [*_behind(values, x, y), *_champion_layers(old, x, y, of_size=of_size), *_points(values, x, y)]
    said = "; ".join(
        f"{row.name} {v['y']:.2f} % at {v['x']:.3g}" for row, v in zip(rows, values, strict=True)
    )
    return svg(
        layers, width=_PLOT_PX, height=_FRONT_PX, padding=_PADDING, alt_text=f"Top-1 over {axis}: {said}"
    )


def _point(row: Row, cost: float) -> Record:
    assert row.top1 is not None
    top1 = row.top1
    shares = {"y": 100 * top1.value, "low": 100 * top1.low, "high": 100 * top1.high}
    return {"x": cost, "letter": row.key, "precision": row.variant.precision, **shares}


def _place(values: Sequence[Record], x_high: float, y_domain: tuple[float, float]) -> None:
    """Add where each letter goes."""
    y_low, y_high = y_domain
    points = [(_PLOT_PX * v["x"] / x_high, _FRONT_PX * (y_high - v["y"]) / (y_high - y_low)) for v in values]
    for value, (px, py) in zip(values, place_letters(points, width=_PLOT_PX, height=_FRONT_PX), strict=True):
        value["letter_x"] = px / _PLOT_PX * x_high
        value["letter_y"] = y_high - py / _FRONT_PX * (y_high - y_low)


def _precision(channel: type[Any], values: Sequence[str]) -> Any:
    return channel("precision:N", legend=None, scale=alt.Scale(domain=list(_SHAPES), range=list(values)))


def _behind(values: Sequence[Record], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """The intervals, and the step line of the variants that none beats at the same cost or less."""
    best, steps = -1.0, []
    for value in sorted(values, key=lambda v: (v["x"], -v["y"])):
        if value["y"] > best:
            best = value["y"]
            steps.append({"x": value["x"], "y": value["y"]})
    hue = _precision(alt.Color, [color(precision) for precision in _SHAPES])
    line = chart(steps).mark_line(color=color("muted"), strokeDash=[3, 3], interpolate="step-after")
    bounds = chart(values).mark_rule(opacity=0.45)
    return [
        line.encode(x=x, y=y),
        bounds.encode(x=x, y=alt.Y("low:Q", title="top-1 (%)"), y2="high:Q", color=hue),
    ]


def _points(values: Sequence[Record], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    hue = _precision(alt.Color, [color(precision) for precision in _SHAPES])
    shape = _precision(alt.Shape, list(_SHAPES.values()))
    points = chart(values).mark_point(filled=True, size=75, opacity=1)
    letters = chart(values).mark_text(fontSize=12, fontWeight="bold", color=color("ink"))
    return [
        points.encode(x=x, y=y, color=hue, shape=shape),
        letters.encode(x="letter_x:Q", y=alt.Y("letter_y:Q", title="top-1 (%)"), text="letter:N"),
    ]


def _champion_points(champion: Champion | None) -> list[tuple[float, float]]:
    """Size in MB and top-1 in % of the champion's variants."""
    if champion is None:
        return []
    known = [(v.size_bytes / 1e6, v.top1) for v in champion.variants.values()]
    return [(size_mb, 100 * top1) for size_mb, top1 in known if top1 is not None]


def _champion_layers(
    old: Sequence[tuple[float, float]], x: alt.X, y: alt.Y, *, of_size: bool
) -> list[alt.Chart]:
    if not old:
        return []
    data = chart([{"x": size, "y": top1} for size, top1 in old])
    if not of_size:
        return [data.mark_rule(strokeDash=[6, 3], color=color("champion")).encode(y=y)]
    mark = data.mark_point(
        shape="cross", filled=False, size=110, opacity=1, strokeWidth=2, color=color("champion")
    )
    return [mark.encode(x=x, y=y)]


def ladder(rungs: pd.DataFrame) -> Markup:
    """Validation accuracy over the share of channels removed, before and after fine-tuning."""
    removed = [100 * float(ratio) for ratio in rungs["channels_removed_ratio"]]
    cut, tuned = ([100 * float(top1) for top1 in rungs[c]] for c in ("val_top1_pruned", "val_top1"))
    x_scale = alt.Scale(domain=[0, 1.06 * max(removed) or 1.0], nice=False)
    x = alt.X("x:Q", title="channels removed (%)", axis=alt.Axis(tickCount=5), scale=x_scale)
    y = _upright("validation top-1 (%)", _air(min([*cut, *tuned]), max([*cut, *tuned])))
    layers = []
    for top1, hue, shape, dash in ((cut, "i8", "triangle-up", [4, 3]), (tuned, "fp32", "circle", [1, 0])):
        data = chart([{"x": share, "y": value} for share, value in zip(removed, top1, strict=True)])
        layers.append(data.mark_line(color=color(hue), strokeDash=dash).encode(x=x, y=y))
        points = data.mark_point(filled=True, opacity=1, size=70, shape=shape, color=color(hue))
        layers.append(points.encode(x=x, y=y))
    steps = "; ".join(f"{r:.0f} % removed: {t:.2f} %" for r, t in zip(removed, tuned, strict=True))
    alt_text = f"Validation accuracy after fine-tuning: {steps}"
    return svg(layers, width=_PLOT_PX, height=190, padding=_PADDING, alt_text=alt_text)


def latency_histograms(samples: Mapping[str, npt.NDArray[np.float64]]) -> Markup:
    """One histogram a variant over one logarithmic axis, with strokes at P50 and P99.

    Args:
        samples: The letter and name of a variant to its latencies in ms, all above zero.
    """
    everything = np.concatenate(list(samples.values()))
    low = float(everything.min())
    high = max(float(np.quantile(everything, 0.999)), low * 1.05)
    ticks = sorted({float(f"{tick:.2g}") for tick in np.geomspace(low, high, 6)})
    x = alt.X(
        "x:Q",
        title="latency of one inference (ms, logarithmic)",
        scale=alt.Scale(type="log", domain=[low, high * 1.02], nice=False),
        axis=alt.Axis(values=ticks, format=".2~g"),
    )
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[0, _ROW_PX * len(samples)], reverse=True, nice=False))
    said = "; ".join(
        f"{name} P50 {np.quantile(ms, 0.5):.3g} ms, P99 {np.quantile(ms, 0.99):.3g} ms"
        for name, ms in samples.items()
    )
    return svg(
        _histograms(samples, low, high, x, y),
        width=WIDTH - 30,
        height=_ROW_PX * len(samples),
        padding={"left": 12, "right": 18, "top": 2, "bottom": 40},
        alt_text=f"Latency histograms: {said}",
    )


def _histograms(
    samples: Mapping[str, npt.NDArray[np.float64]], low: float, high: float, x: alt.X, y: alt.Y
) -> list[alt.Chart]:
    edges = np.geomspace(low, high, _BINS + 1)
    columns: list[Record] = []
    strokes: list[Record] = []
    names: list[Record] = []
    for index, (name, values_ms) in enumerate(samples.items()):
        base = (index + 1) * _ROW_PX - 8
        counts, _ = np.histogram(np.clip(values_ms, low, high), edges)
        columns += [
            {
                "x": float(edges[i]),
                "x2": float(edges[i + 1]),
                "y": base,
                "y2": base - 34 * float(count / counts.max()),
            }
            for i, count in enumerate(counts)
            if count
        ]
        strokes += [
            {"x": min(float(np.quantile(values_ms, q)), high), "y": base, "y2": base - 38, "what": what}
            for q, what in ((0.5, "P50"), (0.99, "P99"))
        ]
        names.append({"y": base - 45, "label": shorten(name, 50)})
    dash = alt.StrokeDash(
        "what:N", legend=None, scale=alt.Scale(domain=["P50", "P99"], range=[[1, 0], [3, 2]])
    )
    rule = chart(strokes).mark_rule(color=color("ink"), strokeWidth=1.4)
    label = chart(names).mark_text(align="left", fontSize=11, color=color("ink"), x=0)
    return [
        chart(columns).mark_rect(color=color("plain")).encode(x=x, x2="x2:Q", y=y, y2="y2:Q"),
        rule.encode(x=x, y=y, y2="y2:Q", strokeDash=dash),
        label.encode(y=y, text="label:N"),
    ]
