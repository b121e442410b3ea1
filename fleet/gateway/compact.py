"""Committed batches into Parquet and roll-ups; `python -m fleet.gateway.compact FOLDER` beside the gateway.

Files are written first and count only when one transaction lists them and moves `compacted_through` on: a
crash before it leaves files that the next run removes, a crash after it leaves batches that the next run
forgets. So every window is there once, whenever the process dies.
"""

import contextlib
import fcntl
import os
import sqlite3
import sys
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fleet.device.wall import now_ms
from fleet.gateway import database, duck, parts, rollup
from fleet.gateway.batch import decode_windows
from fleet.gateway.columns import Received, table
from fleet.gateway.merge import merge
from fleet.gateway.parts import Kind, Part

_MOST_WINDOWS, _MOST_BYTES = 50_000, 32 << 20
"""In one part: what bounds the memory."""
_FORGOTTEN_AT_ONCE = 64
"""Batches: the gateway waits for the lock meanwhile."""
_GZIP = 31
_NICE = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Batches first to last, read."""

    first: int
    last: int
    received: list[Received]
    unreadable: list[tuple[int, int, bytes]]
    """Device, received_ms, body: what this version can no longer decode."""


def compact(folder: Path) -> int:
    """Bring everything that is committed into Parquet; how many windows that were.

    Returns at once when another process is at it.

    Args:
        folder: State folder.
    """
    with _alone(folder) as alone:
        if not alone:
            return 0
        connection = database.opened(folder)
        try:
            parts.sweep(connection, folder, now_ms=now_ms())
            windows = 0
            while chunk := _next_chunk(connection):
                _store(connection, folder, chunk)
                windows += len(chunk.received)
                _forget(connection)
            _forget(connection)
            merge(connection, folder, now_ms=now_ms())
            return windows
        finally:
            connection.close()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    with (folder / "compact.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _next_chunk(connection: sqlite3.Connection) -> _Chunk | None:
    rows = connection.execute(
        "SELECT b.id, b.device, d.device, b.received_ms, b.taken, b.body FROM batches b"
        " LEFT JOIN devices d ON d.number = b.device"
        " WHERE b.id > (SELECT value FROM progress WHERE name = 'compacted_through') ORDER BY b.id"
    )
    received: list[Received] = []
    unreadable: list[tuple[int, int, bytes]] = []
    first = last = size = 0
    for number, device, name, received_ms, taken, body in rows:
        first, last, size = first or number, number, size + len(body)
        try:
            windows = decode_windows(zlib.decompress(body, _GZIP), array("H", taken).tolist())
            received += [Received(name, received_ms, window) for window in windows]
        except (msgspec.DecodeError, zlib.error, IndexError):
            unreadable.append((device, received_ms, body))
        if len(received) >= _MOST_WINDOWS or size >= _MOST_BYTES:
            break
    rows.close()
    return _Chunk(first=first, last=last, received=received, unreadable=unreadable) if first else None


def _store(connection: sqlite3.Connection, folder: Path, chunk: _Chunk) -> None:
    written = list(_write(folder, chunk)) if chunk.received else []
    connection.execute("BEGIN IMMEDIATE")
    parts.add(connection, written)
    connection.executemany(
        "INSERT OR IGNORE INTO quarantine VALUES(randomblob(32), ?, ?, 'stored, and unreadable now', ?)",
        chunk.unreadable,
    )
    connection.execute("UPDATE progress SET value = ? WHERE name = 'compacted_through'", (chunk.last,))
    connection.execute("COMMIT")


def _write(folder: Path, chunk: _Chunk) -> Iterator[Part]:
    by_date: dict[str, list[Received]] = {}
    for one in chunk.received:
        date = datetime.fromtimestamp(one.received_ms / 1000, UTC).strftime("%Y-%m-%d")
        by_date.setdefault(date, []).append(one)
    for date, received in by_date.items():
        rows = table(received)
        for tier in pc.unique(rows["tier"]).to_pylist():
            of_tier = rows.filter(pc.equal(rows["tier"], tier)).drop_columns(["tier"])
            yield _part((folder, chunk), "windows", date, tier, of_tier)
        with duck.confined(folder) as connection:
            connection.register("windows", rows)
            hours = connection.sql(rollup.hours_sql("windows")).to_arrow_table()
            buckets = connection.sql(rollup.buckets_sql("windows")).to_arrow_table()
            yield _part((folder, chunk), "hours", date, "", hours)
            yield _part((folder, chunk), "buckets", date, "", buckets)


def _part(place: tuple[Path, _Chunk], kind: Kind, date: str, tier: str, rows: Any) -> Part:
    folder, chunk = place
    path = parts.part_path(kind, date, tier, chunk.first, chunk.last)
    parts.written(folder, path, lambda file: pq.write_table(rows, file, compression="zstd"))
    return Part(path=path, kind=kind, date=date, tier=tier, rows=rows.num_rows)


def _forget(connection: sqlite3.Connection) -> None:
    """Delete the batches that lie in Parquet, a few at a time."""
    deleted = -1
    while deleted:
        deleted = connection.execute(
            "DELETE FROM batches WHERE id IN (SELECT id FROM batches WHERE id <="
            " (SELECT value FROM progress WHERE name = 'compacted_through') ORDER BY id LIMIT ?)",
            (_FORGOTTEN_AT_ONCE,),
        ).rowcount


def main() -> None:
    """Compact the state folder named on the command line, giving way to everybody else."""
    os.nice(_NICE)
    print(compact(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
