"""The thread between the ring buffer and the spool: makes windows of records, ten times a second."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fleet.device.monitor.clock import Clock, Now
from fleet.device.monitor.loss import LossCounter
from fleet.device.monitor.readings import LatestReading
from fleet.device.monitor.ring import Records, Ring
from fleet.device.monitor.spool import Spool
from fleet.device.monitor.window import WindowBuilder
from fleet.device.wire import Environment, Loss, Versions, Window

_TICK_S = 0.1
"""2048 slots last so long at 20,000 records a second. The writer wakes nobody: that would cost it more."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Close the open window after this many records, whenever the worker comes to it."""

    head: int
    versions: Versions | None = None
    """What runs from there on, with `environment`; None: the same."""
    environment: Environment | None = None
    last: bool = False
    """Nothing comes after."""
    reached: threading.Event = field(default_factory=threading.Event)


class Worker(threading.Thread):
    """The thread."""

    def __init__(
        self,
        ring: Ring,
        builder: WindowBuilder,
        spool: Spool,
        *,
        loss: LossCounter,
        readings: LatestReading,
        clock: Clock,
        on_anomaly: Callable[[], None],
    ) -> None:
        """Reads `ring`, writes `spool`; `on_anomaly` is called when a window with one was put there."""
        super().__init__(name="edgeloop-monitor", daemon=True)
        self._ring, self._builder, self._spool, self._loss = ring, builder, spool, loss
        self._readings, self._clock, self._on_anomaly = readings, clock, on_anomaly
        self._boundaries: deque[Boundary] = deque()
        self._wake, self._stopping = threading.Event(), False

    def add(self, boundary: Boundary) -> None:
        """From any thread, right after `boundary.head` was read from the ring; wakes the worker."""
        self._boundaries.append(boundary)
        self._wake.set()

    def stop(self) -> None:
        """End after the boundaries that were added."""
        self._stopping = True
        self._wake.set()

    def run(self) -> None:
        """Until `stop`."""
        while True:
            stopping = self._stopping
            self._step()
            if stopping:
                return
            self._wake.wait(_TICK_S)
            self._wake.clear()

    def _step(self) -> None:
        boundaries = [self._boundaries.popleft() for _ in range(len(self._boundaries))]
        drained = self._ring.drain()  # after the boundaries were taken: it reaches at least as far as they do
        now = self._clock.now()
        if drained.overwritten:
            self._loss.add(Loss(overwritten_records=drained.overwritten))
        records = drained.records
        for boundary in boundaries:
            end = int(np.searchsorted(records["sequence"], np.uint64(boundary.head), side="right"))
            self._take(records[:end], now)
            self._put(self._builder.close(now, last=boundary.last))
            if boundary.versions is not None and boundary.environment is not None:
                self._builder.change(boundary.versions, boundary.environment)
            boundary.reached.set()
            records = records[end:]
        self._take(records, now)
        self._spool.settle()

    def _take(self, records: Records, now: Now) -> None:
        if len(records):
            for window in self._builder.add(records, self._readings.get(), now):
                self._put(window)

    def _put(self, window: Window | None) -> None:
        if window is None:
            return
        self._spool.put(window)
        if window.anomalies:
            self._on_anomaly()
