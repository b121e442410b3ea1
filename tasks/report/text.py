"""Text of foreign origin made showable: class names, layer names and check names may hold anything."""

import unicodedata

from tasks.foreign_text import is_hidden

_JOINERS = "\u200c\u200d"  # Persian words and emoji families need them
_KEPT = _JOINERS + "\ufe0e\ufe0f"  # an emoji as text or picture
_REPLACEMENT = "\ufffd"
_ELLIPSIS = "…"


def printable(text: object) -> str:
    """`text` with U+FFFD for what cannot be seen: controls, direction overrides, fillers, lone surrogates."""
    return "".join(_REPLACEMENT if is_hidden(c) and c not in _KEPT else c for c in str(text))


def columns(text: str) -> int:
    """Width in columns of a terminal: wide characters count two, combining marks none."""
    return sum(
        0
        if unicodedata.combining(c) or c in _JOINERS
        else 2
        if unicodedata.east_asian_width(c) in "WF"
        else 1
        for c in text
    )


def shorten(text: object, limit: int) -> str:
    """Printable text of at most `limit` columns, its middle cut out: names differ at their ends.

    Charts get shortened text only: Vega cuts a label between the two halves of an emoji and fails.
    """
    shown = printable(text).strip()
    if not shown:
        return "(empty)"
    if columns(shown) <= limit and len(shown) <= 2 * limit:
        return shown
    head, tail = _fitting(shown, (limit + 1) // 2 - 1), _fitting(shown[::-1], limit // 2)[::-1]
    return f"{head}{_ELLIPSIS}{tail}"


def _fitting(text: str, limit: int) -> str:
    """The longest start of `text` within `limit` columns and as many characters."""
    end, width = 0, 0
    while end < min(len(text), limit) and width + columns(text[end]) <= limit:
        width += columns(text[end])
        end += 1
    return text[:end]


def signed(value: float, digits: int = 2) -> str:
    """A difference: always with its sign, zero without, a true minus."""
    rounded = round(value, digits)
    if rounded == 0:
        return f"{0:.{digits}f}"
    return f"{'+' if rounded > 0 else '−'}{abs(rounded):.{digits}f}"  # noqa: RUF001  # the minus sign is meant


def figures(value: float | str | None) -> str:
    """A measured value with four significant digits; a dash where there is none."""
    if value is None:
        return "–"  # noqa: RUF001  # an en dash in an empty cell
    if isinstance(value, str):
        return printable(value)
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}".replace(",", "\u202f")
