"""Which Parquet files count: SQLite lists them, so that files and list change in one transaction.

    parquet/windows/date=YYYY-MM-DD/tier=T/FIRST-LAST.parquet    every window, by the day it was received
    parquet/hours/date=YYYY-MM-DD/FIRST-LAST.parquet             roll-ups: counts
    parquet/buckets/date=YYYY-MM-DD/FIRST-LAST.parquet           roll-ups: histograms

FIRST and LAST are the ids of the batches. A file that is not listed is what a crash left; one that was
replaced stays for a while, because somebody may be reading it.
"""

import os
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fleet.device.durable import sync

FOLDER = "parquet"
Kind = Literal["windows", "hours", "buckets"]
_RETIRED_MS = 600_000
_TIER = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One Parquet file."""

    path: str
    """Below the state folder."""
    kind: Kind
    date: str
    tier: str
    """Empty for roll-ups, which hold all tiers."""
    rows: int


def part_path(kind: Kind, date: str, tier: str, first: int, last: int) -> str:
    """Where the rows of these batches go."""
    assert not tier or _TIER.fullmatch(tier), tier
    folder = f"{FOLDER}/{kind}/date={date}" + (f"/tier={tier}" if tier else "")
    return f"{folder}/{first:012d}-{last:012d}.parquet"


def written(folder: Path, path: str, write: Callable[[Path], None]) -> None:
    """Let `write` make a file that is there whole and durable, or not at all."""
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".tmp")
    write(temporary)
    sync(temporary)
    os.replace(temporary, target)  # noqa: PTH105  # the system call, as tests interrupt it
    for parent in target.relative_to(folder).parents:  # a new folder's name lies in the one above
        sync(folder / parent)


def live(connection: sqlite3.Connection, kind: Kind) -> list[Part]:
    """The files that count, oldest batches first within a folder."""
    rows = connection.execute(
        "SELECT path, kind, date, tier, rows FROM parts WHERE kind = ? AND retired_ms IS NULL ORDER BY path",
        (kind,),
    )
    return [Part(path=p, kind=k, date=d, tier=t, rows=n) for p, k, d, t, n in rows]


def add(connection: sqlite3.Connection, parts: list[Part]) -> None:
    """List new files; inside a transaction."""
    connection.executemany(
        "INSERT INTO parts VALUES(?, ?, ?, ?, ?, NULL)",
        [(part.path, part.kind, part.date, part.tier, part.rows) for part in parts],
    )


def retire(connection: sqlite3.Connection, parts: list[Part], *, now_ms: int) -> None:
    """Let files no longer count; inside a transaction."""
    connection.executemany(
        "UPDATE parts SET retired_ms = ? WHERE path = ?", [(now_ms, part.path) for part in parts]
    )


def sweep(connection: sqlite3.Connection, folder: Path, *, now_ms: int) -> None:
    """Remove what a crash left and what was retired long enough ago; only while nobody else writes files."""
    old = [
        path
        for (path,) in connection.execute(
            "SELECT path FROM parts WHERE retired_ms < ?", (now_ms - _RETIRED_MS,)
        )
    ]
    for path in old:
        (folder / path).unlink(missing_ok=True)
    connection.executemany("DELETE FROM parts WHERE path = ?", [(path,) for path in old])
    listed = {path for (path,) in connection.execute("SELECT path FROM parts")}
    for file in (folder / FOLDER).rglob("*"):
        if file.is_file() and str(file.relative_to(folder)) not in listed:
            file.unlink()
