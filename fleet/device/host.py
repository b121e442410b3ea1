"""What the device says of itself while it works: memory, temperature, clock, energy.

None where a system does not expose it. `root` is the root of /proc and /sys, another one in tests.
"""

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_HOTTEST_C = 150.0  # a sensor that is not connected answers with nonsense


def resident_mb(field: str = "VmRSS", root: Path = _ROOT) -> float | None:
    """Resident memory of this process in MiB; `VmHWM` is its peak."""
    return _meminfo_mb(root / "proc/self/status", field)


def forget_peak(root: Path = _ROOT) -> None:
    """Let `VmHWM` begin anew from what is resident now; what importing took is none of the model's."""
    try:
        (root / "proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return  # the peak then includes that of the imports, where they took more than the model does


def available_mb(root: Path = _ROOT) -> float | None:
    """Memory in MiB that this process can still take: of the system, or of its control group if less."""
    system = _meminfo_mb(root / "proc/meminfo", "MemAvailable")
    return min([*([] if system is None else [system]), *_cgroup_rooms_mb(root)], default=None)


def _cgroup_rooms_mb(root: Path) -> Iterator[float]:
    """What each limited control group (version 2) around this process has left."""
    groups = (_text(root / "proc/self/cgroup") or "").splitlines()
    inside = next((line.removeprefix("0::") for line in groups if line.startswith("0::")), None)
    if inside is None:
        return
    top = root / "sys/fs/cgroup"
    folder = top / inside.lstrip("/")
    for group in (folder, *folder.parents):
        if not group.is_relative_to(top):
            return
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is not None and used is not None:  # `max` is no number: no limit
            yield max(0.0, limit - used) / 2**20


def temperature_c(root: Path = _ROOT) -> float | None:
    """The hottest thermal zone in degrees Celsius."""
    zones = (root / "sys/class/thermal").glob("thermal_zone*/temp")
    values = [milli / 1e3 for zone in zones if (milli := _number(zone)) is not None]
    return max((value for value in values if 0 < value < _HOTTEST_C), default=None)


def clock_mhz(root: Path = _ROOT) -> float | None:
    """The fastest core's clock now, in MHz: where a busy process runs."""
    cores = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq")
    return max((khz / 1e3 for core in cores if (khz := _number(core)) is not None), default=None)


def energy_mj(root: Path = _ROOT) -> float | None:
    """Energy counter of all CPU packages in millijoules; it wraps around."""
    packages = (root / "sys/class/powercap").glob("*-rapl:[0-9]/energy_uj")
    values = [_number(package) for package in packages]
    known = [value for value in values if value is not None]
    return sum(known) / 1e3 if known and len(known) == len(values) else None


def _meminfo_mb(path: Path, field: str) -> float | None:
    for line in (_text(path) or "").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    return None


def _number(path: Path) -> float | None:
    try:
        return float(_text(path) or "")
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:  # not this system, or not for this user
        return None
