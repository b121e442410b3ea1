"""Foreign text in a chart or a cell: short, printable, and still telling names apart."""

import itertools

import pytest

from tasks.report.text import columns, figures, printable, shorten, signed
from tasks.report.theme import place_letters


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        ("short", 10, "short"),
        ("features.10.block.3.0", 11, "featu…k.3.0"),
        ("  ", 5, "(empty)"),
        ("日本語のとても長い名前", 9, "日本…名前"),
        ("a\x00b\u202ec", 9, "a\ufffdb\ufffdc"),
        ("\ud800", 5, "\ufffd"),
        ("\u3164", 5, "\ufffd"),
        ("a\u2800b", 5, "a\ufffdb"),
        ("e" + "\u0301" * 500, 5, "e\u0301…\u0301\u0301"),
    ],
)
def test_names_are_cut_in_the_middle(text, limit, shown):
    """The ends, where names differ, stay; control characters and lone surrogates are replaced."""
    assert shorten(text, limit) == shown
    assert columns(shorten(text, limit)) <= max(limit, 7)


def test_joiners_of_words_and_emoji_stay():
    """Persian words and emoji families are not torn apart."""
    for text in ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645", "\U0001f468\u200d\U0001f467"):
        assert printable(text) == text


@pytest.mark.parametrize(
    ("value", "shown"), [(0.004, "0.00"), (-0.004, "0.00"), (1.5, "+1.50"), (-2, "\u22122.00")]
)
def test_differences_have_a_sign(value, shown):
    """What rounds to zero has none: no minus zero."""
    assert signed(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "\u2013"), (0.98607, "0.9861"), (12345, "12\u202f345"), ("a\x07", "a\ufffd")]
)
def test_measured_values_have_four_digits(value, shown):
    """As in the gate's table; counts in full."""
    assert figures(value) == shown


def test_letters_cover_neither_points_nor_each_other():
    """Twelve variants that are almost one point still have readable letters."""
    points = [(100 + 3 * i % 7, 100 + 2 * i % 5) for i in range(12)]
    placed = place_letters(points, width=300, height=214)
    for (ax, ay), (bx, by) in itertools.combinations(placed, 2):
        assert abs(ax - bx) > 10 or abs(ay - by) > 11
    for letter, point in itertools.product(placed, points):
        assert abs(letter[0] - point[0]) > 8 or abs(letter[1] - point[1]) > 8
