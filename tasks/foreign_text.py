"""Text of other people's making (a class's name, a reason, a tag): what of it the eye does not see."""

import unicodedata

_BLANK = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")
"""Fillers that are letters, marks or symbols to Unicode and nothing to the eye."""


def is_hidden(letter: str) -> bool:
    """Controls, formats, surrogates, what has no character, variation selectors, fillers."""
    return (
        unicodedata.category(letter)[0] == "C"
        or letter in _BLANK
        or unicodedata.name(letter, "").startswith("VARIATION SELECTOR")
    )


def is_visible(text: str) -> bool:
    """Whether there is anything to read."""
    return any(not is_hidden(letter) and not letter.isspace() for letter in text)
