"""Runtime and monitor of one model put together: what an app embeds when it wants both.

with DeviceAgent(folder, device, key, "https://gateway", root=root, sensors=LinuxSensors(), app="1") as agent:
    agent.update()
    answer = agent.predict(image)
"""

import platform
import threading
from collections.abc import Callable
from dataclasses import replace
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
from fleet.device.runtime.tiers import tier_of
from fleet.device.sensors import Sensors
from fleet.device.wire import Environment, Versions

_SIDE = 64
"""Input statistics are of about so many rows and columns: a whole frame would cost more than a model."""


class Observer:
    """Tells a monitor of a runtime's requests. Requests of several threads come one after the other."""

    version = MONITOR_VERSION

    def __init__(
        self,
        monitor: Monitor,
        running: Callable[[], HowToRun | None],
        describe: Callable[[HowToRun, str], tuple[Versions, Environment]],
    ) -> None:
        """Windows begin anew where an answer is of another release, tier, variant or backend than the last.

        Args:
            monitor: Records.
            running: What runs now.
            describe: It, on this backend, in the words of a window.
        """
        self._monitor, self._running, self._describe = monitor, running, describe
        self._told: object = None
        self._lock = threading.Lock()

    def answered(self, image_HWC: npt.NDArray[np.uint8], answer: Answer, latency_ms: float) -> None:
        """Record an answer; of a release that was just replaced it counts with the one that replaced it."""
        mean, std = statistics(image_HWC)
        with self._lock:
            how = self._running()
            if how is not None and how.release.counter == answer.release:
                self._tell(how, answer.backend)
            self._monitor.record(latency_ms, answer.confidence, answer.index, mean, std)

    def failed(self, error: EngineError, latency_ms: float, how: HowToRun) -> None:
        """Record an inference that raised, or whose output is none, with the release that failed."""
        with self._lock:
            self._tell(how, how.config.backend)
            if isinstance(error, AbnormalOutputError):
                self._monitor.record(latency_ms, abnormal=True)
            else:
                self._monitor.record_failure()

    def _tell(self, how: HowToRun, backend: str) -> None:
        now = (how.release.counter, how.entry.tier, how.plan.variant, backend)
        if now != self._told:
            self._monitor.set_versions(*self._describe(how, backend))
            self._told = now


class DeviceAgent:
    """One model on a device, watched; thread-safe, a context manager.

    Of a policy it obeys tiers, deny list, rollout, upload and anomalies. What is about frames and the cloud
    (`policy.frames`, `policy.cloud_fallback`) the app passes on to `fleet/device/degrade` and `privacy`.

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
            observer = Observer(self._monitor, self._running, self._describe)
            self._runtime = Runtime(folder / "runtime", device, observer, root=root)
            self._obey_policy()
        except BaseException:  # nobody else could stop its threads
            self._monitor.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Answer what runs, write what was recorded, end. What is not sent yet the next start sends."""
        try:
            self._runtime.close()
        finally:
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

    def _running(self) -> HowToRun | None:
        return self._runtime.running

    def _describe(self, how: HowToRun, backend: str) -> tuple[Versions, Environment]:
        versions, environment = self._nothing_yet()
        release = how.release
        return replace(
            versions,
            release=release.counter,
            model=release.model_version,
            config=release.config_version,
        ), replace(environment, backend=backend, tier=how.entry.tier, variant=how.plan.variant)

    def _nothing_yet(self) -> tuple[Versions, Environment]:
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
            tier=tier_of(self._device, None),
            variant="",
        )
        return versions, environment


def statistics(image_HWC: npt.NDArray[np.uint8]) -> tuple[float, float]:
    """Mean and standard deviation of an image's pixels, 0 to 255, over every so-manieth row and column."""
    step = max(1, min(image_HWC.shape[:2]) // _SIDE)
    mean, std = cv2.meanStdDev(image_HWC[::step, ::step].reshape(-1, 1))
    return float(mean[0, 0]), float(std[0, 0])
