"""Texts of other people's making (classes, waivers, reasons) on a page that decides about a release."""

import unicodedata

_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Fillers that are letters, marks or symbols to Unicode and nothing to the eye."""
_ESCAPED = str.maketrans({"\\": "\\\\", "|": "\\|", "[": "\\[", "]": "\\]", "&": "&amp;", "<": "&lt;"})


def in_cell(text: str) -> str:
    """As one cell of a Markdown table: no line end, cell end, HTML, link text or picture, and nothing hidden.

    An address as such stays: it says itself where it leads. What changes the order of letters or cannot be
    seen stands there as `{U+202E}`.
    """
    return _revealed(" ".join(text.split())).translate(_ESCAPED)


def is_visible(text: str) -> bool:
    """Whether there is anything to read."""
    return any(not _is_hidden(c) and not c.isspace() for c in text)


def _revealed(text: str) -> str:
    return "".join(f"{{U+{ord(c):04X}}}" if _is_hidden(c) else c for c in text)


def _is_hidden(c: str) -> bool:
    """Controls, formats, surrogates, what has no character, variation selectors, fillers."""
    category = unicodedata.category(c)
    return category[0] == "C" or c in _BLANK or unicodedata.name(c, "").startswith("VARIATION SELECTOR")
