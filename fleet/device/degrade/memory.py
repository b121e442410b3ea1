"""Memory: above the watermark a smaller model, and near the end nothing that is not critical (M8)."""

import math
from enum import IntEnum

from fleet.device.degrade.ladder import climb
from fleet.device.release import FramePolicy

HYSTERESIS = 0.05
"""Of the share, below a mark, at which its level ends."""


class Pressure(IntEnum):
    """How much of the memory that this process could have is taken."""

    FREE = 0
    TIGHT = 1
    """Above the watermark: lower resolution or tier."""
    SHORT = 2
    """Half way from the watermark to all: only critical inferences."""


class MemoryGovernor:
    """A state machine over shares of memory."""

    def __init__(self, policy: FramePolicy) -> None:
        """`policy` has been checked (`governor.check`)."""
        self.policy = policy
        self.level = Pressure.FREE

    def step(self, memory_mb: float | None, available_mb: float | None) -> Pressure:
        """The level after a reading; without one the level stays.

        Args:
            memory_mb: What this process holds, MiB.
            available_mb: What it can still take, MiB.
        """
        share = used_share(memory_mb, available_mb)
        if share is not None:
            mark = self.policy.memory_watermark
            up = (mark, (1 + mark) / 2)
            self.level = Pressure(climb(self.level, share, up, [threshold - HYSTERESIS for threshold in up]))
        return self.level


def used_share(memory_mb: float | None, available_mb: float | None) -> float | None:
    """What is held, of what could be held: 0 to 1."""
    if memory_mb is None or available_mb is None:
        return None
    whole = memory_mb + available_mb
    if not (math.isfinite(whole) and memory_mb >= 0 and available_mb >= 0 and whole > 0):
        return None
    return memory_mb / whole
