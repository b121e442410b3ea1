"""What a fleet is made of."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fleet.device.errors import UserError
from fleet.device.wire import Versions
from fleet.simulator.device_classes import DeviceClass
from fleet.simulator.drift import NO_DRIFT, Drift
from fleet.simulator.faults import Fault
from fleet.simulator.phone import Temperatures

VERSIONS = Versions(release=1, model="1", engine="simulated", config="1", monitor="1", app="simulator")

_SLOWEST = 0.01


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a fleet is; the same plan makes the same windows."""

    count: int
    classes: Sequence[DeviceClass]
    temperatures: Temperatures
    start_ms: int
    """Wall time of the beginning. A gateway refuses windows dated more than a day ahead: do not end
    there."""
    seed: int = 0
    hours: float = 24.0
    speed: float = math.inf
    """Seconds of the simulation in a real one; by default as fast as it goes."""
    threads: int = 16
    """Each with a connection that is kept."""
    windows_per_h: float = 2.0
    """Of a device, on average; 100 inferences each."""
    spool_windows: int = 4096
    versions: Sequence[Versions] = (VERSIONS,)
    """Equally many devices run each."""
    faulty: Mapping[Fault, int] = field(default_factory=dict)
    """How many devices of the fleet have each fault; of `stolen_key`, pairs with one key."""
    drifted: Mapping[Drift, int] = field(default_factory=dict)
    """How many have each drift; none of them has a fault."""

    def check(self) -> None:
        """Refuse what cannot be simulated.

        Raises:
            UserError: with what it is.
        """
        special = _places(self.faulty) + sum(self.drifted.values())
        sound = (
            1 <= self.count <= 1_000_000
            and special <= self.count
            and 0 < self.hours <= 24 * 366
            and self.speed >= _SLOWEST
            and min((*self.faulty.values(), *self.drifted.values()), default=0) >= 0
            and 1 <= self.threads <= 64
            and 0 < self.windows_per_h <= 500
        )
        if not sound:
            raise UserError(
                f"{self.count} devices, {special} of them faulty or drifted, for {self.hours:g} hours, "
                f"{self.windows_per_h:g} windows an hour, {self.threads} threads, speed {self.speed:g}",
                allowed="1 to 1,000,000 devices, no more of them special; up to 8784 hours, 500 windows an "
                "hour, 64 threads; a speed of 0.01 or more; no negative number",
                next_step="change what is outside",
            )


def _places(faulty: Mapping[Fault, int]) -> int:
    return sum(count * (2 if fault == "stolen_key" else 1) for fault, count in faulty.items())


def parts_of(plan: Plan, rng: np.random.Generator) -> tuple[list[Fault | None], list[Drift]]:
    """Fault and drift of each device; the two of a stolen key lie side by side."""
    groups: list[list[tuple[Fault | None, Drift]]] = [
        [(fault, NO_DRIFT)] * (2 if fault == "stolen_key" else 1)
        for fault, count in plan.faulty.items()
        for _ in range(count)
    ]
    groups += [[(None, drift)] for drift, count in plan.drifted.items() for _ in range(count)]
    groups += [[(None, NO_DRIFT)]] * (plan.count - sum(map(len, groups)))
    parts = [part for at in rng.permutation(len(groups)) for part in groups[int(at)]]
    return [fault for fault, _ in parts], [drift for _, drift in parts]
