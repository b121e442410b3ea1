"""The line chart of the fleet page."""

import re

import pytest

from fleet.gateway.chart import HOUR_MS, Line, chart

FIRST_MS = 1_796_000_400_000 // HOUR_MS * HOUR_MS


def _chart(points, **named):
    line = Line(name="P50", css_class="p50", points=points)
    last = max(at for at, _ in points)
    return chart([line], unit="ms", first_ms=FIRST_MS, last_ms=last, title="Latency", **named)


def test_hours_without_windows_leave_a_gap():
    """Points of hours that follow each other are joined, others are not."""
    hours = [0, 1, 2, 5, 6]
    drawn = _chart([(FIRST_MS + hour * HOUR_MS, 10.0) for hour in hours])
    assert [path.count("L") for path in re.findall(r'class="line p50" d="([^"]+)"', drawn)] == [2, 1]
    assert drawn.count("<circle") == 5


@pytest.mark.parametrize(
    ("highest", "top"), [(0.0, "1"), (0.03, "0.04"), (7.9, "8"), (8.1, "10"), (101, "200")]
)
def test_the_axis_begins_at_zero_and_holds_everything(highest, top):
    """The scale is a round number, none of the points is above it."""
    drawn = _chart([(FIRST_MS, 0.0), (FIRST_MS + HOUR_MS, highest)])
    labels = re.findall(r'text-anchor="end">([^<]+)<', drawn)
    assert (labels[0], labels[-1]) == ("0", top)
    heights = [float(y) for y in re.findall(r'cy="([^"]+)"', drawn)]
    assert all(10 <= y <= 168 for y in heights)


def test_one_point_is_drawn():
    """A fleet's first hour is a dot."""
    assert _chart([(FIRST_MS, 12.0)]).count("<circle") == 1
