"""A simulated device whose inferences are real: the runtime with a real release, on real images.

    source = RuntimeSource(images, device_class)
    with Runtime(folder, info, source, root=root) as runtime:
        source.runtime = runtime
        runtime.update(url)
        device = SimulatedDevice(character, key, temperatures, seed=0, start_ms=..., source=source)

Latencies are those of this machine, under whatever load it has; classes and confidences are the model's. Only
time, sensors and network are simulated. Update between steps: a hundred inferences count for the release
that answers the last of them.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from fleet.device.agent import statistics
from fleet.device.errors import EngineError, UserError
from fleet.device.monitor.ring import ABNORMAL, ABSENT, DONE, FAILED, RECORD, Records
from fleet.device.runtime import AbnormalOutputError, Runtime
from fleet.device.runtime.loaded import Answer, HowToRun
from fleet.device.runtime.runtime import NO_MONITOR
from fleet.device.wire import INFERENCES_PER_WINDOW, Environment, Versions
from fleet.simulator.device_classes import DeviceClass
from fleet.simulator.sources import ends_ns, environment_of

_APP = "simulator"
_Row = tuple[float, float, int, int, float, float]
"""latency_ms, confidence, label, kind, input_mean, input_std."""


class RuntimeSource:
    """Both the runtime's monitor hook and the source of a simulated device; of one runtime and one thread."""

    runtime: Runtime
    """Set before the device measures."""

    def __init__(
        self, images: npt.NDArray[np.uint8], device_class: DeviceClass, *, version: str = NO_MONITOR
    ) -> None:
        """Infer on these images, one after the other, over and over.

        Args:
            images: [N, H, W, 3] RGB, from the source or through `fleet/simulator/drift.py`.
            device_class: Its name; nothing else of it counts.
            version: Of the monitor that the release is bound to.

        Raises:
            UserError: no images.
        """
        if images.dtype != np.uint8 or images.ndim != 4 or not len(images):
            raise UserError(
                f"images {images.dtype} {images.shape}",
                allowed="uint8 [N, H, W, 3] of at least one image",
                next_step="give the images of a data set",
            )
        self.version = version
        self._images, self._class, self._next = images, device_class, 0
        self._rows: list[_Row] = []

    @property
    def versions(self) -> Versions:
        """Of the release that runs; that of the app before there is one."""
        running = self.runtime.status().running
        if running is None:
            return Versions(release=0, model="", engine="", config="", monitor=self.version, app=_APP)
        release = running.release
        return Versions(
            release=release.counter,
            model=release.model_version,
            engine=release.engine_version,
            config=release.config_version,
            monitor=release.monitor_version,
            app=_APP,
        )

    @property
    def environment(self) -> Environment:
        """With the tier, variant and backend that run."""
        status = self.runtime.status()
        running = status.running
        return replace(
            environment_of(self._class),
            backend=running.config.backend if running else "",
            tier=status.tier,
            variant=running.plan.variant if running else "",
        )

    def answered(self, image_HWC: npt.NDArray[np.uint8], answer: Answer, latency_ms: float) -> None:
        """The runtime answered."""
        self._rows.append((latency_ms, answer.confidence, answer.index, DONE, *statistics(image_HWC)))

    def failed(self, error: EngineError, latency_ms: float, how: HowToRun) -> None:  # noqa: ARG002 - the hook's
        """An inference failed; the runtime may have another release to ask."""
        if isinstance(error, AbnormalOutputError):
            self._rows.append((latency_ms, ABSENT, -1, ABNORMAL, ABSENT, ABSENT))
        else:
            self._rows.append((ABSENT, ABSENT, -1, FAILED, ABSENT, ABSENT))

    def records(self, begin_s: float, temperature_c: float | None) -> Records:  # noqa: ARG002 - real latencies
        """A hundred inferences, or one more where a release failed and the one before it answered."""
        self._rows = []
        while len(self._rows) < INFERENCES_PER_WINDOW:
            image = self._images[self._next % len(self._images)]
            self._next += 1
            try:
                self.runtime.predict(image)
            except EngineError:  # the hook was told
                continue
        records = np.zeros(len(self._rows), RECORD)
        columns = ("latency_ms", "confidence", "label", "kind", "input_mean", "input_std")
        for name, values in zip(columns, zip(*self._rows, strict=True), strict=True):
            records[name] = values
        records["time_ns"] = ends_ns(begin_s, records["latency_ms"])
        return records
