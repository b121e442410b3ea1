"""A batch into the store: nonce, repeats, what the fleet page needs at once, quarantine. One transaction."""

import hashlib
import sqlite3
import zlib
from array import array
from dataclasses import dataclass

from fleet.device.wire import Window
from fleet.gateway.batch import Arrived, Fault, window_at
from fleet.gateway.devices import claim
from fleet.gateway.seen import REACH, Seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Incoming:
    """A signed batch."""

    device: int
    time_ms: int
    """The device's, as signed."""
    nonce: str
    received_ms: int
    body: bytes
    """As received."""
    encoding: str
    content: bytes
    """The body without its compression."""
    arrived: Arrived


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Where its windows went."""

    accepted: int
    duplicates: int
    faults: list[Fault]


def put(connection: sqlite3.Connection, incoming: Incoming, *, quarantine_bytes: int) -> Stored:
    """Store a batch.

    Args:
        connection: Inside the group's transaction.
        incoming: The batch.
        quarantine_bytes: Most that is kept of a device's invalid windows.

    Raises:
        Refusal: 409, the request was sent before.
    """
    claim(connection, incoming.device, incoming.time_ms, incoming.nonce)
    windows = dict(incoming.arrived.windows)
    new, repeated, late = _unseen(connection, incoming.device, windows, incoming.received_ms)
    faults = [*incoming.arrived.faults, *(_late(incoming.content, index) for index in late)]
    if new:
        connection.execute(
            "INSERT INTO batches(device, received_ms, taken, body) VALUES(?, ?, ?, ?)",
            (incoming.device, incoming.received_ms, array("H", new).tobytes(), _kept(incoming)),
        )
    if faults:
        _quarantine(connection, incoming, faults, quarantine_bytes)
    return Stored(accepted=len(new), duplicates=len(repeated), faults=faults)


def _kept(incoming: Incoming) -> bytes:
    """The body as received when it is compressed, else what it would be so: one form in the store."""
    return incoming.body if incoming.encoding == "gzip" else _packed(incoming.body)


def _packed(raw: bytes) -> bytes:
    packer = zlib.compressobj(1, wbits=31)
    return packer.compress(raw) + packer.flush()


def _unseen(
    connection: sqlite3.Connection, device: int, windows: dict[int, Window], now_ms: int
) -> tuple[list[int], list[int], list[int]]:
    if not windows:
        return [], [], []
    row = connection.execute("SELECT newest, bits FROM state WHERE device = ?", (device,)).fetchone()
    seen = Seen.of(*row) if row else Seen()
    before = seen.newest
    outcome = seen.add((index, window.sequence) for index, window in windows.items())
    new = outcome[0]
    if row is None or seen.newest > before:
        window = max((windows[index] for index in new), key=lambda w: w.sequence)
        about, environment = window.versions, window.environment
        connection.execute(
            "INSERT INTO state VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT(device) DO UPDATE SET"
            " newest = excluded.newest, bits = excluded.bits, last_ms = excluded.last_ms,"
            " windows = windows + excluded.windows, release = excluded.release,"
            " model_version = excluded.model_version, app = excluded.app, tier = excluded.tier,"
            " variant = excluded.variant, backend = excluded.backend",
            (
                device,
                seen.newest,
                seen.to_bytes(),
                now_ms,
                len(new),
                about.release,
                about.model,
                about.app,
                environment.tier,
                environment.variant,
                environment.backend,
            ),
        )
    else:
        connection.execute(
            "UPDATE state SET bits = ?, last_ms = ?, windows = windows + ? WHERE device = ?",
            (seen.to_bytes(), now_ms, len(new), device),
        )
    return outcome


def _late(content: bytes, index: int) -> Fault:
    reason = f"more than {REACH} windows behind the newest: whether it was stored cannot be told any more"
    return Fault(index=index, reason=reason, raw=window_at(content, index))


def _quarantine(
    connection: sqlite3.Connection, incoming: Incoming, faults: list[Fault], most_bytes: int
) -> None:
    device = incoming.device
    row = connection.execute("SELECT bytes FROM quarantined WHERE device = ?", (device,)).fetchone()
    kept_bytes = row[0] if row else 0
    kept = added = 0
    for fault in faults:
        digest = hashlib.sha256(b"%d\n" % device + fault.raw).digest()
        raw = zlib.compress(fault.raw, 1)
        room = kept_bytes + added + len(raw) <= most_bytes
        done = connection.execute(
            "INSERT OR IGNORE INTO quarantine VALUES(?, ?, ?, ?, ?)",
            (digest, device, incoming.received_ms, fault.reason, raw if room else None),
        )
        kept += done.rowcount
        added += len(raw) if done.rowcount and room else 0
    connection.execute(
        "INSERT INTO quarantined VALUES(?, ?, ?) ON CONFLICT(device) DO UPDATE SET"
        " windows = windows + excluded.windows, bytes = bytes + excluded.bytes",
        (device, kept, added),
    )
