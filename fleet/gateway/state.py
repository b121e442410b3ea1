"""What the endpoints of one gateway share, and what it does by itself."""

import asyncio
import contextlib
import os
import shutil
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from starlette.requests import Request

from fleet.device.credentials import MOST_SKEW_MS
from fleet.device.wall import now_ms
from fleet.gateway import devices, page
from fleet.gateway.buckets import Buckets
from fleet.gateway.classify import Classifier, CloudModel
from fleet.gateway.devices import Device
from fleet.gateway.limits import Limits
from fleet.gateway.metrics import Metrics
from fleet.gateway.queries import Fleet
from fleet.gateway.refusal import Refusal, unavailable
from fleet.gateway.repository import Repository
from fleet.gateway.requests import Authenticator, body_of, signature_of
from fleet.gateway.samples import Samples
from fleet.gateway.store import Store

_TIDY_S = 1.0
_PAGE_S = 10.0
_CODE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a gateway is started with."""

    folder: Path
    """Its state; mode 0700."""
    repository: Path | None = None
    """The TUF repository that it serves."""
    limits: Limits = field(default_factory=Limits)
    classifier: Classifier | None = None
    """The cloud's model for hard samples."""
    compact_every_s: float = 60.0
    """0: never, somebody else does it."""
    open_pages: bool = False
    """Whether others than this machine see the fleet page and the metrics."""


class Gateway:
    """What the endpoints share."""

    def __init__(self, settings: Settings) -> None:
        """Inside the event loop that serves."""
        limits = settings.limits
        self.settings, self.limits, self.metrics = settings, limits, Metrics()
        self.store = Store(settings.folder, group=limits.group, waiting=limits.waiting)
        self.authenticator = Authenticator(self.store, limits)
        self.repository = Repository(settings.repository)
        self.enrolments = Buckets(per_s=limits.enrolments_per_s, burst=limits.enrolments_burst)
        self.classifications = Buckets(per_s=limits.classify_per_s, burst=limits.classify_burst)
        self.samples = Samples(settings.folder, self.store, most_bytes=limits.samples_bytes)
        self.cloud = CloudModel(settings.classifier, waiting=limits.classify_waiting)
        self.fleet = Fleet(settings.folder)
        self.free_bytes = _free(settings.folder)
        self._page, self._page_s = "", -_PAGE_S
        self._page_lock = asyncio.Lock()

    async def page(self) -> str:
        """The fleet page, at most a few seconds old: many readers cost as much as one."""
        async with self._page_lock:
            if time.monotonic() - self._page_s >= _PAGE_S:
                policy = await asyncio.to_thread(self.repository.read, "policy.json")
                self._page = await asyncio.to_thread(page.render, self.fleet, policy=policy, now_ms=now_ms())
                self._page_s = time.monotonic()
            return self._page

    async def compact(self) -> None:
        """Let a process of its own bring committed batches into Parquet, again and again."""
        while self.settings.compact_every_s > 0:
            await asyncio.sleep(self.settings.compact_every_s)
            child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "fleet.gateway.compact",
                str(self.settings.folder),
                stdout=asyncio.subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": str(_CODE)},
            )
            try:
                code = await child.wait()
            except asyncio.CancelledError:
                with contextlib.suppress(ProcessLookupError):
                    child.terminate()
                raise
            self.metrics.compactions.labels("done" if code == 0 else "failed").inc()

    async def close(self, running: list["asyncio.Task[None]"]) -> None:
        """End what runs, commit what waits."""
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self.cloud.close()
        await self.store.close()

    async def signed(self, request: Request, *, most: int) -> tuple[Device, int, str, bytes]:
        """The device behind a request, the time and the nonce that it signed, and the body as sent.

        Raises:
            Refusal: it is not served.
        """
        device, described = self.authenticator.announced(request)
        body = await body_of(request, most=most, within_s=self.limits.body_s)
        self.authenticator.verify(device, described, body, signature_of(request))
        return device, described.time_ms, described.nonce, body

    def require_room(self) -> None:
        """Refuse with 503 while the disk is nearly full."""
        if self.free_bytes < self.limits.free_bytes:
            raise unavailable("disk", f"{self.free_bytes >> 20} MiB free on the gateway's disk")

    async def tidy(self) -> None:
        """Once a second: what is measured by looking, and nonces that are too old to matter."""
        while True:
            await asyncio.sleep(_TIDY_S)
            self.free_bytes = _free(self.settings.folder)
            before_ms = now_ms() - 2 * MOST_SKEW_MS
            if devices.has_nonces(self.store.read, before_ms=before_ms):
                with contextlib.suppress(Refusal):  # a full disk: the next second tries again
                    await self.store.run(partial(devices.forget_nonces, before_ms=before_ms))


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free
