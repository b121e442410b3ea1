"""Takes windows from the spool to the gateway, in a thread of its own, when the policy says so."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from fleet.device.monitor.client import GatewayClient
from fleet.device.monitor.delivery import Courier
from fleet.device.monitor.spool import Spool
from fleet.device.monitor.upload_policy import UploadPolicy, is_in_share
from fleet.device.sensors import Reading

WINDOWS_PER_REQUEST = 45
"""Five minutes at 15 inferences per second."""
MOST_REFUSALS = 32
"""Of requests, in one turn."""
_POLL_S = 5.0


@dataclass(frozen=True, slots=True)
class Sent:
    """What a turn came to."""

    through: bool
    """Whether everything that is worth sending again later was taken."""
    retry_after_s: float = 0.0


class Waiting(Protocol):
    """What `send` needs of a spool."""

    def in_flight(self, numbers: Iterable[int]) -> AbstractContextManager[list[int]]:
        """Keep these for the block; those that can be kept."""
        ...

    def read(self, number: int) -> bytes | None:
        """An encoded window; None when it is gone."""
        ...

    def remove(self, numbers: Iterable[int]) -> None:
        """They were taken."""
        ...

    def put_aside(self, number: int, why: str) -> None:
        """It will not be taken."""
        ...


def send(numbers: Sequence[int], spool: Waiting, courier: Courier) -> Sent:
    """Send windows in batches; those that were taken leave the spool.

    A batch that the gateway refuses is halved until the window is found that it refuses alone. That one is
    put aside if the gateway took any other: a wrong address that refuses everything loses nothing.
    """
    batches = [numbers[at : at + WINDOWS_PER_REQUEST] for at in range(0, len(numbers), WINDOWS_PER_REQUEST)]
    batches.reverse()
    refused: list[int] = []
    refusals, any_taken, sent = 0, False, Sent(through=True)
    while batches:
        batch = batches.pop()
        with spool.in_flight(batch) as kept:
            contents = {number: content for number in kept if (content := spool.read(number)) is not None}
            if not contents:
                continue
            delivered = courier.deliver(list(contents.values()))
            if delivered.fate == "taken":
                any_taken = True
                spool.remove(contents)
        if delivered.fate == "refused":
            refusals += 1
            if len(contents) == 1:
                refused += contents
            else:
                half = len(batch) // 2
                batches += [batch[half:], batch[:half]]
        if delivered.fate == "failed" or refusals == MOST_REFUSALS:
            sent = Sent(through=False, retry_after_s=delivered.retry_after_s)
            break
    if refused and not any_taken:
        return Sent(through=False)
    for number in refused:
        spool.put_aside(number, "refused")
    return sent


class Uploader(threading.Thread):
    """The thread."""

    def __init__(
        self,
        spool: Spool,
        policy: UploadPolicy,
        client: GatewayClient,
        make_courier: Callable[[Callable[[float], bool]], Courier],
        *,
        device: str,
        reading: Callable[[], Reading],
    ) -> None:
        """Nothing is sent before `start`; `make_courier` gets what its waits are cut short by."""
        super().__init__(name="edgeloop-upload", daemon=True)
        self._spool, self._policy, self._client = spool, policy, client
        self._device, self._reading = device, reading
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._courier = make_courier(self._stopping.wait)

    def wake(self) -> None:
        """Look at the policy now: an anomaly was spooled, or the policy is another."""
        self._wake.set()

    def stop(self, timeout_s: float) -> None:
        """End the request under way and the thread; what was not acknowledged stays in the spool."""
        self._stopping.set()
        self._wake.set()
        deadline = time.monotonic() + timeout_s
        while self.is_alive() and time.monotonic() < deadline:
            self._client.abort()  # again: it may just have connected
            self.join(0.05)

    def run(self) -> None:
        """Until `stop`."""
        while not self._stopping.is_set():
            self._turn()
            self._wake.wait(_POLL_S)
            self._wake.clear()
        self._client.close()

    def _turn(self) -> None:
        waiting = self._spool.waiting()
        if not waiting:
            return
        turn = self._policy.turn(time.monotonic(), self._reading(), anomalies=any(waiting.values()))
        if turn is None:
            return
        numbers = [
            number
            for number, anomalous in waiting.items()
            if anomalous or is_in_share(self._device, number, turn.share)
        ]
        if not numbers:
            return
        sent = send(numbers, self._spool, self._courier)
        if sent.through:
            self._policy.done(time.monotonic(), turn)
        elif not self._stopping.is_set():
            self._policy.failed(time.monotonic(), turn, retry_after_s=sent.retry_after_s)
