"""Readings of a device: made-up /proc and /sys with known answers, and this host's own."""

import pytest

from fleet.device.host import available_mb, clock_mhz, energy_mj, forget_peak, resident_mb, temperature_c


def put(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(str(text), encoding="ascii")


def test_nothing_is_exposed_on_another_system(tmp_path):
    """No /proc, no /sys: no numbers and no errors."""
    forget_peak(tmp_path)
    assert resident_mb(root=tmp_path) is None
    readings = [available_mb, temperature_c, clock_mhz, energy_mj]
    assert [reading(tmp_path) for reading in readings] == [None] * 4


def test_memory_of_the_system(tmp_path):
    """MemAvailable, which counts what caches would give back."""
    put(tmp_path, "proc/meminfo", "MemTotal: 8192 kB\nMemFree: 1024 kB\nMemAvailable:    4096 kB\n")
    assert available_mb(tmp_path) == 4


@pytest.mark.parametrize(
    ("inner", "outer", "room_mb"),
    [((300, 100), (900, 100), 200), ((900, 0), (250, 100), 150), (("max", 5), (900, 100), 800)],
    ids=["own limit", "limit around it", "no own limit"],
)
def test_memory_of_a_container(tmp_path, inner, outer, room_mb):
    """The tightest of the control groups around the process counts."""
    put(tmp_path, "proc/meminfo", f"MemAvailable: {4096 * 1024} kB\n")
    put(tmp_path, "proc/self/cgroup", "1:cpu:/other\n0::/outer/inner\n")
    for group, (limit, used) in (("outer/inner", inner), ("outer", outer)):
        put(tmp_path, f"sys/fs/cgroup/{group}/memory.max", limit if limit == "max" else limit << 20)
        put(tmp_path, f"sys/fs/cgroup/{group}/memory.current", used << 20)
    assert available_mb(tmp_path) == room_mb


def test_the_hottest_zone_counts(tmp_path):
    """Sensors that are not connected answer with zero, negative or absurd numbers, or not at all."""
    for zone, text in enumerate(["45000", "61500", "0", "-274000", "250000", "nonsense"]):
        put(tmp_path, f"sys/class/thermal/thermal_zone{zone}/temp", text)
    assert temperature_c(tmp_path) == 61.5


def test_the_fastest_core_counts(tmp_path):
    """The busy one."""
    for core, khz in enumerate([800_000, 2_400_000]):
        put(tmp_path, f"sys/devices/system/cpu/cpu{core}/cpufreq/scaling_cur_freq", khz)
    assert clock_mhz(tmp_path) == 2400


def test_energy_is_that_of_all_packages(tmp_path):
    """Not of their parts again; unreadable ones, as for all but root, leave no number."""
    for domain, energy in (("intel-rapl:0", 1000), ("intel-rapl:1", 500), ("intel-rapl:0:0", 9)):
        put(tmp_path, f"sys/class/powercap/{domain}/energy_uj", energy)
    assert energy_mj(tmp_path) == 1.5
    put(tmp_path, "sys/class/powercap/intel-rapl:1/energy_uj", "")
    assert energy_mj(tmp_path) is None


def test_the_peak_can_be_forgotten():
    """What a process took before does not count as the model's."""
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    del block
    high = resident_mb("VmHWM")
    forget_peak()
    assert resident_mb("VmHWM") < high - 32
