"""The monitor of one inference thread: records in, windows at the gateway, and never in the way.

with Monitor(folder, key, "https://gateway", versions=..., environment=..., sensors=...) as monitor:
    ...
    monitor.record(latency_ms, confidence, label, input_mean, input_std)
"""

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from fleet.device.credentials import DeviceKey
from fleet.device.monitor.client import GatewayClient
from fleet.device.monitor.clock import Clock
from fleet.device.monitor.delivery import Courier
from fleet.device.monitor.loss import LossCounter
from fleet.device.monitor.readings import LatestReading
from fleet.device.monitor.ring import ABNORMAL, ABSENT, DONE, FAILED, SKIPPED, Ring
from fleet.device.monitor.spool import Spool
from fleet.device.monitor.upload_log import UploadLog
from fleet.device.monitor.upload_policy import DEFAULT_UPLOAD, UploadPolicy
from fleet.device.monitor.uploader import Uploader
from fleet.device.monitor.window import WindowBuilder
from fleet.device.monitor.worker import Boundary, Worker
from fleet.device.release import AnomalyLimits, UploadRule
from fleet.device.sensors import Sensors
from fleet.device.wire import Environment, Versions

_STOP_S = 10.0


class Monitor:
    """Records inferences of one thread; a context manager that ends with everything recorded on the disk.

    Raises:
        UserError: another monitor uses the folder, or the gateway's address is none.
        ValueError: an upload rule that cannot be followed.
    """

    def __init__(
        self,
        folder: Path,
        key: DeviceKey,
        gateway_url: str | None,
        *,
        versions: Versions,
        environment: Environment,
        sensors: Sensors,
        upload: Sequence[UploadRule] = DEFAULT_UPLOAD,
        anomalies: AnomalyLimits | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Start both threads.

        Args:
            folder: Of this monitor alone. When it cannot be written, windows wait in memory.
            key: Signs what is sent.
            gateway_url: https, or http on this machine; None: windows stay in the folder.
            versions: What runs, until `set_versions`.
            environment: Where it runs; network and charging come from the sensors.
            sensors: Read at most once a second, by the monitor's threads.
            upload: When windows are sent, until `set_policy`.
            anomalies: What is anomalous, until `set_policy`.
            clock: Of this system, unless a test has another.
        """
        clock = clock or Clock()
        self._policy = UploadPolicy(upload)
        client = GatewayClient(gateway_url) if gateway_url is not None else None
        self._ring, loss, readings = Ring(), LossCounter(), LatestReading(sensors)
        self._spool = Spool(folder, loss, wall_ms=lambda: clock.now().wall_ms)
        self._uploader = self._new_uploader(client, key, readings, clock) if client is not None else None
        self._builder = WindowBuilder(
            boot=secrets.token_hex(8),
            versions=versions,
            environment=environment,
            limits=anomalies or AnomalyLimits(),
            loss=loss,
            now=clock.now(),
        )
        self._worker = Worker(
            self._ring,
            self._builder,
            self._spool,
            loss=loss,
            readings=readings,
            clock=clock,
            on_anomaly=self._wake_uploader,
        )
        self._stopped = False
        self._worker.start()
        if self._uploader is not None:
            self._uploader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def record(  # noqa: PLR0917 - keywords cost time, and this runs on the inference thread
        self,
        latency_ms: float,
        confidence: float = ABSENT,
        label: int = -1,
        input_mean: float = ABSENT,
        input_std: float = ABSENT,
        abnormal: bool = False,
    ) -> None:
        """One inference that answered; from the inference thread only, right after it.

        Args:
            latency_ms: Of the inference.
            confidence: Largest softmax probability.
            label: Index of the predicted class.
            input_mean: Of the image's pixels, 0 to 255.
            input_std: The same.
            abnormal: The output is not finite, or of another shape than the release says.
        """
        kind = ABNORMAL if abnormal else DONE
        self._ring.write(kind, latency_ms, confidence, label, input_mean, input_std)

    def record_failure(self) -> None:
        """An inference that raised; from the inference thread only."""
        self._ring.write(FAILED, ABSENT, ABSENT, -1, ABSENT, ABSENT)

    def record_skipped(self) -> None:
        """A frame that the last result or a tracker answered; from the inference thread only."""
        self._ring.write(SKIPPED, ABSENT, ABSENT, -1, ABSENT, ABSENT)

    def flush(self, timeout_s: float = _STOP_S) -> bool:
        """Close the open window and wait until all that was recorded is on the disk.

        Returns:
            Whether it is; if not, the disk takes nothing, or the time was too short.
        """
        return self._reach(Boundary(self._ring.head), timeout_s) and not self._spool.in_memory

    def set_versions(self, versions: Versions, environment: Environment) -> None:
        """Another release from the next record on: the open window is closed, and none spans the change.

        From the inference thread, or while it does not record.
        """
        self._worker.add(Boundary(self._ring.head, versions, environment))

    def set_policy(self, upload: Sequence[UploadRule], anomalies: AnomalyLimits) -> None:
        """Other rules for uploading from now on, and other anomalies from this window on; from any thread.

        Raises:
            ValueError: a rule that cannot be followed; then both stay as they were.
        """
        self._policy.set_rules(upload)
        self._builder.set_limits(anomalies)
        self._wake_uploader()

    def stop(self, timeout_s: float = _STOP_S) -> None:
        """Write all that was recorded and end the threads; what is not sent yet the next process sends.

        Safe to call twice. When the disk hangs it is given up after `timeout_s`: the threads are daemons.
        """
        if self._stopped:
            return
        self._stopped = True
        deadline = time.monotonic() + timeout_s
        self._worker.add(Boundary(self._ring.head, last=True))
        self._worker.stop()
        if self._uploader is not None:
            self._uploader.stop(timeout_s)
        self._worker.join(max(0.0, deadline - time.monotonic()))
        if not self._worker.is_alive():
            self._spool.close()

    def _reach(self, boundary: Boundary, timeout_s: float) -> bool:
        self._worker.add(boundary)
        deadline = time.monotonic() + timeout_s
        while self._worker.is_alive() and time.monotonic() < deadline:
            if boundary.reached.wait(0.1):
                return True
        return boundary.reached.is_set()

    def _wake_uploader(self) -> None:
        if self._uploader is not None:
            self._uploader.wake()

    def _new_uploader(
        self, client: GatewayClient, key: DeviceKey, readings: LatestReading, clock: Clock
    ) -> Uploader:
        def courier(wait: Callable[[float], bool]) -> Courier:
            log = UploadLog(self._spool.folder / "uploads.jsonl")
            return Courier(client, key, log, wall_ms=lambda: clock.now().wall_ms, wait=wait)

        return Uploader(self._spool, self._policy, client, courier, device=key.device, reading=readings.get)
