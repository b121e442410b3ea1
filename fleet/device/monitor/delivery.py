"""One batch to the gateway: signed, tried again where that may help, each try in the upload log."""

import contextlib
import email.utils
import gzip
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fleet.device.credentials import DeviceKey
from fleet.device.monitor.client import Answer, GatewayClient, NoAnswerError
from fleet.device.monitor.encoding import encode_batch
from fleet.device.monitor.upload_log import Outcome, Request, UploadLog
from fleet.device.wire import Quarantined, Receipt

PATH = "/v1/windows"
MOST_RETRIES = 3
BACKOFF_S, LONGEST_WAIT_S = 1.0, 60.0
"""The first retry comes within BACKOFF_S, the next within twice that; a longer wait is the next turn."""
_ABOUT_A_WINDOW = (400, 413, 422)
"""What of 4xx the content of a batch may cause; the others are about the device, the path or the moment."""
_AGAIN = (408, 429)
_SAID_CHARACTERS = 200
_WHOLE = -1
"""Index in a receipt: the whole batch."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """What became of a batch."""

    fate: Literal["taken", "refused", "failed"]
    """The gateway has it; it does not want it as it is; it may want it later."""
    retry_after_s: float = 0.0
    """How long the gateway asked to be left alone."""


@dataclass(frozen=True, slots=True)
class _Try:
    outcome: Outcome
    status: int | None
    said: str = ""
    retry_after_s: float = 0.0
    server_ms: int | None = None
    """The gateway's time, when it refused the request's."""


class Courier:
    """Delivers batches of one device."""

    def __init__(
        self,
        client: GatewayClient,
        key: DeviceKey,
        log: UploadLog,
        *,
        wall_ms: Callable[[], int],
        wait: Callable[[float], bool],
    ) -> None:
        """Signs as `key`; `wait` waits so many seconds, or less and answers True when it is to stop."""
        self._client, self._key, self._log = client, key, log
        self._wall_ms, self._wait = wall_ms, wait
        self._skew_ms = 0

    def deliver(self, windows: Sequence[bytes]) -> Delivered:
        """Send encoded windows, at most 1 + MOST_RETRIES times; never raises for what the other end does."""
        retries, corrected = 0, False
        while True:
            tried = self._try(windows)
            if tried.outcome == "ok":
                return Delivered("taken")
            if tried.status in _ABOUT_A_WINDOW:
                return Delivered("refused")
            if tried.server_ms is not None and not corrected:
                self._skew_ms, corrected = tried.server_ms - self._wall_ms(), True
                continue
            again = tried.outcome in ("network", "5xx") or tried.status in _AGAIN
            backoff_s = random.uniform(0, BACKOFF_S * 2**retries)  # noqa: S311 - only spreads the devices
            wait_s = max(backoff_s, tried.retry_after_s)
            if not again or retries == MOST_RETRIES or wait_s > LONGEST_WAIT_S or self._wait(wait_s):
                return Delivered("failed", tried.retry_after_s)
            retries += 1

    def _try(self, windows: Sequence[bytes]) -> _Try:
        begun_ms, begun_s = self._wall_ms(), time.monotonic()
        body = gzip.compress(encode_batch(windows, begun_ms), 6, mtime=0)
        path = self._client.prefix + PATH
        headers = self._key.headers("POST", path, body, time_ms=max(0, begun_ms + self._skew_ms))
        headers |= {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        try:
            tried = _judged(self._client.request("POST", path, body, headers), len(windows))
        except NoAnswerError as error:
            tried = _Try("network", None, str(error))
        self._log.add(
            Request(
                time_ms=begun_ms,
                windows=len(windows),
                bytes=len(body),
                status=tried.status,
                outcome=tried.outcome,
                duration_ms=round((time.monotonic() - begun_s) * 1e3, 1),
                said=tried.said[:_SAID_CHARACTERS],
            )
        )
        return tried


def _judged(answer: Answer, windows: int) -> _Try:
    status, said = answer.status, answer.body[:_SAID_CHARACTERS].decode(errors="replace")
    if 200 <= status < 300:
        if read_receipt(answer.body, windows) is None:
            return _Try("serialisation", status, said)
        return _Try("ok", status)
    if status < 400:
        return _Try("network", status, said or "a redirect: not the gateway's answer")
    wait_s = _seconds(answer.retry_after)
    if status >= 500:
        return _Try("5xx", status, said, wait_s)
    return _Try("4xx", status, said, wait_s, answer.server_ms())


def read_receipt(body: bytes, windows: int) -> Receipt | None:
    """The receipt for this many windows; None when it is another thing: then nothing was acknowledged."""
    record = _json_object(body)
    accepted, duplicates, server_ms = (_count(record.get(k)) for k in ("accepted", "duplicates", "server_ms"))
    items = record.get("quarantined")
    if accepted is None or duplicates is None or server_ms is None or not isinstance(items, list):
        return None
    if not all(isinstance(item, dict) for item in items):
        return None
    # A batch of a schema that the gateway does not know is kept whole: one item for all its windows.
    whole = [item.get("index") for item in items] == [_WHOLE] and accepted + duplicates == 0
    if not whole and accepted + duplicates + len(items) != windows:
        return None
    quarantined = (
        Quarantined(index=_WHOLE if whole else _count(q.get("index")) or 0, reason=str(q.get("reason")))
        for q in items
    )
    return Receipt(
        accepted=accepted, duplicates=duplicates, quarantined=tuple(quarantined), server_ms=server_ms
    )


def _count(value: Any) -> int | None:
    """A number of things, or of milliseconds, that is believable; else None."""
    return value if type(value) is int and 0 <= value < 10**14 else None


def _json_object(body: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        record = json.loads(body)
        if isinstance(record, dict):
            return record
    return {}


def _seconds(retry_after: str) -> float:
    """What a Retry-After asks for, in seconds or as a date (RFC 9110, 10.2.3); 0 for none or nonsense."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(min(int(retry_after[:9]), 86_400))
    with contextlib.suppress(ValueError, TypeError):
        until = email.utils.parsedate_to_datetime(retry_after).timestamp()
        return min(max(0.0, until - time.time()), 86_400.0)
    return 0.0
