"""A fleet of simulated devices in one process, against a real gateway."""

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing

import numpy as np

from fleet.device.credentials import DeviceKey
from fleet.device.monitor.client import GatewayClient
from fleet.simulator.device import Character, SimulatedDevice
from fleet.simulator.device_classes import pick
from fleet.simulator.enrolment import Enrolment
from fleet.simulator.plan import Plan, parts_of
from fleet.simulator.tally import Tally

STEP_S = 300.0
"""Of the simulation: devices look at their policy so often. Anomalies wait as long at most."""
_LONGEST_WAIT_S = 1.0
"""Real time that one device may keep its thread from others: a longer wait is the device's next turn."""


def fresh_key(number: int) -> DeviceKey:  # noqa: ARG001 - a test numbers them
    """A key that no run before had."""
    return DeviceKey(secrets.token_bytes(32))


class Fleet:
    """The devices."""

    def __init__(self, plan: Plan, *, keys: Callable[[int], DeviceKey] = fresh_key) -> None:
        """Make them; `keys` gives each its key: which windows are in a share depends on it.

        Raises:
            UserError: a plan that cannot be followed.
        """
        plan.check()
        self.plan = plan
        rng = np.random.default_rng(plan.seed)
        classes = pick(plan.classes, rng, plan.count)
        faults, drifts = parts_of(plan, rng)
        self.devices: list[SimulatedDevice] = []
        thief_of: DeviceKey | None = None
        for number, (device_class, fault, drift) in enumerate(zip(classes, faults, drifts, strict=True)):
            key = thief_of or keys(number)
            thief_of = key if fault == "stolen_key" and thief_of is None else None
            character = Character(
                number=number,
                device_class=device_class,
                versions=plan.versions[number % len(plan.versions)],
                fault=fault,
                drift=drift,
                windows_per_h=plan.windows_per_h,
                spool_windows=plan.spool_windows,
            )
            self.devices.append(
                SimulatedDevice(character, key, plan.temperatures, seed=plan.seed, start_ms=plan.start_ms)
            )
        self._stop = threading.Event()
        self._hours_done: list[float] = []

    @property
    def identities(self) -> int:
        """How many keys there are: each needs a token."""
        return len({device.key.device for device in self.devices})

    def run(
        self, url: str, token: Callable[[], str], *, on_progress: Callable[[str], None] | None = None
    ) -> None:
        """Enrol all and simulate; the tallies say what came of it.

        Args:
            url: Of the gateway.
            token: A one-time token, each time another; called from one thread at a time.
            on_progress: Called once a second with a line.

        Raises:
            UserError: no gateway there, or it does not take a token.
        """
        shares = [self.devices[at :: self.plan.threads] for at in range(self.plan.threads)]
        shares = [share for share in shares if share]
        enrolment = Enrolment(url, token, self._stop)
        self._hours_done = [0.0] * len(shares)
        with ThreadPoolExecutor(len(shares), "edgeloop-simulator") as pool:
            try:
                unique = self._unique()
                parts = [unique[at :: len(shares)] for at in range(len(shares))]
                self._all(
                    [pool.submit(enrolment.enrol, part) for part in parts if part],
                    on_progress,
                    lambda: f"enrolling: {enrolment.done} of {len(unique)}",
                )
                begun_s = time.monotonic()
                self._all(
                    [pool.submit(self._simulate, url, at, share, begun_s) for at, share in enumerate(shares)],
                    on_progress,
                    self._progress,
                )
            except BaseException:
                self._stop.set()  # else leaving the pool waits for the whole simulation
                raise

    def tally(self) -> Tally:
        """Of all devices; not while they run."""
        return Tally.of(device.tally for device in self.devices)

    def tallies(self) -> dict[str, Tally]:
        """By fault, `sound` for those without; not while they run."""
        names = sorted({device.character.fault or "sound" for device in self.devices})
        return {
            name: Tally.of(d.tally for d in self.devices if (d.character.fault or "sound") == name)
            for name in names
        }

    def _unique(self) -> list[SimulatedDevice]:
        return list({device.key.device: device for device in reversed(self.devices)}.values())

    def _all(
        self,
        futures: list[Future[None]],
        on_progress: Callable[[str], None] | None,
        progress: Callable[[], str],
    ) -> None:
        left = set(futures)
        while left:
            done, left = wait(left, timeout=1.0, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if on_progress is not None:
                on_progress(progress())

    def _progress(self) -> str:
        # Whole counters cannot be added up while threads put words into them.
        made, accepted, failed = (
            sum(counts)
            for counts in zip(
                *((d.tally.made, d.tally.accepted, d.tally.failed.total()) for d in self.devices), strict=True
            )
        )
        return (
            f"simulating: {min(self._hours_done):.1f} of {self.plan.hours:g} h, {made} windows made, "
            f"{accepted} accepted, {failed} requests failed"
        )

    def _simulate(self, url: str, at: int, devices: list[SimulatedDevice], begun_s: float) -> None:
        end_s = self.plan.hours * 3600
        now_s = 0.0
        with closing(GatewayClient(url)) as client:
            while now_s < end_s and not self._stop.is_set():
                now_s = min(now_s + STEP_S, end_s)
                for device in devices:
                    if self._stop.is_set():
                        return
                    device.step(now_s, client, self._wait)
                self._hours_done[at] = now_s / 3600
                self._stop.wait(max(0.0, begun_s + now_s / self.plan.speed - time.monotonic()))

    def _wait(self, seconds: float) -> bool:
        return seconds > _LONGEST_WAIT_S or self._stop.wait(seconds)
