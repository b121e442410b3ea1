"""Temperature under /sys/class/thermal: which of a device's many zones says how hot the device is.

The policy's limits (40, 45, 48 degrees) are those of a body that a hand holds. So a zone of the skin or of
the battery is taken where there is one, and the hottest of all zones where there is none: then it is the
chip, and the limits are for the deployment to set.
"""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fleet.device.degrade.system_files import entries, read_number, read_text

BODY_ZONES = ("*skin*", "*battery*", "*batt*", "quiet*", "*-quiet-*", "xo-therm*", "xo_therm*", "*shell*")
"""Patterns of zone types that measure what a hand feels, in lower case."""
_COLDEST_C, _HOTTEST_C = -40.0, 150.0  # a sensor that is not connected answers with nonsense


@dataclass(frozen=True, kw_only=True)
class Zone:
    """One zone with a believable reading."""

    type: str
    celsius: float


def read_zones(root: Path) -> list[Zone]:
    """Every zone that says something believable."""
    zones = []
    for folder in entries(root / "sys/class/thermal", "thermal_zone*"):
        celsius = to_celsius(read_number(folder / "temp"))
        if celsius is not None:
            zones.append(Zone(type=(read_text(folder / "type") or "unnamed")[:64], celsius=celsius))
    return zones


def to_celsius(value: float | None) -> float | None:
    """A zone's number in degrees.

    The kernel says millidegrees; some drivers say degrees. A number from 1 to 150 is taken for degrees: as
    millidegrees it would be a device at freezing point. 0 is the answer of zones that are off.
    """
    if value is None or value == 0:
        return None
    celsius = value if 1 <= value <= _HOTTEST_C else value / 1e3
    return celsius if _COLDEST_C <= celsius < _HOTTEST_C else None


def pick_zone(zones: list[Zone], wanted: str | None) -> Zone | None:
    """The hottest zone whose type fits `wanted` (shell pattern); None: of the body."""
    patterns = BODY_ZONES if wanted is None else (wanted.lower(),)
    fitting = (zone for zone in zones if any(fnmatch.fnmatchcase(zone.type.lower(), p) for p in patterns))
    return hottest(fitting)


def hottest(zones: Iterable[Zone]) -> Zone | None:
    """The hottest of some zones."""
    return max(zones, key=lambda zone: zone.celsius, default=None)
