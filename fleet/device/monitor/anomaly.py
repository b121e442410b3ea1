"""Which inferences are anomalous: slow, hungry, unsure, or failing in a row."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from fleet.device.histogram import Histogram, merged
from fleet.device.monitor.ring import ABSENT, FAILED, Records
from fleet.device.release import AnomalyLimits
from fleet.device.wire import Anomaly

_P99_WINDOWS = 10
_FEWEST_FOR_P99 = 100


class AnomalyFinder:
    """Looks at the inferences window by window; remembers recent latencies and the failures in a row."""

    def __init__(self, limits: AnomalyLimits) -> None:
        """With the limits of this deployment; they may be replaced at any time."""
        self.limits = limits
        self._recent: deque[Histogram] = deque(maxlen=_P99_WINDOWS)
        self._failures_in_a_row = 0

    def find(
        self, inferences: Records, latency: Histogram | None, memory_mb: Sequence[float]
    ) -> dict[Anomaly, int]:
        """How many inferences (of memory: readings) of a window are anomalous, by kind.

        Args:
            inferences: Of the window, in order, skipped frames left out.
            latency: Of those that did not fail.
            memory_mb: Readings within the window, MiB.

        Returns:
            Counts above 0 only.
        """
        done = inferences[inferences["kind"] != FAILED]
        # Comparisons with NaN are false: what is not finite is counted elsewhere.
        slow = done["latency_ms"] > min(self.limits.latency_ms, self._latency_limit())
        unsure = (done["confidence"] != ABSENT) & (done["confidence"] < self.limits.confidence)
        counts: dict[Anomaly, int] = {
            "latency": int(np.count_nonzero(slow)),
            "memory": sum(value > self.limits.memory_mb for value in memory_mb),
            "confidence": int(np.count_nonzero(unsure)),
            "failures": self._failing(inferences["kind"] == FAILED),
        }
        if latency is not None:
            self._recent.append(latency)
        return {kind: count for kind, count in counts.items() if count}

    def _latency_limit(self) -> float:
        """Twice the P99 of the windows before, in ms; infinite until they hold enough to have one."""
        recent = merged(self._recent)
        if recent is None or recent.count < _FEWEST_FOR_P99:
            return np.inf
        return self.limits.latency_times_p99 * recent.quantile(0.99)

    def _failing(self, failed: np.ndarray) -> int:
        """Failures that are at least the limit's in an unbroken row, over the bounds of windows too."""
        places = np.arange(len(failed))
        last_good = np.maximum.accumulate(np.where(failed, -1 - self._failures_in_a_row, places))
        in_a_row = places - last_good
        if len(failed):
            self._failures_in_a_row = int(in_a_row[-1])
        return int(np.count_nonzero(failed & (in_a_row >= self.limits.consecutive_failures)))
