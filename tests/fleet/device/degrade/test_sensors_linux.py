"""What Linux says of itself: made-up /proc and /sys trees, honest ones and hostile ones."""

import os
import threading
import time

import pytest

from fleet.device.degrade.patience import Patience
from fleet.device.degrade.sensors_linux import LinuxSensors
from fleet.device.degrade.thermal_zones import to_celsius
from fleet.device.sensors import Reading

PATIENT_S = 20.0
"""A deadline that only a file that never answers misses, however loaded the machine is."""


def put(root, files):
    """Write files (relative path to text) under a root."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def read(root, **options):
    return LinuxSensors(root, deadline_s=PATIENT_S, **options).read()


def zone(number, kind, value):
    return {
        f"sys/class/thermal/thermal_zone{number}/{name}": f"{v}\n"
        for name, v in (("type", kind), ("temp", value))
    }


def battery(name="BAT0", **fields):
    return {f"sys/class/power_supply/{name}/{k}": f"{v}\n" for k, v in {"type": "Battery", **fields}.items()}


PHONE = {
    **zone(0, "cpu-0-0-usr", 71000),
    **zone(1, "quiet-therm-adc", 41500),
    **battery(capacity=57, status="Discharging", present=1, temp=395, power_now=2_500_000),
    "sys/class/power_supply/usb/type": "USB\n",
    "sys/class/power_supply/usb/online": "0\n",
    "sys/class/net/wlan0/wireless/link": "",
    "sys/class/net/wlan0/operstate": "up\n",
    "proc/net/route": "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    "wlan0 00000000 010200C0 0003 0 0 600 00000000 0 0 0\n",
    "proc/self/status": "Name:\tx\nVmRSS:\t  204800 kB\n",
    "proc/meminfo": "MemTotal: 4000000 kB\nMemAvailable:  1048576 kB\n",
}


def test_a_phone_is_read_whole(tmp_path):
    """Body temperature not the chip's, percent, plug, network, memory and power, each in its unit."""
    assert read(put(tmp_path, PHONE)) == Reading(
        temperature_c=41.5,
        battery_percent=57.0,
        charging=False,
        network="wifi",
        memory_mb=200.0,
        available_mb=1024.0,
        cpu_percent=None,
        power_w=2.5,
    )


def test_a_system_that_exposes_nothing(tmp_path):
    """An empty root is all unknown, and no error."""
    assert read(tmp_path) == Reading()


@pytest.mark.parametrize(
    ("raw", "celsius"),
    [
        (42_000, 42.0),
        (42, 42.0),
        (1_500, 1.5),
        (-5_000, -5.0),
        (0, None),
        (150_001, None),
        (-273_200, None),
        (2**31 - 1, None),
        (127_000, 127.0),
        (0.5, 0.0005),
    ],
)
def test_units_of_a_zone(raw, celsius):
    """Millidegrees, degrees where millidegrees would be absurd, and nonsense dropped."""
    assert to_celsius(raw) == celsius


def test_which_temperature_counts(tmp_path):
    """The wanted zone; else the body's, else the battery's, else the hottest that is believable."""
    sensors = LinuxSensors(put(tmp_path, PHONE), zone="cpu-*", deadline_s=PATIENT_S)
    assert (sensors.read().temperature_c, sensors.temperature_from) == (71.0, "cpu-0-0-usr")
    assert read(tmp_path, zone="no such zone").temperature_c is None
    put(tmp_path, zone(1, "ddr", 88_000) | zone(2, "off", -40_001))
    sensors = LinuxSensors(tmp_path, deadline_s=PATIENT_S)
    assert (sensors.read().temperature_c, sensors.temperature_from) == (39.5, "battery")
    put(tmp_path, battery(temp=0))
    assert read(tmp_path).temperature_c == 88.0


def test_no_battery_and_mains_is_charging(tmp_path):
    """A board on mains: charging, no percentage. Without any supply neither is known."""
    mains = {"sys/class/power_supply/AC/type": "Mains\n", "sys/class/power_supply/AC/online": "1\n"}
    assert (read(put(tmp_path, mains)).charging, read(tmp_path).battery_percent) == (True, None)


def test_a_battery_bay_without_battery_and_the_battery_of_a_mouse(tmp_path):
    """Neither says anything of the device."""
    put(tmp_path, battery(capacity=90, present=0, status="Charging"))
    put(tmp_path, battery("hidpp", capacity=5, scope="Device", status="Discharging"))
    reading = read(tmp_path)
    assert (reading.battery_percent, reading.charging) == (None, None)


@pytest.mark.parametrize(
    ("status", "online", "charging"),
    [
        ("Discharging", 0, False),
        ("Charging", 0, True),
        ("Full", 1, True),
        ("Not charging", 1, True),
        ("Unknown", 0, False),
        ("\x00\xff", 7, None),
        ("Discharging", 1, True),
    ],
)
def test_whether_it_charges(tmp_path, status, online, charging):
    """Mains and battery together; what neither says is unknown."""
    put(tmp_path, battery(status=status))
    put(
        tmp_path, {"sys/class/power_supply/AC/type": "Mains", "sys/class/power_supply/AC/online": f"{online}"}
    )
    assert read(tmp_path).charging is charging


def test_power_of_a_battery_that_has_current_and_voltage_only(tmp_path):
    """Their product, whatever the sign; not while it charges: then it says what goes in."""
    fields = {"current_now": -500_000, "voltage_now": 4_000_000, "status": "Discharging"}
    assert read(put(tmp_path, battery(**fields))).power_w == pytest.approx(2.0)
    assert read(put(tmp_path, battery(status="Charging"))).power_w is None


def test_power_of_the_processor(tmp_path):
    """From RAPL's energy counter; a counter that wrapped around gives none, then goes on."""
    energy = "sys/class/powercap/intel-rapl:0/energy_uj"
    times = iter([0.0, 10.0, 20.0, 30.0])
    now = [0.0]
    sensors = LinuxSensors(tmp_path, deadline_s=PATIENT_S, clock=lambda: now[0])
    got = []
    for micro_j in (5_000_000, 25_000_000, 1_000_000, 31_000_000):
        put(tmp_path, {energy: str(micro_j)})
        now[0] = next(times)
        got.append(sensors.read().power_w)
    assert got == [None, pytest.approx(2.0), None, pytest.approx(3.0)]


def test_cpu_share_of_this_process(tmp_path):
    """Of one core, since the reading before; the name of a process may hold anything."""
    ticks = os.sysconf("SC_CLK_TCK")
    now = [0.0]
    sensors = LinuxSensors(tmp_path, deadline_s=PATIENT_S, clock=lambda: now[0])
    for at_s, user in ((0.0, 0), (2.0, 3 * ticks)):
        now[0] = at_s
        put(tmp_path, {"proc/self/stat": f"7 (a) b) 1 2) R 1 1 1 0 -1 0 0 0 0 0 {user} {ticks} 0 0"})
        reading = sensors.read()
    assert reading.cpu_percent == pytest.approx(150.0)


ROUTE = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"


def default_by(*names):
    lines = (f"{name} 00000000 0 0003 0 0 {metric} 00000000 0 0 0\n" for metric, name in enumerate(names))
    return {"proc/net/route": ROUTE + "".join(lines)}


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (
            default_by("eth0") | {"sys/class/net/eth0/type": "1", "sys/class/net/eth0/device/x": ""},
            "ethernet",
        ),
        (default_by("wlan0") | {"sys/class/net/wlan0/phy80211/x": ""}, "wifi"),
        (default_by("wwan0") | {"sys/class/net/wwan0/uevent": "INTERFACE=wwan0\nDEVTYPE=wwan\n"}, "mobile"),
        (default_by("rmnet_data0") | {"sys/class/net/rmnet_data0/type": "519"}, "mobile"),
        (default_by("tun0") | {"sys/class/net/tun0/type": "65534"}, "unknown"),
        (default_by("veth1") | {"sys/class/net/veth1/type": "1"}, "unknown"),
        (default_by("gone0"), "none"),
        (default_by() | {"sys/class/net/wlan0/wireless/x": ""}, "none"),
        (
            default_by("wlan0")
            | {"sys/class/net/wlan0/wireless/x": "", "sys/class/net/wlan0/operstate": "down"},
            "none",
        ),
        ({"sys/class/net/wlan0/wireless/x": ""}, "unknown"),
        (
            default_by("wlan0", "eth0")
            | {"sys/class/net/eth0/type": "1", "sys/class/net/wlan0/wireless/x": ""},
            "wifi",
        ),
        ({"proc/net/route": "\x00\xff" * 500}, "none"),
    ],
)
def test_kinds_of_network(tmp_path, files, kind):
    """The default route's card decides; a tunnel hides what carries it."""
    assert read(put(tmp_path, files)).network == kind


def test_a_network_with_ipv6_alone(tmp_path):
    """The default route may be in the other table."""
    line = f"{'0' * 32} 00 {'0' * 32} 00 fe80{'0' * 28} 00000400 00000001 00000000 00450003 wlan0\n"
    put(
        tmp_path, {"proc/net/ipv6_route": line, "proc/net/route": ROUTE, "sys/class/net/wlan0/wireless/x": ""}
    )
    assert read(tmp_path).network == "wifi"


GARBAGE = [
    "",
    "\n",
    "abc",
    "-1e999",
    "nan",
    "inf",
    "1_000",
    "9" * 5000,
    "\x00\xff\x00",
    "0x2a",
    "1e400",
    "-5",
]


@pytest.mark.parametrize("text", GARBAGE, ids=lambda text: ascii(text)[:12])
def test_garbage_in_every_file(tmp_path, text):
    """No file that holds nonsense gives a value, or an error."""
    files = {name: text for name in PHONE if not name.endswith("/type")} | {
        "sys/class/thermal/thermal_zone0/type": text,
        "sys/class/power_supply/BAT0/type": "Battery",
        "proc/self/stat": text,
        "sys/class/powercap/intel-rapl:0/energy_uj": text,
    }
    reading = read(put(tmp_path, files))
    none = Reading(network=reading.network)
    # -5 is a temperature of a freezer, and a drawn power with a sign.
    assert reading == none or text == "-5"
    assert reading.temperature_c is None or -40 <= reading.temperature_c < 150


def test_memory_of_a_control_group(tmp_path):
    """The limit around this process counts where it leaves less than the system has."""
    group = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": str(300 << 20)}
    put(tmp_path, PHONE | group | {"sys/fs/cgroup/a/memory.current": str(220 << 20)})
    assert read(tmp_path).available_mb == 80.0


@pytest.mark.parametrize(
    "line",
    ["VmRSS:", "VmRSS:\tmany kB", "VmRSS: -5 kB", "VmRSS: 99999999999999999999999999 kB", "VmRSS: 1e3 kB"],
)
def test_absurd_memory(tmp_path, line):
    """A line of /proc that the kernel would not write is no memory."""
    put(tmp_path, {"proc/self/status": line, "proc/meminfo": line.replace("VmRSS", "MemAvailable")})
    reading = read(tmp_path)
    assert (reading.memory_mb, reading.available_mb) == (None, None)


def test_folders_devices_and_links_in_place_of_files(tmp_path):
    """A folder, an endless device and a link to itself are not read."""
    put(tmp_path, PHONE)
    temp = tmp_path / "sys/class/thermal/thermal_zone1/temp"
    temp.unlink()
    temp.symlink_to("/dev/zero")
    capacity = tmp_path / "sys/class/power_supply/BAT0/capacity"
    capacity.unlink()
    capacity.mkdir()
    status = tmp_path / "sys/class/power_supply/BAT0/status"
    status.unlink()
    status.symlink_to(status)
    reading = read(tmp_path)
    assert (reading.temperature_c, reading.battery_percent, reading.memory_mb) == (39.5, None, 200.0)


@pytest.mark.parametrize(
    "name", ["sys/class/thermal/thermal_zone1/temp", "sys/class/power_supply/BAT0/capacity"]
)
def test_a_fifo_in_sys_is_no_file(tmp_path, name):
    """A pipe that nobody writes to costs nothing: it is not opened for waiting."""
    path = put(tmp_path, PHONE) / name
    path.unlink()
    os.mkfifo(path)
    sensors = LinuxSensors(tmp_path, deadline_s=PATIENT_S)
    assert sensors.read().memory_mb == 200.0
    assert sensors.hanging == ()


def test_a_proc_file_that_never_answers(tmp_path):
    """It costs its own value, and is not asked again until it has come back; then it counts again."""
    path = put(tmp_path, PHONE) / "proc/meminfo"
    path.unlink()
    os.mkfifo(path)
    sensors = LinuxSensors(tmp_path, deadline_s=1.0)
    first = sensors.read()
    assert (first.available_mb, first.temperature_c) == (None, 41.5)
    assert sensors.hanging == ("available",)
    threads = threading.active_count()
    for _ in range(20):
        assert sensors.read().available_mb is None
    assert threading.active_count() <= threads
    with path.open("w") as writer:  # the reader that hangs gets its end of file
        writer.write("MemAvailable: 2048 kB\n")
    path.unlink()
    path.write_text("MemAvailable: 1048576 kB\n")
    until = time.monotonic() + PATIENT_S
    while sensors.hanging and time.monotonic() < until:
        time.sleep(0.01)
    assert sensors.read().available_mb == 1024.0


def test_all_questions_hang():
    """Each costs its share of the deadline once; afterwards nothing is asked."""
    never = threading.Event()
    patience = Patience(0.2)
    questions = dict.fromkeys("abc", never.wait)
    assert patience.ask(questions) == {}
    assert patience.hanging == ("a", "b", "c")
    assert patience.ask(questions | {"d": lambda: 4}) == {"d": 4}
    never.set()


def test_threads_may_share_the_sensors(tmp_path):
    """The governor's and the monitor's: each gets whole readings."""
    sensors = LinuxSensors(put(tmp_path, PHONE), deadline_s=PATIENT_S)
    found = []
    threads = [
        threading.Thread(target=lambda: found.extend(sensors.read() for _ in range(20))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert {reading.temperature_c for reading in found} == {41.5}
    assert {reading.memory_mb for reading in found} == {200.0}


def test_this_machine_is_read():
    """Without a made-up tree: memory and the CPU's share are those of this process."""
    sensors = LinuxSensors(deadline_s=PATIENT_S)
    sensors.read()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass
    reading = sensors.read()
    assert 1 < reading.memory_mb < 100_000
    assert 0 < reading.cpu_percent < 6400
