"""Battery: the full model only when well charged, and fewer frames when not (M8 of the requirements)."""

import math

from fleet.device.release import FramePolicy

RECOVERED_POINTS = 5.0
"""So many percentage points above `low_battery_percent` a battery is well charged again."""
PLUGGED_S = 10.0
"""So long power from outside must last before it ends a low level: a loose plug is no power."""


class BatteryGovernor:
    """Whether the battery is low; nothing is low where no battery is exposed."""

    def __init__(self, policy: FramePolicy) -> None:
        """`policy` has been checked (`governor.check`)."""
        self.policy = policy
        self.low = False
        self._plugged_since_s: float | None = None

    def step(self, percent: float | None, charging: bool | None, now_s: float) -> bool:
        """Whether the battery is low after a reading; None where the system does not expose it."""
        if not charging:
            self._plugged_since_s = None
        elif self._plugged_since_s is None:
            self._plugged_since_s = now_s
        plugged = self._plugged_since_s is not None and now_s - self._plugged_since_s >= PLUGGED_S
        if percent is None or not math.isfinite(percent):
            self.low = self.low and not plugged and charging is not None  # the battery may be gone
        elif plugged or percent >= self.policy.low_battery_percent + RECOVERED_POINTS:
            self.low = False
        elif percent < self.policy.low_battery_percent and not charging:
            self.low = True
        return self.low
