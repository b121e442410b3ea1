"""Sensors of a Linux device: /proc, /sys and control groups.

Whatever is missing, absurd, or does not answer in time is None. What a file may hold is bounded, and a file
that hangs costs one deadline, once.
"""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleet.device import host
from fleet.device.degrade.network_kind import read_network
from fleet.device.degrade.patience import DEADLINE_S, Patience
from fleet.device.degrade.power_supply import Supply, read_supply
from fleet.device.degrade.system_files import read_text
from fleet.device.degrade.thermal_zones import Zone, hottest, pick_zone, read_zones
from fleet.device.sensors import Reading

_ROOT = Path("/")
_SHORTEST_S = 0.05  # between readings that a rate is made of; a tick of the CPU's clock is 0.01 s
_TICKS_HZ = os.sysconf("SC_CLK_TCK")
_MOST_MB = 2**30  # a PiB is no memory
_MOST_POWER_W = 10_000.0


class LinuxSensors:
    """`fleet.device.sensors.Sensors` of this machine, or of a tree like it."""

    def __init__(
        self,
        root: Path = _ROOT,
        *,
        zone: str | None = None,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read from `root`; nothing is read before `read`.

        Args:
            root: Where proc/ and sys/ lie.
            zone: Type of the thermal zone that counts (shell pattern). None: of the body, else the
                battery, else the hottest.
            deadline_s: How long a reading may take.
            clock: Monotonic seconds.
        """
        self._root, self._zone, self._clock = root, zone, clock
        self._patience, self._one_at_a_time = Patience(deadline_s), threading.Lock()
        self._cpu, self._energy = _Rate(), _Rate()
        self.temperature_from = ""
        """Type of the zone that gave the last temperature; empty without one."""

    @property
    def hanging(self) -> tuple[str, ...]:
        """What does not answer now."""
        return self._patience.hanging

    def read(self) -> Reading:
        """What is so now; threads may share the sensors."""
        with self._one_at_a_time:
            return self._read()

    def _read(self) -> Reading:
        root = self._root
        said = self._patience.ask(
            {
                "memory": lambda: host.resident_mb(root=root),
                "available": lambda: host.available_mb(root),
                "cpu": lambda: (self._clock(), _cpu_s(root)),
                "network": lambda: read_network(root),
                "zones": lambda: read_zones(root),
                "supply": lambda: read_supply(root),
                "energy": lambda: (self._clock(), host.energy_mj(root)),
            }
        )
        supply: Supply = said.get("supply") or Supply()
        package_mw = self._energy.per_s(*(said.get("energy") or (0.0, None)))
        cores = self._cpu.per_s(*(said.get("cpu") or (0.0, None)))
        return Reading(
            temperature_c=self._temperature_c(said, supply),
            battery_percent=supply.battery_percent,
            charging=supply.charging,
            network=said.get("network") or "unknown",
            memory_mb=_within(said.get("memory"), _MOST_MB),
            available_mb=_within(said.get("available"), _MOST_MB),
            cpu_percent=None if cores is None else cores * 100,
            # The battery's is the whole device's, but while it charges it says what goes in.
            power_w=_within(
                package_mw / 1e3 if package_mw is not None else (None if supply.charging else supply.power_w),
                _MOST_POWER_W,
            ),
        )

    def _temperature_c(self, said: dict[str, Any], supply: Supply) -> float | None:
        """Of the wanted zone; else of the body, else the battery's, else of the hottest zone."""
        zones = said.get("zones") or []
        found = [pick_zone(zones, self._zone)]
        if self._zone is None:
            if supply.temperature_c is not None:
                found.append(Zone(type="battery", celsius=supply.temperature_c))
            found.append(hottest(zones))
        zone = next((zone for zone in found if zone is not None), None)
        self.temperature_from = "" if zone is None else zone.type
        return None if zone is None else zone.celsius


class _Rate:
    """How fast a counter grows."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None
        self._last: float | None = None

    def per_s(self, now_s: float, value: float | None) -> float | None:
        """Since the reading before; the last rate again when that was just now.

        None without a reading before, or where the counter went back: it wrapped around, or is another one.
        """
        if value is None:
            self._before = self._last = None
            return None
        if self._before is None:
            self._before = (now_s, value)
            return None
        passed_s, grown = now_s - self._before[0], value - self._before[1]
        if 0 <= passed_s < _SHORTEST_S:
            return self._last
        self._before = (now_s, value)
        self._last = grown / passed_s if passed_s > 0 and grown >= 0 else None
        return self._last


def _cpu_s(root: Path) -> float | None:
    """CPU time of this process in seconds: fields 14 and 15 of proc(5)'s /proc/PID/stat."""
    text = read_text(root / "proc/self/stat") or ""
    words = text.rpartition(")")[2].split()  # the name before it may hold anything
    return (int(words[11]) + int(words[12])) / _TICKS_HZ


def _within(value: float | None, most: float) -> float | None:
    return value if value is not None and 0 <= value <= most else None
