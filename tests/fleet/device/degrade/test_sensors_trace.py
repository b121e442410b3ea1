"""Recorded traces played back."""

import tarfile
from pathlib import Path

import pytest

from fleet.device.degrade.governor import Governor
from fleet.device.degrade.sensors_trace import TraceSensors, parse_trace, read_trace
from fleet.device.errors import UserError
from fleet.device.release import FramePolicy

HEADER = "Timestamp,CPU_Load,Freq0_MHz,Freq7_MHz,RAM_Used_MB,Temp_C,Battery_Perc,Voltage_mV"
LINES = (HEADER, "23:59:58,9,2208,1689,3300,31,100,4249", "23:59:59,9,1401,1689,3300,36,99,4249")
LINES = (*LINES, "00:00:03,9,1401,1401,3300,41,98,4100")
SHARED = Path(__file__).resolve().parents[5] / "shared" / "data" / "telemetry.tar"


def test_a_trace_is_read_past_midnight():
    """Times are counted from the first row, and a day later is later."""
    trace = parse_trace(LINES, name="t.csv")
    assert [(p.at_s, p.temperature_c, p.battery_percent, p.clock_mhz) for p in trace] == [
        (0, 31, 100, 2208),
        (1, 36, 99, 1689),
        (5, 41, 98, 1401),
    ]


@pytest.mark.parametrize(("speed", "start_s"), [(1.0, 0.0), (60.0, 0.0), (1.0, 3.0)])
def test_playing_it(speed, start_s):
    """The row that is due at that speed, held until the next, and from the beginning again at the end."""
    now = [100.0]
    trace = parse_trace(LINES, name="t.csv")
    sensors = TraceSensors(trace, speed=speed, start_s=start_s, charging=True, clock=lambda: now[0])
    for trace_s, temperature_c in (
        (0, 31),
        (0.9, 31),
        (1, 36),
        (4.9, 36),
        (5, 41),
        (5.9, 41),
        (6, 31),
        (13, 36),
    ):
        now[0] = 100 + (trace_s - start_s) / speed + 1e-9
        reading = sensors.read()
        assert (reading.temperature_c, reading.charging, reading.network) == (temperature_c, True, "wifi"), (
            trace_s
        )
        assert (reading.memory_mb, reading.cpu_percent) == (None, None)


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (HEADER,),
        ("a,b,c", "1,2,3"),
        (HEADER, "23:59:58,9,2208,1689,3300,hot,100,4249"),
        (HEADER, "23:59:58,9,2208,1689,3300,nan,100,4249"),
        (HEADER, "23:59:58,9,2208"),
        (HEADER, "noon,9,2208,1689,3300,31,100,4249"),
        (LINES[0], LINES[1], LINES[1]),
        (HEADER, "x" * 200_000),
    ],
)
def test_what_is_no_trace(lines):
    """One error that names the file."""
    with pytest.raises(UserError, match=r"t\.csv"):
        parse_trace(lines, name="t.csv")


def test_no_file_and_no_text(tmp_path):
    """A path that leads nowhere, and a file that is no text."""
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00" * 100)
    for name in ("a.csv", "b.csv"):
        with pytest.raises(UserError, match=name):
            read_trace(tmp_path / name)


@pytest.mark.parametrize(
    "wrong", [{"speed": 0}, {"speed": float("nan")}, {"start_s": float("inf")}, {"trace": ()}]
)
def test_a_speed_that_is_none(wrong):
    """Refused when made, not when read."""
    options = {"trace": parse_trace(LINES, name="t"), **wrong}
    with pytest.raises(UserError):
        TraceSensors(options.pop("trace"), **options)


def test_a_phone_that_got_hot_goes_through_every_level(tmp_path):
    """The recorded phone, 31 to 50 and back to 31 degrees in 25 minutes, drives the governor."""
    if not SHARED.exists():
        pytest.skip(f"{SHARED} is not there: recorded traces are not part of the repository")
    with tarfile.open(SHARED) as tar:
        data = tar.extractfile("telemetry/phone_trace_galaxy_c7pro_1s.csv").read()
    trace = parse_trace(data.decode("ascii").splitlines(), name="phone")
    assert len(trace) == 1480
    now = [0.0]
    sensors, governor = TraceSensors(trace, clock=lambda: now[0]), Governor(FramePolicy())
    levels = []
    for point in trace:
        now[0] = point.at_s
        decision = governor.decide(sensors.read(), now[0])
        level = (round(decision.fps), decision.model)
        if not levels or levels[-1] != level:
            levels.append(level)
    cool, warm, hot, pause = (15, "full"), (10, "full"), (5, "light"), (0, "light")
    # In the fifth minute it really cooled from 40 to 38 degrees.
    assert levels == [cool, warm, cool, warm, hot, pause, hot, warm, cool]
