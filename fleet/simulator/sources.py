"""Where the inferences of a simulated device come from: drawn, or made by something that really runs."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from fleet.device.monitor.ring import DONE, RECORD, Records
from fleet.device.wire import INFERENCES_PER_WINDOW, Environment, Versions
from fleet.simulator.device_classes import DeviceClass
from fleet.simulator.drift import Drift

_MOST_FPS = 15.0


class Source(Protocol):
    """Makes inferences a hundred at a time."""

    @property
    def versions(self) -> Versions:
        """What ran last."""
        ...

    @property
    def environment(self) -> Environment:
        """Where it ran; network and power are the sensors' to say."""
        ...

    def records(self, begin_s: float, temperature_c: float | None) -> Records:
        """At least a hundred inferences that begin at this second of the simulation, in order."""
        ...


class Drawn:
    """Inferences of a device class, drawn."""

    def __init__(
        self,
        device_class: DeviceClass,
        drift: Drift,
        versions: Versions,
        *,
        classes: int,
        rng: np.random.Generator,
    ) -> None:
        """Of a model that knows so many classes; the same for the same generator state."""
        self.versions, self.environment = versions, environment_of(device_class)
        self._class, self._drift, self._classes, self._rng = device_class, drift, classes, rng

    def records(self, begin_s: float, temperature_c: float | None) -> Records:
        """As `Source`."""
        rng, size = self._rng, INFERENCES_PER_WINDOW
        records = np.zeros(size, RECORD)
        records["latency_ms"] = self._class.latency_ms(rng, temperature_c, size)
        records["time_ns"] = ends_ns(begin_s, records["latency_ms"])
        records["kind"] = DONE
        records["confidence"] = self._drift.confidences(rng, size)
        records["label"] = self._drift.labels(rng, size, self._classes)
        records["input_mean"], records["input_std"] = self._drift.pixels(rng, size)
        return records


def ends_ns(begin_s: float, latency_ms: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """When inferences end that follow one another, at 15 a second at most."""
    ends_s = begin_s + np.cumsum(np.maximum(latency_ms / 1e3, 1 / _MOST_FPS))
    return np.asarray(np.rint(ends_s * 1e9), np.int64)


def environment_of(device_class: DeviceClass) -> Environment:
    """Of a class."""
    return Environment(
        device_model=device_class.name,
        os="simulated",
        network="unknown",
        charging=None,
        backend="CPU",
        driver="",
        tier=device_class.tier,
        variant="",
    )
