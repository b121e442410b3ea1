"""The sensors of a simulated phone.

Temperature is the recorded phone's, from a moment of the trace that differs from device to device and shifted
by a few degrees: the shift is an assumption. The battery is none of the recording, where it stood at 100 %:
it drains and charges by a straight line between two levels, an assumption too.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fleet.device.degrade.sensors_trace import TracePoint
from fleet.device.sensors import Reading
from fleet.device.wire import Network

SHIFT_C = 2.0
"""Standard deviation of the shift between devices."""
_FULL, _EMPTY = 100.0, 5.0


@dataclass(frozen=True, kw_only=True)
class Battery:
    """A cycle of draining and charging."""

    drain_per_h: float
    """Percentage points."""
    charge_per_h: float
    start_h: float
    """Where in the cycle it begins."""

    def at(self, hours: float) -> tuple[float, bool]:
        """Percent, and whether it charges."""
        draining_h = (_FULL - _EMPTY) / self.drain_per_h
        charging_h = (_FULL - _EMPTY) / self.charge_per_h
        phase_h = (self.start_h + hours) % (draining_h + charging_h)
        if phase_h < draining_h:
            return _FULL - phase_h * self.drain_per_h, False
        return _EMPTY + (phase_h - draining_h) * self.charge_per_h, True


class Temperatures:
    """The temperatures of a trace, over and over; one serves a whole fleet."""

    def __init__(self, trace: Sequence[TracePoint]) -> None:
        """Of at least one point."""
        self._at_s = np.array([point.at_s for point in trace])
        self._celsius = np.array([point.temperature_c for point in trace])
        self.length_s = float(self._at_s[-1]) + 1.0
        """A trace lasts one second longer than its last row."""

    def at(self, seconds: float) -> float:
        """In degrees Celsius, by the row that is due."""
        row = np.searchsorted(self._at_s, seconds % self.length_s, side="right") - 1
        return float(self._celsius[row])


class SimulatedPhone:
    """`fleet.device.sensors.Sensors` of one device of a fleet."""

    def __init__(
        self,
        temperatures: Temperatures,
        rng: np.random.Generator,
        *,
        speed: float = 1.0,
        network: Network = "wifi",
        memory_mb: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draw one; the same for the same generator state.

        Args:
            temperatures: Of `read_telemetry(...).phone`, or made up.
            rng: Draws where it begins, its shift and its battery.
            speed: Seconds of the simulation in a second of the clock.
            network: May be set later.
            memory_mb: What its process holds, MiB; may be set later.
            clock: Monotonic seconds.
        """
        self._temperatures = temperatures
        self._start_s = float(rng.uniform(0, temperatures.length_s))
        self._shift_c = float(rng.normal(0, SHIFT_C))
        self._battery = Battery(
            drain_per_h=float(rng.uniform(5, 20)),
            charge_per_h=float(rng.uniform(30, 60)),
            start_h=float(rng.uniform(0, 24)),
        )
        self._speed, self._clock, self._began_s = speed, clock, clock()
        self.network, self.memory_mb = network, memory_mb

    def read(self) -> Reading:
        """What is so now."""
        seconds = (self._clock() - self._began_s) * self._speed
        percent, charging = self._battery.at(seconds / 3600)
        return Reading(
            temperature_c=self._temperatures.at(self._start_s + seconds) + self._shift_c,
            battery_percent=round(percent, 1),
            charging=charging,
            network=self.network,
            memory_mb=self.memory_mb,
        )
