"""What a device does about heat, battery and memory: one decision a reading."""

from dataclasses import dataclass
from typing import Literal

from fleet.device.degrade.battery import BatteryGovernor
from fleet.device.degrade.memory import MemoryGovernor, Pressure
from fleet.device.degrade.thermal import Heat, ThermalGovernor
from fleet.device.errors import UserError
from fleet.device.release import FramePolicy, frame_checks
from fleet.device.sensors import Reading

Model = Literal["full", "light"]
Reason = Literal[
    "warm",
    "hot",
    "too hot",
    "low battery",
    "memory tight",
    "memory short",
    "temperature not exposed",
    "battery not exposed",
    "memory not exposed",
]
FRAME_SHARE = {Heat.COOL: 1.0, Heat.WARM: 2 / 3, Heat.HOT: 1 / 3, Heat.PAUSE: 0.0}
"""Of `base_fps`: 15, 10, 5 and none."""
LOW_BATTERY_SHARE = 0.5
"""Of what heat leaves, when the battery is low."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What to do until the next reading."""

    fps: float
    """Inferences a second at most; 0 when paused."""
    model: Model
    paused: bool
    """Nothing is inferred, and the user is told so."""
    critical_only: bool
    """Inferences that can be missed are skipped: memory is short."""
    reasons: tuple[Reason, ...]
    """Why it is not the base rate and the full model, and what could not be read."""


class Governor:
    """Combines the three; give it a reading once a second or so."""

    def __init__(self, policy: FramePolicy) -> None:
        """Begin cool, charged and free.

        Raises:
            UserError: the policy makes no sense.
        """
        check(policy)
        self._heat = ThermalGovernor(policy)
        self._battery = BatteryGovernor(policy)
        self._memory = MemoryGovernor(policy)
        self._policy = policy

    @property
    def policy(self) -> FramePolicy:
        """The one in force."""
        return self._policy

    def set_policy(self, policy: FramePolicy) -> None:
        """Obey another policy from the next reading on; levels stay until then.

        Raises:
            UserError: it makes no sense, and the one before stays in force.
        """
        check(policy)
        self._policy = self._heat.policy = self._battery.policy = self._memory.policy = policy

    def decide(self, reading: Reading, now_s: float) -> Decision:
        """What to do after a reading; `now_s` on the monotonic clock."""
        heat = self._heat.step(reading.temperature_c, now_s)
        low = self._battery.step(reading.battery_percent, reading.charging, now_s)
        pressure = self._memory.step(reading.memory_mb, reading.available_mb)
        fps = self._policy.base_fps * FRAME_SHARE[heat] * (LOW_BATTERY_SHARE if low else 1.0)
        light = heat >= Heat.HOT or low or pressure >= Pressure.TIGHT
        return Decision(
            fps=fps,
            model="light" if light else "full",
            paused=heat is Heat.PAUSE,
            critical_only=pressure is Pressure.SHORT,
            reasons=_reasons(reading, heat, low, pressure),
        )


def check(policy: FramePolicy) -> None:
    """Refuse a policy under which a device could not work, or would flap.

    Raises:
        UserError: with what is wrong.
    """
    for right, name, value, allowed in frame_checks(policy):
        if not right:
            raise UserError(
                f"policy {name}: {value}",
                allowed=allowed,
                next_step="sign a corrected policy; the one before stays in force",
            )


def _reasons(reading: Reading, heat: Heat, low: bool, pressure: Pressure) -> tuple[Reason, ...]:
    named: dict[Reason, bool] = {
        "warm": heat is Heat.WARM,
        "hot": heat is Heat.HOT,
        "too hot": heat is Heat.PAUSE,
        "low battery": low,
        "memory tight": pressure is Pressure.TIGHT,
        "memory short": pressure is Pressure.SHORT,
        "temperature not exposed": reading.temperature_c is None,
        "battery not exposed": reading.battery_percent is None,
        "memory not exposed": reading.memory_mb is None or reading.available_mb is None,
    }
    return tuple(reason for reason, holds in named.items() if holds)
