"""Many small Parquet files into few: a compaction a minute would leave thousands a day."""

import itertools
import sqlite3
from pathlib import Path

from fleet.gateway import duck, parts, rollup
from fleet.gateway.parts import Part

_MOST_SMALL = 24
"""Files of a folder that may stay apart."""
_SMALL_ROWS = 500_000
_MERGED_ROWS = 1_000_000


def merge(connection: sqlite3.Connection, folder: Path, *, now_ms: int) -> None:
    """Merge where a folder holds too many small files; what was merged is listed anew in one transaction."""
    for kind in ("windows", "hours", "buckets"):
        live = parts.live(connection, kind)
        for _, group in itertools.groupby(live, key=lambda part: (part.date, part.tier)):
            small = [part for part in group if part.rows < _SMALL_ROWS]
            if len(small) > _MOST_SMALL:
                _merge(connection, folder, _within(small, _MERGED_ROWS), now_ms)


def _within(small: list[Part], rows: int) -> list[Part]:
    taken: list[Part] = []
    total = 0
    for part in small:
        total += part.rows
        if taken and total > rows:
            break
        taken.append(part)
    return taken


def _merge(connection: sqlite3.Connection, folder: Path, old: list[Part], now_ms: int) -> None:
    if len(old) < 2:
        return
    kind, date, tier = old[0].kind, old[0].date, old[0].tier
    spans = [Path(part.path).stem.split("-") for part in old]
    first, last = min(int(span[0]) for span in spans), max(int(span[1]) for span in spans)
    path = parts.part_path(kind, date, tier, first, last)
    source = "read_parquet(getvariable('files'), hive_partitioning = false)"
    select = {
        "windows": f"SELECT * FROM {source}",  # noqa: S608  # a constant
        "hours": rollup.merge_hours_sql(source),
        "buckets": rollup.merge_buckets_sql(source),
    }[kind]
    with duck.confined(folder) as analytics:
        analytics.execute("SET VARIABLE files = ?", [[str(folder / part.path) for part in old]])

        def write(file: Path) -> None:
            target = str(file).replace("'", "''")
            analytics.execute(f"COPY ({select}) TO '{target}' (FORMAT parquet, COMPRESSION zstd)")

        parts.written(folder, path, write)
        rows = analytics.execute(
            "SELECT count(*) FROM read_parquet(?, hive_partitioning = false)", [str(folder / path)]
        ).fetchone()[0]
    connection.execute("BEGIN IMMEDIATE")
    parts.retire(connection, old, now_ms=now_ms)
    parts.add(connection, [Part(path=path, kind=kind, date=date, tier=tier, rows=rows)])
    connection.execute("COMMIT")
