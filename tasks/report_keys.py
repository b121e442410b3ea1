"""How the stages' flat reports are read: keys `VARIANT/key` beside keys about the whole stage."""

from collections.abc import Iterable


def names_in(report: Iterable[str]) -> list[str]:
    """The variants that a report's keys speak of, sorted."""
    return sorted({key.split("/")[0] for key in report if "/" in key})
