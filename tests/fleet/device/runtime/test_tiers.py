"""What a device knows of itself, its tier and its threads."""

import os
from dataclasses import replace

import pytest
from release_rig import PHONE, policy

from fleet.device.release import Denied
from fleet.device.runtime import DeviceInfo
from fleet.device.runtime.tiers import denied, threads_of, tier_of


@pytest.fixture
def cores(monkeypatch):
    """Sets how many cores this process may run on."""
    return lambda count: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))


def _system(root, *, model=b"", compatible=b"", clocks=(), memory_kb=0, cpuinfo=""):
    files = {
        "sys/firmware/devicetree/base/model": model,
        "sys/firmware/devicetree/base/compatible": compatible,
        "proc/meminfo": f"MemTotal:  {memory_kb} kB\nMemFree: 1 kB\n".encode(),
        "proc/cpuinfo": cpuinfo.encode(),
    }
    for core, khz in enumerate(clocks):
        files[f"sys/devices/system/cpu/cpu{core}/cpufreq/cpuinfo_max_freq"] = str(khz).encode()
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_an_arm_board(tmp_path, cores):
    """Model and SoC from the devicetree, whose strings end with NUL; big cores by their clocks."""
    cores(8)
    root = _system(
        tmp_path,
        model=b"Radxa ROCK 5B\0",
        compatible=b"radxa,rock-5b\0rockchip,rk3588\0",
        clocks=[1800000] * 4 + [2400000] * 2 + [2256000] * 2,
        memory_kb=16_000_000,
    )
    device = DeviceInfo.detect("id", root)
    assert device.model == "Radxa ROCK 5B"
    assert (device.cores, device.big_cores, device.memory_mb) == (8, 4, 15625)
    assert (tier_of(device, None), threads_of(device, "high")) == ("high", 4)


@pytest.mark.parametrize(
    ("clocks", "big"),
    [
        ([1800000] * 4 + [2500000] * 3 + [3000000], 4),
        ([1800000] * 6 + [2200000] * 2, 2),
        ([5000000] * 6 + [5100000] * 2, 8),
        ([1500000] * 8, 8),
        ([], 8),
    ],
    ids=["three clusters", "two clusters", "turbo steps", "one kind", "not exposed"],
)
def test_big_cores(tmp_path, cores, clocks, big):
    """The cores above the slowest kind; all, where there is one kind or nobody says."""
    cores(8)
    assert DeviceInfo.detect("id", _system(tmp_path, clocks=clocks)).big_cores == big


def test_a_system_that_says_nothing(tmp_path):
    """No /proc and no /sys are no error."""
    device = DeviceInfo.detect("id", tmp_path)
    assert (device.model, device.memory_mb) == ("unknown", 0)
    assert tier_of(device, None) == "low"


def test_this_host():
    """The real /proc and /sys are read."""
    device = DeviceInfo.detect("id")
    assert device.memory_mb > 100
    assert 1 <= device.big_cores <= device.cores


def test_a_control_group_bounds_the_memory(tmp_path, cores):
    """A container's limit counts where it is below what the machine has."""
    cores(4)
    root = _system(tmp_path, memory_kb=16_000_000)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.max").write_text("3221225472\n")
    assert DeviceInfo.detect("id", root).memory_mb == 3072
    (root / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert DeviceInfo.detect("id", root).memory_mb == 15625


@pytest.mark.parametrize(
    ("memory_mb", "big_cores", "tier"),
    [(5_500, 4, "high"), (5_499, 4, "mid"), (8_000, 3, "mid"), (2_499, 8, "low"), (8_000, 1, "low")],
)
def test_the_tier_by_rule(memory_mb, big_cores, tier):
    """Memory and big cores, both."""
    assert tier_of(replace(PHONE, memory_mb=memory_mb, big_cores=big_cores), None) == tier


def test_the_tier_by_policy():
    """The first pattern that fits wins over the rule, in the order of the policy."""
    rules = {"Pixel 8*": "mid", "Pixel*": "low", "pixel*": "high"}
    assert tier_of(PHONE, policy(1, tier_of=rules)) == "mid"
    assert tier_of(PHONE, policy(1, tier_of=dict(reversed(rules.items())))) == "low"
    assert tier_of(PHONE, policy(1, tier_of={"Galaxy*": "low"})) == "high"


@pytest.mark.parametrize(
    ("tier", "cores", "big", "threads"),
    [
        ("high", 8, 8, 6),
        ("high", 8, 4, 4),
        ("high", 8, 2, 4),
        ("high", 2, 2, 2),
        ("mid", 8, 8, 4),
        ("mid", 8, 1, 2),
        ("mid", 1, 1, 1),
        ("low", 8, 8, 2),
        ("low", 4, 1, 1),
    ],
)
def test_threads(tier, cores, big, threads):
    """4 to 6 on high, 2 to 4 on mid, never more than the process has cores."""
    assert threads_of(replace(PHONE, cores=cores, big_cores=big), tier) == threads


def test_denials():
    """A denied backend says why, on the device models that the pattern names."""
    rules = policy(1, deny=(Denied(device_model="Pixel*", backend="OPENCL", why="slower"),))
    assert denied(PHONE, "OPENCL", rules) == "slower"
    assert denied(PHONE, "VULKAN", rules) == ""
    assert denied(replace(PHONE, model="Galaxy"), "OPENCL", rules) == ""
