"""What others wrote, on a terminal: on its lines, without what steers it or what nobody sees."""

import pytest

from tasks.terminal import plain, plain_lines


@pytest.mark.parametrize("letter", ["\x1b", "\u202e", "\u3164", "\u2800", "\ufe0f", "\ud800", "\n", "\u200b"])
def test_what_steers_or_hides_becomes_a_space(letter):
    """An escape, an override, a filler that is a letter to Unicode."""
    assert plain(f"a{letter}b") == "a b"


def test_lines_stay_lines():
    """Only the ends of lines are kept of what is not printable."""
    assert plain_lines("größe\tx\n\x07y") == "größe x\n y"
