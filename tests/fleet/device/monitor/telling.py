"""What the tests of the monitor share: versions, an environment, sensors, windows."""

from dataclasses import replace

import numpy as np

from fleet.device.monitor.clock import Now
from fleet.device.monitor.loss import LossCounter
from fleet.device.monitor.ring import ABSENT, DONE, RECORD
from fleet.device.monitor.window import WindowBuilder
from fleet.device.release import AnomalyLimits, UploadRule
from fleet.device.sensors import Reading
from fleet.device.wire import Environment, Versions

VERSIONS = Versions(release=3, model="m3", engine="3.6.1", config="t1", monitor="1", app="2.0")
ENVIRONMENT = Environment(
    device_model="Board", os="Linux", network="unknown", charging=None, backend="CPU", driver="",
    tier="mid", variant="mbv3s-p30-i8-r48",
)  # fmt: skip
READING = Reading(
    temperature_c=31.5, battery_percent=80.0, charging=True, network="wifi", memory_mb=120.0, cpu_percent=40.0
)
AT_ONCE = tuple(
    UploadRule(network=network, charging=charging, every_s=1, share=1.0)
    for network in ("wifi", "mobile")
    for charging in (True, False)
)


class FixedSensors:
    """Always the same reading, which a test may change."""

    def __init__(self, reading=READING):
        self.reading = reading

    def read(self):
        return replace(self.reading)


def records(n, *, first=0, period_ms=10.0, **columns):
    """n records of 20 ms and full confidence, numbered from `first`, unless a column says otherwise."""
    made = np.zeros(n, RECORD)
    made["sequence"] = np.arange(first, first + n) + 1
    made["time_ns"] = (np.arange(first, first + n) * period_ms * 1e6).astype(np.int64) + 10**12
    made["latency_ms"], made["confidence"], made["label"], made["kind"] = 20.0, 0.9, 1, DONE
    made["input_mean"] = made["input_std"] = ABSENT
    for name, values in columns.items():
        made[name] = values
    return made


def now(forward_ms=1_000_000.0, wall_ms=1_800_000_000_000):
    return Now(round(wall_ms), round(forward_ms * 1e6))


def builder(loss=None, limits=None):
    return WindowBuilder(
        boot="0123456789abcdef",
        versions=VERSIONS,
        environment=ENVIRONMENT,
        limits=limits or AnomalyLimits(),
        loss=loss or LossCounter(),
        now=now(),
    )


def window(*, anomalous=False, mark=20.0):
    """A window of one inference that took `mark` ms; with a low confidence if it is to be anomalous."""
    made = builder()
    made.add(records(1, latency_ms=mark, confidence=0.1 if anomalous else 0.9), READING, now())
    return made.close(now())
