"""Runtime and monitor of one model put together: what an app embeds when it wants both.

with DeviceAgent(folder, device, key, "https://gateway", root=root, sensors=LinuxSensors(), app="1") as agent:
    agent.update()
    answer = agent.predict(image)
"""

import platform
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import cv2
import numpy as np
import numpy.typing as npt

from fleet.device.credentials import DeviceKey
from fleet.device.errors import EngineError
from fleet.device.monitor import DEFAULT_UPLOAD, MONITOR_VERSION, Monitor
from fleet.device.runtime import AbnormalOutputError, Answer, DeviceInfo, Runtime, Update
from fleet.device.runtime.loaded import HowToRun
from fleet.device.sensors import Sensors
from fleet.device.wire import Environment, Versions

_SIDE = 64
"""Input statistics are of about so many rows and columns: a whole frame would cost more than a model."""

Now = tuple[Versions, Environment]


class Observer:
    """Tells a monitor of a runtime's requests. Requests of several threads come one after the other."""

    version = MONITOR_VERSION

    def __init__(self, monitor: Monitor, describe: Callable[[Answer], Now | None]) -> None:
        """Windows begin anew where `describe` has words for an answer of another release than the last."""
        self._monitor, self._describe = monitor, describe
        self._release, self._lock = 0, threading.Lock()

    def answered(self, image_HWC: npt.NDArray[np.uint8], answer: Answer, latency_ms: float) -> None:
        """Record an answer; of a release that was just replaced it counts with the one that replaced it."""
        mean, std = statistics(image_HWC)
        with self._lock:
            if answer.release != self._release and (now := self._describe(answer)) is not None:
                self._monitor.set_versions(*now)
                self._release = answer.release
            self._monitor.record(latency_ms, answer.confidence, answer.index, mean, std)

    def failed(self, error: EngineError, latency_ms: float) -> None:
        """Record an inference that raised, or whose output is none."""
        with self._lock:
            if isinstance(error, AbnormalOutputError):
                self._monitor.record(latency_ms, abnormal=True)
            else:
                self._monitor.record_failure()


class DeviceAgent:
    """One model on a device, watched; thread-safe, a context manager.

    Raises:
        UserError: another agent works in the folder, or an address is none.
        UpdateRefusedError: `root` is no root of trust.
    """

    def __init__(
        self,
        folder: Path,
        device: DeviceInfo,
        key: DeviceKey,
        gateway_url: str,
        *,
        root: bytes,
        sensors: Sensors,
        app: str,
    ) -> None:
        """Open the folder and start the monitor.

        Args:
            folder: Of this agent alone.
            device: `DeviceInfo.detect(key.device)`.
            key: Enrolled at the gateway.
            gateway_url: Windows go there, releases come from `repository/` below it.
            root: `root.json` that the app carries.
            sensors: What the device knows of itself.
            app: Version of the app.
        """
        self._device, self._app, self._url = device, app, gateway_url.rstrip("/")
        versions, environment = self._nothing_yet()
        self._monitor = Monitor(
            folder / "monitor",
            key,
            gateway_url,
            versions=versions,
            environment=environment,
            sensors=sensors,
        )
        try:
            observer = Observer(self._monitor, self._describe)
            self._runtime = Runtime(folder / "runtime", device, observer, root=root)
        except BaseException:
            self._monitor.stop()
            raise
        self._obey_policy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Answer what runs, write what was recorded, end. What is not sent yet the next start sends."""
        self._runtime.close()
        self._monitor.stop()

    @property
    def runtime(self) -> Runtime:
        """For its status."""
        return self._runtime

    def predict(self, image_HWC: npt.NDArray[np.uint8]) -> Answer:
        """As `Runtime.predict`, recorded."""
        return self._runtime.predict(image_HWC)

    def update(self) -> Update:
        """As `Runtime.update` from the gateway; a new policy holds for the monitor, too."""
        try:
            return self._runtime.update(f"{self._url}/repository/")
        finally:
            self._obey_policy()  # a refused release may have come with a good policy

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Whether all that was recorded is on the disk, the open window closed."""
        return self._monitor.flush(timeout_s)

    def _obey_policy(self) -> None:
        policy = self._runtime.policy
        if policy is not None:
            self._monitor.set_policy(policy.upload or DEFAULT_UPLOAD, policy.anomalies)

    def _describe(self, answer: Answer) -> Now | None:
        running = self._runtime.status().running
        if running is None or running.release.counter != answer.release:
            return None  # replaced since
        return self._versions(running), self._environment(running, answer)

    def _versions(self, running: HowToRun) -> Versions:
        return Versions(
            release=running.release.counter,
            model=running.release.model_version,
            engine=self._device.engine_version,
            config=running.release.config_version,
            monitor=MONITOR_VERSION,
            app=self._app,
        )

    def _environment(self, running: HowToRun, answer: Answer) -> Environment:
        _, empty = self._nothing_yet()
        return Environment(
            device_model=empty.device_model,
            os=empty.os,
            network=empty.network,
            charging=empty.charging,
            backend=answer.backend,
            driver="",
            tier=running.entry.tier,
            variant=answer.variant,
        )

    def _nothing_yet(self) -> Now:
        """Before the first answer; network and charging come from the sensors, window by window."""
        versions = Versions(
            release=0,
            model="",
            engine=self._device.engine_version,
            config="",
            monitor=MONITOR_VERSION,
            app=self._app,
        )
        environment = Environment(
            device_model=self._device.model,
            os=f"{platform.system()} {platform.release()}",
            network="unknown",
            charging=None,
            backend="",
            driver="",
            tier="",
            variant="",
        )
        return versions, environment


def statistics(image_HWC: npt.NDArray[np.uint8]) -> tuple[float, float]:
    """Mean and standard deviation of an image's pixels, 0 to 255, over every so-manieth row and column."""
    step = max(1, min(image_HWC.shape[:2]) // _SIDE)
    mean, std = cv2.meanStdDev(image_HWC[::step, ::step].reshape(-1, 1))
    return float(mean[0, 0]), float(std[0, 0])
