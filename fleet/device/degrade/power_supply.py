"""Battery and mains under /sys/class/power_supply.

Units are those of the kernel's documentation (Documentation/ABI/testing/sysfs-class-power): capacity in
percent, temp in tenths of a degree Celsius, power, current and voltage in millionths.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fleet.device.degrade.system_files import entries, read_number, read_text

_MAINS = frozenset({"Mains", "USB", "Wireless"})
_PLUGGED = {"Charging": True, "Full": True, "Discharging": False}  # "Not charging" is plugged or not
_MOST_POWER_W = 1_000.0
_COLDEST_C, _HOTTEST_C = -40.0, 120.0


@dataclass(frozen=True, kw_only=True)
class Supply:
    """What the power supplies of a device say together; None where they do not."""

    battery_percent: float | None = None
    charging: bool | None = None
    """Whether there is power from outside; True without any battery where there is mains."""
    power_w: float | None = None
    """Drawn from or put into the battery."""
    temperature_c: float | None = None
    """Of the battery."""


def read_supply(root: Path) -> Supply:
    """Read every supply; of several batteries the fullest counts, and the hottest."""
    batteries: list[Path] = []
    online: list[bool] = []
    for supply in entries(root / "sys/class/power_supply"):
        kind = read_text(supply / "type")
        if kind == "Battery" and read_text(supply / "scope") != "Device":  # else it is a mouse's
            batteries.append(supply)
        elif kind in _MAINS and (value := read_number(supply / "online")) in (0, 1, 2):
            online.append(value != 0)
    present = [battery for battery in batteries if read_number(battery / "present") != 0]
    states = [_PLUGGED[said] for b in present if (said := read_text(b / "status")) in _PLUGGED]
    return Supply(
        battery_percent=_most(_percent(battery) for battery in present),
        # Mains know best; a battery that charges knows too.
        charging=any(online) or any(states) if online or states else None,
        power_w=_most(_power_w(battery) for battery in present),
        temperature_c=_most(_temperature_c(battery) for battery in present),
    )


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _percent(battery: Path) -> float | None:
    value = read_number(battery / "capacity")
    return value if value is not None and 0 <= value <= 100 else None


def _power_w(battery: Path) -> float | None:
    micro_w = read_number(battery / "power_now")
    if micro_w is None:
        current, voltage = read_number(battery / "current_now"), read_number(battery / "voltage_now")
        micro_w = None if current is None or voltage is None else current * voltage / 1e6
    # Some drivers give the sign of the direction.
    power_w = None if micro_w is None else abs(micro_w) / 1e6
    return power_w if power_w is not None and power_w <= _MOST_POWER_W else None


def _temperature_c(battery: Path) -> float | None:
    """In tenths by the documentation, and never guessed: 95 is a cold day or a driver that is wrong."""
    tenths = read_number(battery / "temp")
    value = None if tenths is None else tenths / 10
    return value if value is not None and _COLDEST_C <= value <= _HOTTEST_C and value != 0 else None
