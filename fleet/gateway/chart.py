"""A line chart over hours as inline SVG; its colours are CSS variables of the page."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 440, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 20, 10, 22
_DOTS = 48
"""Points of a line that are drawn as dots; of more, each is only where the pointer finds its value."""
HOUR_MS = 3_600_000


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line: milliseconds since 1970 and value; hours without a value leave a gap."""

    name: str
    css_class: str
    points: Sequence[tuple[int, float]]


def chart(lines: Sequence[Line], *, unit: str, first_ms: int, last_ms: int, title: str) -> str:
    """SVG of lines that share an axis from 0.

    Args:
        lines: At least one point in all.
        unit: Of the values.
        first_ms: Left end.
        last_ms: Right end, after the left one.
        title: For those who do not see it.
    """
    top = _round_up(max(value for line in lines for _, value in line.points))
    span = max(last_ms - first_ms, HOUR_MS)

    def x(at_ms: int) -> float:
        return _LEFT + (at_ms - first_ms) / span * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (1 - value / top) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">']
    for k in range(5):
        value = top * k / 4
        parts.append(
            f'<path class="grid" d="M{_LEFT} {y(value):.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    parts += [
        f'<text x="{x(at_ms):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{_label(at_ms, span)}</text>'
        for at_ms in _ticks(first_ms, first_ms + span)
    ]
    for line in lines:
        parts += [
            f'<path class="line {line.css_class}" d="{_path(run, x, y)}"/>' for run in _runs(line.points)
        ]
        parts += [
            f'<circle class="{_dot(line)}" cx="{x(at):.1f}" cy="{y(value):.1f}" r="3">'
            f"<title>{line.name} {value:.3g} {unit}, {clock(at)}</title></circle>"
            for at, value in line.points
        ]
    return "".join([*parts, "</svg>"])


def _dot(line: Line) -> str:
    return line.css_class if len(line.points) <= _DOTS else f"{line.css_class} unseen"


def _runs(points: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Points of hours that follow each other."""
    runs: list[list[tuple[int, float]]] = []
    for point in points:
        if runs and point[0] - runs[-1][-1][0] <= HOUR_MS:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _path(run: list[tuple[int, float]], x: Callable[[int], float], y: Callable[[float], float]) -> str:
    return "M" + "L".join(f"{x(at):.1f} {y(value):.1f}" for at, value in run)


def _round_up(value: float) -> float:
    """The next of 1, 2, 4, 5, 8 times a power of ten; 1 for 0."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10, 20) if step * power >= value)


def _ticks(first_ms: int, last_ms: int) -> list[int]:
    """At most seven whole hours or days."""
    for hours in (1, 2, 3, 6, 12, 24, 48, 96, 168, 336):
        step = hours * HOUR_MS
        ticks = list(range(-(-first_ms // step) * step, last_ms + 1, step))
        if len(ticks) <= 7:
            return ticks
    return [first_ms, last_ms]


def _label(at_ms: int, span_ms: int) -> str:
    return time.strftime("%d %b" if span_ms > 48 * HOUR_MS else "%H:%M", time.gmtime(at_ms / 1000))


def clock(at_ms: int) -> str:
    """A time in UTC, to the minute."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_ms / 1000))
