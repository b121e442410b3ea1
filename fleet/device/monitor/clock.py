"""The two clocks of a device: the one people set, and the one that only goes forward."""

import functools
import time
from dataclasses import dataclass

from fleet.device.wall import now_ms

forward_ns = functools.partial(time.clock_gettime_ns, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
"""Nanoseconds of a clock that nobody sets; it goes on while the device sleeps, where the system has one.

With Linux's CLOCK_BOOTTIME a device that slept shows a pause, and no jump of the wall clock.
"""


@dataclass(frozen=True, slots=True)
class Now:
    """Both clocks at one moment."""

    wall_ms: int
    forward_ns: int

    @property
    def offset_ms(self) -> float:
        """What to add to the forward clock, in ms, to get the wall clock."""
        return self.wall_ms - self.forward_ns / 1e6


class Clock:
    """The clocks of this system; a test puts another in its place."""

    def now(self) -> Now:
        """Both, read one after the other."""
        return Now(now_ms(), forward_ns())
