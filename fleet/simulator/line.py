"""A simulated device's line to the gateway: the real client, shared with others, and every answer counted."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fleet.device.credentials import TIME, DeviceKey
from fleet.device.monitor.client import Answer, GatewayClient, NoAnswerError
from fleet.device.monitor.upload_log import Request, UploadLog
from fleet.simulator.faults import Fault, Sent, altered
from fleet.simulator.tally import Tally

_CODE = re.compile(rb'"code": *"(\w{1,32})"')


@dataclass(frozen=True, kw_only=True)
class Sender:
    """Who sends."""

    key: DeviceKey
    fault: Fault | None
    rng: np.random.Generator
    """Of garbage alone: what a device measures does not depend on what it sends."""
    tally: Tally


class Line(GatewayClient):
    """Sends what a device's fault makes of its requests, over a client of this thread."""

    def __init__(self, client: GatewayClient, sender: Sender) -> None:
        """`client` is used and left open."""
        self.prefix, self._client, self._sender = client.prefix, client, sender

    def request(
        self, method: str, path: str, body: bytes | Iterable[bytes], headers: Mapping[str, str]
    ) -> Answer:
        """The answer that the device hears.

        Raises:
            NoAnswerError: as of the client.
        """
        whole, key, time_ms = (
            b"".join([body] if isinstance(body, bytes) else body),
            self._sender.key,
            headers[TIME],
        )
        heard: Answer | None = None

        def sign(other: bytes) -> dict[str, str]:
            return {**headers, **key.headers(method, path, other, time_ms=int(time_ms))}

        for sent in altered(self._sender.fault, Sent(body=whole, headers=headers), sign, self._sender.rng):
            try:
                answer = self._client.request(method, path, sent.body, sent.headers)
            except NoAnswerError:
                self._sender.tally.failed["network"] += 1
                raise
            self._count(answer)
            heard = answer if sent.heard else heard
        assert heard is not None
        return heard

    def _count(self, answer: Answer) -> None:
        tally = self._sender.tally
        tally.requests += 1
        if answer.status >= 500:
            tally.failed["5xx"] += 1
        elif answer.status >= 400:
            code = _CODE.search(answer.body)
            tally.refused[code[1].decode() if code else str(answer.status)] += 1
        elif not self._receipt(answer.body):
            tally.failed["serialisation"] += 1

    def _receipt(self, body: bytes) -> bool:
        """Add it up; False when it is none."""
        try:
            record = json.loads(body)
            accepted, duplicates, apart = record["accepted"], record["duplicates"], len(record["quarantined"])
        except (ValueError, KeyError, TypeError):
            return False
        self._sender.tally.accepted += accepted
        self._sender.tally.duplicates += duplicates
        self._sender.tally.quarantined += apart
        return True


class NoLog(UploadLog):
    """Ten thousand devices write no files."""

    def __init__(self) -> None:
        """Of no path."""
        super().__init__(Path())

    def add(self, request: Request) -> None:
        """Leave it: `Line` counted it."""
