"""From records to windows: every hundred inferences become one, with what the device was like meanwhile.

A window counts inferences, failed ones included; skipped frames go into the window that is open.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fleet.device.histogram import Histogram
from fleet.device.monitor.anomaly import AnomalyFinder
from fleet.device.monitor.clock import Now
from fleet.device.monitor.loss import LossCounter
from fleet.device.monitor.ring import ABNORMAL, ABSENT, FAILED, RECORD, SKIPPED, Records
from fleet.device.release import AnomalyLimits
from fleet.device.sensors import Reading
from fleet.device.wire import (
    INFERENCES_PER_WINDOW,
    Environment,
    Loss,
    Performance,
    Quality,
    Resource,
    Versions,
    Window,
)

UNNUMBERED = 0
"""Sequence of a window that is not on the disk yet; the first that a device gives is 1."""
_PAUSE_TIMES_MEDIAN, _PAUSE_MS = 10.0, 1_000.0
_RESOURCES = ("memory_mb", "cpu_percent", "temperature_c", "power_w", "battery_percent")


class WindowBuilder:
    """Collects records and closes windows; belongs to one thread and touches no clock, disk or network."""

    def __init__(
        self,
        *,
        boot: str,
        versions: Versions,
        environment: Environment,
        limits: AnomalyLimits,
        loss: LossCounter,
        now: Now,
    ) -> None:
        """Begin at `now` as the process `boot`; what was lost elsewhere is taken from `loss`."""
        self._boot, self._versions, self._environment = boot, versions, environment
        self._anomalies = AnomalyFinder(limits)
        self._loss = loss
        self._offset_ms = now.offset_ms
        self._parts: list[Records] = []
        self._inferences = self._skipped = 0
        self._readings: list[Reading] = []

    def add(self, records: Records, reading: Reading, now: Now) -> list[Window]:
        """Take records (in order, seen at `now`) and close each window that they complete.

        Args:
            records: As drained from the ring.
            reading: The latest of the sensors.
            now: The clocks, read after the records were.

        Returns:
            Windows without a number, oldest first.
        """
        windows = []
        inferred = np.flatnonzero(records["kind"] != SKIPPED)
        if len(inferred) and (not self._readings or self._readings[-1] is not reading):
            self._readings.append(reading)
        start = 0
        while len(inferred) >= (missing := INFERENCES_PER_WINDOW - self._inferences):
            end = int(inferred[missing - 1]) + 1
            self._take(records[start:end])
            windows.append(self._close(now))
            start, inferred = end, inferred[missing:]
            if len(inferred):
                self._readings.append(reading)
        self._take(records[start:])
        return windows

    def close(self, now: Now, *, last: bool = False) -> Window | None:
        """End the open window before it is full; None when nothing was recorded since the last.

        The `last` of a process is there for what was lost alone, too.
        """
        worth_it = self._inferences or self._skipped or (last and self._loss.is_open)
        return self._close(now) if worth_it else None

    def change(self, versions: Versions, environment: Environment) -> None:
        """What runs from now on; close the open window before."""
        self._versions, self._environment = versions, environment

    def set_limits(self, limits: AnomalyLimits) -> None:
        """Of what is anomalous from this window on."""
        self._anomalies.limits = limits

    def _take(self, records: Records) -> None:
        skipped = int(np.count_nonzero(records["kind"] == SKIPPED))
        self._skipped += skipped
        if skipped < len(records):
            self._parts.append(records[records["kind"] != SKIPPED])
            self._inferences += len(records) - skipped

    def _close(self, now: Now) -> Window:
        inferences = np.concatenate(self._parts) if self._parts else np.empty(0, RECORD)
        finite = _Finite()
        performance = _performance(inferences, self._skipped, finite)
        resource = Resource(**{name: finite.histogram(_given(self._readings, name)) for name in _RESOURCES})
        quality = _quality(inferences, finite)
        memory_mb = _given(self._readings, "memory_mb")
        self._loss.add(Loss(not_finite=finite.left_out))
        times_ns = inferences["time_ns"] if len(inferences) else np.array([now.forward_ns])
        end_ms = round(int(times_ns[-1]) / 1e6 + now.offset_ms)
        window = Window(
            sequence=UNNUMBERED,
            boot=self._boot,
            start_ms=max(0, end_ms - round(int(times_ns[-1] - times_ns[0]) / 1e6)),
            end_ms=max(0, end_ms),
            uptime_ms=int(times_ns[-1]) // 1_000_000,
            clock_jump_ms=round(now.offset_ms - self._offset_ms),
            versions=self._versions,
            performance=performance,
            resource=resource,
            quality=quality,
            environment=_environment_now(self._environment, self._readings),
            loss=self._loss.take(),
            anomalies=self._anomalies.find(inferences, performance.latency_ms, memory_mb),
        )
        self._offset_ms = now.offset_ms
        self._parts, self._readings, self._inferences, self._skipped = [], [], 0, 0
        return window


class _Finite:
    """Makes histograms of what is finite and counts the rest."""

    def __init__(self) -> None:
        self.left_out = 0

    def histogram(self, values: Iterable[float]) -> Histogram | None:
        array = np.asarray(values, dtype=np.float64)
        finite = array[np.isfinite(array)]
        self.left_out += array.size - finite.size
        return Histogram.of(finite)


def throughput_hz(times_ns: np.ndarray) -> float | None:
    """Inferences per second while inferring; None of fewer than two, or all at one time.

    An interval of ten times the median and at least a second is a pause: the app was in the background, the
    process stopped, the device asleep.

    Args:
        times_ns: [n] ends of the inferences, ascending.
    """
    intervals_ms = np.diff(times_ns) / 1e6
    if not len(intervals_ms):
        return None
    pause_ms = max(_PAUSE_MS, _PAUSE_TIMES_MEDIAN * float(np.median(intervals_ms)))
    active = intervals_ms[intervals_ms < pause_ms]
    duration_ms = float(active.sum())
    return len(active) * 1e3 / duration_ms if duration_ms > 0 else None


def _performance(inferences: Records, skipped: int, finite: _Finite) -> Performance:
    failed = inferences["kind"] == FAILED
    return Performance(
        inferences=len(inferences),
        failures=int(np.count_nonzero(failed)),
        skipped_frames=skipped,
        throughput_hz=throughput_hz(inferences["time_ns"]),
        latency_ms=finite.histogram(_present(inferences["latency_ms"][~failed])),
    )


def _quality(inferences: Records, finite: _Finite) -> Quality:
    answered = inferences[inferences["kind"] != FAILED]
    labels = answered["label"]
    classes = Counter(labels[labels >= 0].tolist())
    return Quality(
        confidence=finite.histogram(_present(answered["confidence"])),
        input_mean=finite.histogram(_present(answered["input_mean"])),
        input_std=finite.histogram(_present(answered["input_std"])),
        classes={str(label): classes[label] for label in sorted(classes)},
        abnormal_outputs=int(np.count_nonzero(answered["kind"] == ABNORMAL)),
    )


def _present(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.extract(values != ABSENT, values)


def _given(readings: list[Reading], name: str) -> list[float]:
    values = (getattr(reading, name) for reading in readings)
    return [value for value in values if value is not None]


def _environment_now(environment: Environment, readings: list[Reading]) -> Environment:
    """With network and power as last read."""
    if not readings:
        return environment
    return replace(environment, network=readings[-1].network, charging=readings[-1].charging)
