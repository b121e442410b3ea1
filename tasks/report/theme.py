"""Charts that follow the page: drawn once, coloured by the page's CSS variables, without a script.

Altair draws with placeholder colours; `themed` reads the SVG that comes of it, keeps what a picture needs and
puts a variable for each placeholder, so light, dark and print are one picture.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree as ET  # reads what vl-convert wrote, no foreign file

import altair as alt
import vl_convert
from markupsafe import Markup

WIDTH = 360
"""Of a figure in px: as wide as it stands on a phone; on a desk it is somewhat larger."""
CHAR_PX = 7.0
"""Of an 11 px character, on the generous side: a reader's font is not known."""

Record = dict[str, Any]

_VARIABLES = (
    "ink", "muted", "line", "surface",
    "fp32", "fp16", "w8", "i8", "champion", "good", "bad", "fail", "plain",
    "right-1", "right-2", "right-3", "right-4", "wrong-1", "wrong-2", "wrong-3", "wrong-4", "on-strong",
)  # fmt: skip
_PLACEHOLDERS = {name: f"#0000{index + 16:02x}" for index, name in enumerate(_VARIABLES)}
_NAMES = {placeholder: name for name, placeholder in _PLACEHOLDERS.items()}
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"
_SVG = "{http://www.w3.org/2000/svg}"
_ELEMENTS = {"svg", "g", "path", "line", "rect", "text", "tspan", "circle"}
_DROPPED = {
    "class",
    "role",
    "pointer-events",
    "font-family",
    "version",
    "width",
    "height",
    "stroke-miterlimit",
}
_NOTHING = re.compile(r"|M0,0h0v0h0Z")


def color(name: str) -> str:
    """The placeholder of a CSS variable of the page."""
    return _PLACEHOLDERS[name]


def chart(values: Sequence[Record]) -> alt.Chart:
    """A chart of records, which lie in it."""
    return alt.Chart(alt.InlineData(values=list(values)))


def svg(
    layers: Sequence[alt.Chart], *, width: int, height: int, padding: Mapping[str, int], alt_text: str
) -> Markup:
    """Draw layers over each other.

    Args:
        layers: Marks with data of their own.
        width: Of the plot without axes, in CSS pixels.
        height: The same.
        padding: Room for axes and labels at `left`, `right`, `top` and `bottom`.
        alt_text: What a reader who does not see the picture should know.
    """
    drawing = (
        alt.layer(*layers)
        .properties(width=width, height=height, padding=dict(padding), autosize={"type": "none"})
        .configure(
            background="transparent",
            aria=False,
            font="Liberation Sans, Arial, sans-serif",
            axis=alt.AxisConfig(
                aria=False, labelColor=color("muted"), titleColor=color("muted"), gridColor=color("line"),
                domainColor=color("line"), tickColor=color("line"), labelFontSize=11, titleFontSize=11,
                titleFontWeight="normal", labelLimit=0, titleLimit=0, tickSize=4, domain=False,
                labelFlush=False,
            ),
            view=alt.ViewConfig(stroke="transparent"),
        )
    )  # fmt: skip
    return themed(vl_convert.vegalite_to_svg(drawing.to_json(indent=None)), alt_text)


def themed(drawn: str, alt_text: str) -> Markup:
    """The SVG with variables for colours, without classes and empty groups; safe to put into the page."""
    root = ET.fromstring(drawn)  # noqa: S314  # our own drawing
    box = root.get("viewBox", "")
    _clean(root)
    root.attrib.clear()
    root.attrib |= {"viewBox": box, "role": "img", "aria-label": alt_text, "font-family": _FONT}
    root.set("width", box.split()[2])
    root.set("height", box.split()[3])
    ET.register_namespace("", "http://www.w3.org/2000/svg")
    return Markup(ET.tostring(root, encoding="unicode"))  # noqa: S704  # ElementTree escaped every text


def _clean(element: ET.Element) -> None:
    """Drop what draws nothing, refuse what is no drawing, and colour what is left."""
    for child in list(element):
        name = child.tag.removeprefix(_SVG)
        assert name in _ELEMENTS, f"a chart holds <{name}>"
        _clean(child)
        empty = name == "path" and _NOTHING.fullmatch(child.get("d", ""))
        background = (
            name == "path" and child.get("class") in ("background", "foreground") and not child.get("fill")
        )
        if empty or background or child.get("display") == "none" or (name == "g" and len(child) == 0):
            element.remove(child)
    for key in list(element.attrib):
        if key in _DROPPED or key.startswith("aria") or (key == "opacity" and element.get(key) == "1"):
            del element.attrib[key]
    for key in ("fill", "stroke"):
        value = element.get(key)
        if value in _NAMES:
            element.set(key, f"var(--{_NAMES[value]})")
        else:
            assert value in (None, "none", "transparent"), f"a chart is coloured {value}"


def place_letters(
    points: Sequence[tuple[float, float]], *, width: float, height: float
) -> list[tuple[float, float]]:
    """Where the letters beside points go so that none covers a point or another letter, in pixels.

    Each takes the first free place around its point, nearest first; the nearest to free when none is.
    """
    placed: list[tuple[float, float]] = []
    around = [
        (distance * x, distance * y)
        for distance in (12, 20, 30, 42)
        for x, y in ((1, -0.6), (-1, -0.6), (1, 0.6), (-1, 0.6), (0, -1), (0, 1), (1, 0), (-1, 0))
    ]
    for x, y in points:
        candidates = [
            (x + dx, y + dy) for dx, dy in around if 6 <= x + dx <= width - 6 and 6 <= y + dy <= height - 6
        ]
        taken = list(itertools.chain(points, placed))
        free = (c for c in candidates if all(abs(c[0] - p[0]) > 11 or abs(c[1] - p[1]) > 12 for p in taken))
        best = next(free, None)
        placed.append(best or max(candidates, key=lambda c: min(_distance(c, p) for p in taken)))
    return placed


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    return float((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2)
