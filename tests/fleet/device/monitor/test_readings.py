"""The sensors are read once a second at most, whoever asks."""

from telling import FixedSensors

from fleet.device.monitor import readings
from fleet.device.monitor.readings import LatestReading


def test_a_reading_is_shared_until_it_is_old(monkeypatch):
    """CPU use is measured since the reading before: two askers must not halve each other's time."""
    now_s = [100.0]
    monkeypatch.setattr(readings.time, "monotonic", lambda: now_s[0])
    sensors = FixedSensors()
    latest = LatestReading(sensors)
    first = latest.get()
    now_s[0] += 0.99
    assert latest.get() is first
    now_s[0] += 0.02
    assert latest.get() is not first
