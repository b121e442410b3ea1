"""What a device is, and from that its tier and threads until somebody has measured."""

import fnmatch
import os
from dataclasses import dataclass
from pathlib import Path

from fleet.device.engine import ENGINE_VERSION
from fleet.device.release import Policy, Tier

_ROOT = Path("/")
_SAME_CLUSTER = 0.95
"""Cores whose fastest clock is within 5 % are one kind: x86 cores differ by a turbo step or two."""
_HIGH_MEMORY_MB, _HIGH_BIG_CORES = 5_500, 4
_MID_MEMORY_MB, _MID_BIG_CORES = 2_500, 2
"""MiB that a system sees of nominal 6 and 3 GB."""
_THREADS: dict[Tier, tuple[int, int]] = {"high": (4, 6), "mid": (2, 4), "low": (1, 2)}


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """The device under the runtime."""

    id: str
    """The name that the gateway knows (`credentials.device_id`); the rollout draws by it."""
    model: str
    cores: int
    """That this process may run on."""
    big_cores: int
    """Of the faster kind; all, where there is one kind."""
    memory_mb: int
    """MiB of the system, or of the control group this process is in."""
    engine_version: str = ENGINE_VERSION

    @classmethod
    def detect(cls, device_id: str, root: Path = _ROOT) -> "DeviceInfo":
        """This device; `root` is the root of /proc and /sys, another one in tests. Never raises."""
        cores = _cores()
        clocks = sorted(_clocks_khz(root))[-cores:]
        little = clocks[0] if clocks and clocks[0] < _SAME_CLUSTER * clocks[-1] else 0
        big = sum(clock * _SAME_CLUSTER > little for clock in clocks)
        return cls(
            id=device_id,
            model=_first_text(root, "sys/firmware/devicetree/base/model", "sys/class/dmi/id/product_name")
            or "unknown",
            cores=cores,
            big_cores=min(big, cores) or cores,
            memory_mb=_memory_mb(root),
        )


def tier_of(device: DeviceInfo, policy: Policy | None) -> Tier:
    """The first pattern of the policy that fits the device's model, else by memory and cores."""
    for pattern, tier in (policy.tier_of if policy else {}).items():
        if fnmatch.fnmatchcase(device.model, pattern):
            return tier
    if device.memory_mb >= _HIGH_MEMORY_MB and device.big_cores >= _HIGH_BIG_CORES:
        return "high"
    if device.memory_mb >= _MID_MEMORY_MB and device.big_cores >= _MID_BIG_CORES:
        return "mid"
    return "low"


def threads_of(device: DeviceInfo, tier: Tier) -> int:
    """Threads until they are measured: the big cores, within what the tier may have."""
    fewest, most = _THREADS[tier]
    return min(max(fewest, min(device.big_cores, most)), device.cores)


def denied(device: DeviceInfo, backend: str, policy: Policy | None) -> str:
    """Why the policy lets this device not use a backend; empty if it may."""
    for entry in policy.deny if policy else ():
        if entry.backend == backend and fnmatch.fnmatchcase(device.model, entry.device_model):
            return entry.why or "denied by policy"
    return ""


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not this system
        return os.cpu_count() or 1


def _clocks_khz(root: Path) -> list[int]:
    """The fastest clock of each core that says it."""
    found = []
    for path in (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/cpuinfo_max_freq"):
        text = _text(path)
        if text.isdecimal() and int(text) > 0:
            found.append(int(text))
    return found


def _memory_mb(root: Path) -> int:
    total = next(
        (
            int(line.split()[1]) // 1024
            for line in _text(root / "proc/meminfo").splitlines()
            if line.startswith("MemTotal:") and line.split()[1].isdecimal()
        ),
        0,
    )
    limit = _text(root / "sys/fs/cgroup/memory.max")
    return min(total, int(limit) >> 20) if limit.isdecimal() else total


def _first_text(root: Path, *names: str) -> str:
    return next((text for name in names if (text := _text(root / name).strip("\0 "))), "")


def _text(path: Path) -> str:
    """What a file of the system says; empty where there is none. Devicetree strings end with a NUL."""
    try:
        return path.read_bytes().decode("utf-8", "replace").strip()
    except OSError:
        return ""
