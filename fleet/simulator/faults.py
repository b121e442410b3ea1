"""Devices that are broken or hostile: each a small change of what a sound one sends.

What the gateway makes of it is said here and proven by tests; whatever it is, other devices feel nothing.
"""

import gzip
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fleet.device.wire import SCHEMA

Fault = Literal["clock", "duplicates", "reordered", "old_schema", "garbage", "replay", "stolen_key"]
ENDS_AS: Mapping[Fault, str] = {
    "clock": "401 clock, corrected by the device; its windows, dated a year ahead, are quarantined",
    "duplicates": "200; the windows are stored once and counted as duplicates",
    "reordered": "200; nothing is lost",
    "old_schema": "200; each batch is quarantined whole",
    "garbage": "400 gzip or batch; nothing is stored, the device keeps its windows until its spool is full",
    "replay": "409 replay; nothing is stored twice",
    "stolen_key": "200; of two windows with one number the first counts, the other is a duplicate, until the "
    "key is revoked",
}
CLOCK_AHEAD_MS = 400 * 86_400_000
_GARBAGE_BYTES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """One signed request."""

    body: bytes
    headers: Mapping[str, str]
    heard: bool = True
    """Whether its answer reaches the device."""


def altered(
    fault: Fault | None,
    sent: Sent,
    sign: Callable[[bytes], Mapping[str, str]],
    rng: np.random.Generator,
) -> list[Sent]:
    """What is really sent, in order; exactly one of it is heard.

    Args:
        fault: The device's; `clock`, `reordered` and `stolen_key` change nothing here, but before.
        sent: What a sound device would send: a batch, gzip.
        sign: Headers for another body, with the time of `sent` and a fresh nonce.
        rng: Of the garbage.
    """
    match fault:
        case "duplicates":  # the first answer got lost
            lost = Sent(body=sent.body, headers=sent.headers, heard=False)
            return [lost, Sent(body=sent.body, headers=sign(sent.body))]
        case "replay":  # somebody who recorded it sends it again, bit for bit
            return [sent, Sent(body=sent.body, headers=sent.headers, heard=False)]
        case "old_schema":
            content = gzip.decompress(sent.body)
            body = gzip.compress(content.replace(b'{"schema":%d,' % SCHEMA, b'{"schema":0,', 1), mtime=0)
            return [Sent(body=body, headers=sign(body))]
        case "garbage":
            noise = rng.bytes(_GARBAGE_BYTES)
            body = noise if rng.random() < 0.5 else gzip.compress(noise, mtime=0)
            return [Sent(body=body, headers=sign(body))]
        case _:
            return [sent]
