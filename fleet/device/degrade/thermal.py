"""Heat: lower the frame rate, then take the light model, then pause (M8 of the requirements)."""

import math
import statistics
from collections import deque
from enum import IntEnum

from fleet.device.degrade.ladder import climb
from fleet.device.release import FramePolicy

MEDIAN_OF = 3
"""Readings that are looked at together: one wrong reading moves nothing."""
MISSING_HOLD_S = 60.0
"""So long a level stays when the sensor stops answering; then one level goes, each time it has passed."""


class Heat(IntEnum):
    """How hot."""

    COOL = 0
    WARM = 1
    HOT = 2
    PAUSE = 3


class ThermalGovernor:
    """A state machine over temperatures; it reads no clock and no sensor.

    Up at `warm_c`, `hot_c`, `pause_c`; down only `hysteresis_c` below. So between two opposite changes the
    (median) temperature moved by at least `hysteresis_c`. Hotter never gives a lower level.
    """

    def __init__(self, policy: FramePolicy) -> None:
        """`policy` has been checked (`governor.check`)."""
        self.policy = policy
        self.level = Heat.COOL
        self._recent: deque[float] = deque(maxlen=MEDIAN_OF)
        self._missing_since_s: float | None = None

    def step(self, temperature_c: float | None, now_s: float) -> Heat:
        """The level after a reading; None where no sensor answers, `now_s` on the monotonic clock."""
        if temperature_c is None or not math.isfinite(temperature_c):
            return self._without_sensor(now_s)
        self._missing_since_s = None
        self._recent.append(temperature_c)
        policy = self.policy
        up = (policy.warm_c, policy.hot_c, policy.pause_c)
        down = [threshold - policy.hysteresis_c for threshold in up]
        # The lower of the two middle ones, if there are two: a value that was read, not one in between.
        self.level = Heat(climb(self.level, statistics.median_low(self._recent), up, down))
        return self.level

    def _without_sensor(self, now_s: float) -> Heat:
        """No action, and no way back either until it has been long: a hot device stays slow for a while."""
        self._recent.clear()
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        elif self.level and now_s - self._missing_since_s >= MISSING_HOLD_S:
            self.level = Heat(self.level - 1)
            self._missing_since_s = now_s
        return self.level
