"""Texts of other people's making (classes, waivers, reasons) on a page that decides about a release."""

from tasks.foreign_text import is_hidden

_ESCAPED = str.maketrans({"\\": "\\\\", "|": "\\|", "[": "\\[", "]": "\\]", "&": "&amp;", "<": "&lt;"})


def in_cell(text: str) -> str:
    """As one cell of a Markdown table: no line end, cell end, HTML, link text or picture, and nothing hidden.

    An address as such stays: it says itself where it leads. What changes the order of letters or cannot be
    seen stands there as `{U+202E}`.
    """
    return _revealed(" ".join(text.split())).translate(_ESCAPED)


def _revealed(text: str) -> str:
    return "".join(f"{{U+{ord(c):04X}}}" if is_hidden(c) else c for c in text)
