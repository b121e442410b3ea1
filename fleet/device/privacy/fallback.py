"""Hard inputs may go to the cloud's model, with consent and in time; otherwise the device's answer stands.

pending = cloud.ask(image, context)        # inference thread: at once, whatever the network does
...
found = pending.answer() if pending else None
label = found.label if found else local_label
"""

import json
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from fleet.device.credentials import DeviceKey
from fleet.device.errors import EngineError
from fleet.device.monitor.client import GatewayClient
from fleet.device.privacy.body import Context, hard_reason, png, sample_body
from fleet.device.privacy.consent import Consent
from fleet.device.privacy.signed import SignedClient
from fleet.device.wire import Classified

PATH = "/v1/classify"
DEADLINE_S = 1.0
_QUEUE = 2
_FAILURES_BEFORE_REST = 3
FIRST_REST_S, LONGEST_REST_S = 30.0, 600.0


class Pending:
    """A question that is on its way, or was not worth it."""

    def __init__(self, deadline_s: float, clock: Callable[[], float]) -> None:
        self._clock, self._until_s = clock, clock() + deadline_s
        self._done = threading.Event()
        self._found: Classified | None = None

    @property
    def left_s(self) -> float:
        """Until the deadline; 0 after it."""
        return max(0.0, self._until_s - self._clock())

    def answer(self) -> Classified | None:
        """The cloud's answer if it has come; never waits."""
        return self._found

    def wait(self) -> Classified | None:
        """The cloud's answer, or None at the deadline. Not for the inference thread."""
        self._done.wait(self.left_s)
        return self._found

    def settle(self, found: Classified | None) -> None:
        """What came of it; an answer after the deadline is none."""
        if self.left_s > 0:
            self._found = found
        self._done.set()


class CloudFallback:
    """Asks the gateway in a thread of its own, one question after the other."""

    def __init__(
        self,
        url: str,
        key: DeviceKey,
        consent: Consent,
        *,
        labels: Sequence[str],
        confidence_minimum: float,
        deadline_s: float = DEADLINE_S,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is sent before `ask`.

        Args:
            url: Of the gateway: https, or http to this machine.
            key: Signs.
            consent: The user's; without it nothing is sent.
            labels: Of the release; an answer that is none of them is none.
            confidence_minimum: Below it an answer is doubtful (the release says it).
            deadline_s: From `ask` to the answer.
            wall: Seconds since 1970.
            clock: Monotonic seconds.

        Raises:
            UserError: the URL is neither.
        """
        self._client = GatewayClient(url, silence_s=deadline_s, answer_s=deadline_s)
        self._signed = SignedClient(self._client, key, wall)
        self._consent, self._labels = consent, tuple(labels)
        self._confidence_minimum, self._deadline_s = confidence_minimum, deadline_s
        self._clock = clock
        self._asked: queue.Queue[tuple[npt.NDArray[np.uint8], Context, str, Pending] | None]
        self._asked = queue.Queue(_QUEUE)
        self._thread: threading.Thread | None = None
        self._failures, self._rests_until_s = 0, float("-inf")
        self.enabled = False
        """The policy's `cloud_fallback`."""
        self.counts: Counter[str] = Counter()

    def ask(self, image_HWC: npt.NDArray[np.uint8], context: Context) -> Pending | None:
        """Ask about a hard input (uint8 RGB [H, W, 3]); None where the device's answer stands already.

        Never waits, and touches neither disk nor network.
        """
        reason = hard_reason(context, self._confidence_minimum)
        if not (self.enabled and reason) or self._clock() < self._rests_until_s or self._asked.full():
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="edgeloop-cloud", daemon=True)
            self._thread.start()
        pending = Pending(self._deadline_s, self._clock)
        try:
            self._asked.put_nowait((image_HWC.copy(), context, reason, pending))
        except queue.Full:
            return None
        return pending

    def revoked(self) -> None:
        """Consent has ended: what is on its way is cut off."""
        self._client.abort()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread; questions on their way are given up."""
        if self._thread is None:
            return
        while not self._asked.empty():
            question = self._asked.get_nowait()
            if question is not None:
                question[3].settle(None)
        self._asked.put(None)
        until_s = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < until_s:
            self._client.abort()
            self._thread.join(0.05)
        self._thread = None

    def _work(self) -> None:
        while (question := self._asked.get()) is not None:
            image, context, reason, pending = question
            found = None
            if pending.left_s > 0 and self._consent.holds():
                found = self._found(image, context, reason)
            # Whoever revoked while it was on its way gets nothing out of it either.
            pending.settle(found if found is not None and self._consent.holds() else None)
        self._client.close()

    def _found(self, image: npt.NDArray[np.uint8], context: Context, reason: str) -> Classified | None:
        try:
            body = sample_body(png(image), context, reason)
        except EngineError:
            self.counts["no image"] += 1
            return None
        answer = self._signed.post(PATH, body, self._consent.holds)
        if answer is None:
            self._failed("no answer")
            return None
        found = _classified(answer.body, self._labels) if answer.status == 200 else None
        if found is None:
            self._failed("no such class" if answer.status == 200 else f"status {answer.status}")
            return None
        self._failures = 0
        self.counts["answered"] += 1
        return found

    def _failed(self, why: str) -> None:
        """Count, and after some failures in a row leave the network alone for a while."""
        self.counts[why] += 1
        self._failures += 1
        if self._failures >= _FAILURES_BEFORE_REST:
            doubled = 2 ** min(self._failures - _FAILURES_BEFORE_REST, 20)
            self._rests_until_s = self._clock() + min(LONGEST_REST_S, FIRST_REST_S * doubled)


def _classified(body: bytes, labels: tuple[str, ...]) -> Classified | None:
    """The gateway's answer; None when it is none, or of another set of classes than this release's."""
    try:
        record = json.loads(body)
        index, label, model = record["index"], record["label"], record["model"]
        confidence, server_ms = float(record["confidence"]), int(record["server_ms"])
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None
    right = type(index) is int and 0 <= index < len(labels) and labels[index] == label
    if not right or not isinstance(model, str) or not (math.isfinite(confidence) and 0 <= confidence <= 1):
        return None
    return Classified(index=index, label=label, confidence=confidence, model=model, server_ms=server_ms)
