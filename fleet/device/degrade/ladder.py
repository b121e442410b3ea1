"""Levels with hysteresis: up at one value, down only below another."""

from collections.abc import Sequence


def climb(level: int, value: float, up: Sequence[float], down: Sequence[float]) -> int:
    """The level after a value.

    Args:
        level: The one before: 0 to len(up).
        value: Finite; more is worse.
        up: Level i + 1 begins at up[i]; grows.
        down: Level i + 1 ends below down[i], which is at most up[i]; grows.

    Returns:
        Monotone in both `level` and `value`, and the same when asked again.
    """
    highest_forced = sum(value >= threshold for threshold in up)
    highest_kept = sum(value >= threshold for threshold in down)
    return max(highest_forced, min(level, highest_kept))
