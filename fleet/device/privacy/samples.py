"""Hard samples: collected, sent and erased, as long as the user consents.

samples = Samples(consent, client, key, confidence_minimum=release.confidence_minimum)
samples.offer(image, context)              # inference thread: a copy into a short queue, or nothing
samples.run(stopping, network)             # a thread of its own, or `work` by hand
"""

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from fleet.device.credentials import DeviceKey
from fleet.device.errors import EngineError
from fleet.device.monitor.client import GatewayClient
from fleet.device.privacy.body import Context, hard_reason, png, sample_body
from fleet.device.privacy.consent import Consent, purge
from fleet.device.privacy.signed import SignedClient
from fleet.device.privacy.spool import SampleLimits, SampleSpool
from fleet.device.wire import Network

PATH = "/v1/samples"
ON_NETWORKS: frozenset[Network] = frozenset({"wifi", "ethernet"})
"""Raw inputs are large: they wait for these. A request to delete takes any."""
EVERY_S = 5.0
FIRST_REST_S, LONGEST_REST_S = 30.0, 3600.0
"""After a failure, doubled with each further one."""
_USELESS = frozenset({400, 413, 415, 422})
"""Statuses that say that this body will never be taken."""
_QUEUE = 4


class Samples:
    """Everything about one device's samples; `offer` from the inference thread, the rest from one other."""

    def __init__(
        self,
        consent: Consent,
        client: GatewayClient,
        key: DeviceKey,
        *,
        confidence_minimum: float,
        limits: SampleLimits | None = None,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Finish what a killed process left of a revocation.

        Args:
            consent: The user's.
            client: To the gateway, of this object alone: over TLS, or to this machine.
            key: Signs.
            confidence_minimum: Below it an answer is doubtful (the release says it).
            limits: How much is collected.
            wall: Seconds since 1970.
            clock: Monotonic seconds.
        """
        self._consent, self._client = consent, client
        self._signed = SignedClient(client, key, wall)
        self._confidence_minimum, self._clock = confidence_minimum, clock
        self._spool = SampleSpool(consent, limits or SampleLimits())
        self._offered: queue.Queue[tuple[npt.NDArray[np.uint8], Context, str]] = queue.Queue(_QUEUE)
        self._failures, self._rests_until_s = 0, float("-inf")
        self.counts: Counter[str] = Counter()
        """What became of samples: kept, sent, refused, and why others were not kept."""

    def offer(self, image_HWC: npt.NDArray[np.uint8], context: Context) -> bool:
        """Take a copy of a hard input (uint8 RGB [H, W, 3]); never waits, reads no file.

        Whether consent holds is asked by `work`, before anything is written.
        """
        reason = hard_reason(context, self._confidence_minimum)
        if not reason or self._offered.full():
            return False
        try:
            self._offered.put_nowait((image_HWC.copy(), context, reason))
        except queue.Full:
            return False
        return True

    def work(self, network: Network) -> None:
        """One turn: erase what is to be erased, keep what was offered, send what waits.

        Raises:
            OSError: the disk failed; the next turn begins anew.
        """
        try:
            self._turn(network)
        finally:
            self._client.close()  # by the next turn the gateway may be another process

    def _turn(self, network: Network) -> None:
        if not self._consent.holds():
            self._drop_offered()
            purge(self._consent.folder)
        rested = self._clock() >= self._rests_until_s
        if self._consent.erasure_is_due() and (not rested or network == "none" or not self._erase()):
            return  # nothing new is sent before what was revoked is gone
        self._keep_offered()
        if rested and network in ON_NETWORKS:
            self._send_waiting()

    def run(
        self, stopping: threading.Event, network: Callable[[], Network], every_s: float = EVERY_S
    ) -> None:
        """Work until told to stop; a full disk is counted, and tried again."""
        while not stopping.wait(every_s):
            try:
                self.work(network())
            except OSError:
                self.counts["disk"] += 1

    def revoke(self) -> None:
        """The user said no: what waits is gone, and what is on its way is cut off when this returns.

        Any thread may call it.

        Raises:
            UserError: as `Consent.revoke`.
        """
        try:
            self._consent.revoke(self._signed.now_ms())
        finally:
            self._client.abort()

    def _drop_offered(self) -> None:
        while not self._offered.empty():
            self._offered.get_nowait()

    def _keep_offered(self) -> None:
        while not self._offered.empty():
            image, context, reason = self._offered.get_nowait()
            try:
                image_png = png(image)
                body = sample_body(image_png, context, reason)
                why = self._spool.put(image_png, body, self._signed.now_ms())
            except EngineError:
                why = "no image"
            except OSError:
                why = "disk"
            self.counts[why or "kept"] += 1

    def _send_waiting(self) -> None:
        for path in self._spool.waiting():
            try:
                body = path.read_bytes()
            except FileNotFoundError:
                continue
            self._consent.sending()
            answer = self._signed.post(PATH, body, self._consent.holds)
            status = 0 if answer is None else answer.status
            if 200 <= status < 300 or status in _USELESS:
                path.unlink(missing_ok=True)
                self.counts["sent" if status < 300 else "refused"] += 1
            else:
                self._rest()
                return
        self._failures = 0

    def _erase(self) -> bool:
        """Ask the gateway to delete everything of this device; whether it did."""
        answer = self._signed.delete(PATH)
        if answer is None or not 200 <= answer.status < 300:
            self._rest()
            return False
        self._consent.erased()
        self._failures = 0
        self.counts["erased"] += 1
        return True

    def _rest(self) -> None:
        rest_s = min(LONGEST_REST_S, FIRST_REST_S * 2 ** min(self._failures, 20))
        self._failures += 1
        self._rests_until_s = self._clock() + rest_s
