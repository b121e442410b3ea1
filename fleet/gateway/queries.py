"""Questions about the fleet: DuckDB over roll-ups and Parquet, SQLite for what devices said last.

Times are milliseconds since 1970; answers end where compaction has got to.
"""

# ruff: noqa: S608  # names in the SQL are known ones; values are bound

import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from fleet.device.errors import UserError
from fleet.gateway import database, duck, parts, rollup

Key = Literal["hour_ms", "release", "model", "tier", "device_model", "backend"]


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Of one group."""

    keys: dict[str, Any]
    count: int
    """Values in it."""
    values: tuple[float, ...]
    """In the order of the quantiles that were asked for; each within 2.2 % of a recorded value."""


class Fleet:
    """The questions; each opens what it needs and closes it, so any thread may ask."""

    def __init__(self, folder: Path) -> None:
        """Of the gateway with this state folder.

        Args:
            folder: State folder.
        """
        self._folder = folder

    def percentiles(
        self,
        metric: str,
        *,
        by: Sequence[Key] = (),
        quantiles: Sequence[float] = (0.5, 0.95, 0.99),
        since_ms: int = 0,
        until_ms: int = 1 << 60,
        raw: bool = False,
        threads: int = 1,
    ) -> list[Percentiles]:
        """Percentiles of a metric by group, over whole hours from `since_ms` to before `until_ms`.

        Args:
            metric: A histogram of a window: latency_ms, confidence, ...
            by: Keys of the groups; none: one group.
            quantiles: 0 to 1.
            since_ms: First hour.
            until_ms: Hours from here on are left out.
            raw: From the windows themselves instead of the roll-ups: slower, the same answer.
            threads: Of DuckDB.

        Raises:
            UserError: no such metric, key or quantile.
        """
        _check(metric, by, quantiles)
        files = self._files("windows" if raw else "buckets")
        if not files:
            return []
        sql = _percentiles_sql(metric, by, len(quantiles), raw=raw)
        rows = self._ask(files, sql, [since_ms, until_ms, *quantiles], threads)
        return [
            Percentiles(
                keys=dict(zip(by, row, strict=False)),
                count=int(row[len(by)]),
                values=tuple(float(value) for value in row[len(by) + 1 :]),
            )
            for row in rows
            if row[len(by)] is not None
        ]

    def counts(
        self, *, by: Sequence[Key] = (), since_ms: int = 0, until_ms: int = 1 << 60
    ) -> list[dict[str, Any]]:
        """Windows, inferences, failures, anomalies and loss by group, over whole hours; one flat row each.

        Raises:
            UserError: no such key.
        """
        _check("latency_ms", by, ())
        files = self._files("hours")
        if not files:
            return []
        names = ("windows", *rollup.COUNTED)
        sums = ", ".join(f"CAST(sum({name}) AS BIGINT)" for name in names)
        keys = ", ".join(by)
        rows = self._ask(
            files,
            f"SELECT {keys + ', ' if by else ''}{sums}"
            " FROM read_parquet(getvariable('files'), hive_partitioning = false)"
            " WHERE hour_ms >= ? AND hour_ms < ?"
            + (f" GROUP BY {keys} ORDER BY {keys}" if by else " HAVING count(*) > 0"),
            [since_ms, until_ms],
            1,
        )
        return [dict(zip((*by, *names), row, strict=True)) for row in rows]

    def devices(self, *, now_ms: int, missing_ms: int = 86_400_000) -> dict[str, int]:
        """How many devices are enrolled, revoked, were heard of, and have been silent for `missing_ms`."""
        with _reading(self._folder) as connection:
            row = connection.execute(
                "SELECT count(*), count(revoked_ms), count(state.device),"
                " count(CASE WHEN revoked_ms IS NULL AND state.last_ms < ? THEN 1 END)"
                " FROM devices LEFT JOIN state ON state.device = devices.number",
                (now_ms - missing_ms,),
            ).fetchone()
        return dict(zip(("enrolled", "revoked", "heard", "missing"), row, strict=True))

    def missing(self, *, now_ms: int, missing_ms: int = 86_400_000, most: int = 100) -> list[tuple[str, int]]:
        """Devices that are not revoked and silent for so long: id and when they were last heard of."""
        with _reading(self._folder) as connection:
            return connection.execute(
                "SELECT devices.device, last_ms FROM state JOIN devices ON number = state.device"
                " WHERE revoked_ms IS NULL AND last_ms < ? ORDER BY last_ms LIMIT ?",
                (now_ms - missing_ms, most),
            ).fetchall()

    def running(self) -> list[dict[str, Any]]:
        """What devices run, as they said last: release, model version, tier, variant, and how many do."""
        names = ("release", "model_version", "tier", "variant")
        with _reading(self._folder) as connection:
            rows = connection.execute(
                f"SELECT {', '.join(names)}, count(*) FROM state GROUP BY {', '.join(names)}"  # constants
                " ORDER BY release DESC, tier, variant"
            ).fetchall()
        return [dict(zip((*names, "devices"), row, strict=True)) for row in rows]

    def quarantined(self) -> list[tuple[str, int]]:
        """Windows kept apart, the commonest reasons first."""
        with _reading(self._folder) as connection:
            return connection.execute(
                "SELECT reason, count(*) FROM quarantine GROUP BY reason ORDER BY count(*) DESC LIMIT 10"
            ).fetchall()

    def _files(self, kind: parts.Kind) -> list[str]:
        with _reading(self._folder) as connection:
            return [str(self._folder / part.path) for part in parts.live(connection, kind)]

    def _ask(self, files: list[str], sql: str, bound: list[Any], threads: int) -> list[tuple[Any, ...]]:
        with duck.confined(self._folder, threads=threads) as connection:
            connection.execute("SET VARIABLE files = ?", [files])
            rows: list[tuple[Any, ...]] = connection.execute(sql, bound).fetchall()
            return rows


def _percentiles_sql(metric: str, by: Sequence[Key], quantiles: int, *, raw: bool) -> str:
    """Bound values: first hour, end, and the quantiles."""
    if raw:
        hours = f"{rollup.HOUR} >= ? AND {rollup.HOUR} < ?"
        windows = f"SELECT * FROM read_parquet(getvariable('files'), hive_partitioning = true) WHERE {hours}"
        buckets = rollup.buckets_sql("chosen", (metric,), by)
        source = f"WITH chosen AS NOT MATERIALIZED ({windows}) {buckets}"
    else:
        source = (
            "SELECT * FROM read_parquet(getvariable('files'), hive_partitioning = false)"
            f" WHERE metric = '{metric}' AND hour_ms >= ? AND hour_ms < ?"
        )
    keys = "".join(f"{key}, " for key in by)
    partition = f"PARTITION BY {', '.join(by)}" if by else ""
    group = f"GROUP BY {', '.join(by)} ORDER BY {', '.join(by)}" if by else ""
    # As Histogram.quantile ranks: 0.07 * 100 is a little more than 7.
    chosen = "".join(
        f", min_by({rollup.middle_sql('bucket')}, bucket)"
        " FILTER (WHERE below >= greatest(1, ceil(round(? * total, 6))))"
        for _ in range(quantiles)
    )
    return (
        f"WITH merged AS (SELECT {keys}bucket, sum(n) AS n FROM ({source}) GROUP BY {keys}bucket),"
        f" ranked AS (SELECT {keys}bucket, sum(n) OVER ({partition} ORDER BY bucket) AS below,"
        f" sum(n) OVER ({partition}) AS total FROM merged)"
        f" SELECT {keys}any_value(total){chosen} FROM ranked {group}"
    )


def _reading(folder: Path) -> "contextlib.closing[sqlite3.Connection]":
    return contextlib.closing(database.reader(folder))


def _check(metric: str, by: Sequence[str], quantiles: Sequence[float]) -> None:
    """Names become part of the SQL: only known ones do."""
    if metric not in rollup.METRICS:
        raise UserError(
            f"metric {metric}", allowed=", ".join(rollup.METRICS), next_step="ask for one of these"
        )
    for key in by:
        if key not in get_args(Key):
            raise UserError(f"key {key}", allowed=", ".join(get_args(Key)), next_step="group by these")
    for quantile in quantiles:
        if not 0 <= quantile <= 1:
            raise UserError(f"quantile {quantile}", allowed="0 to 1", next_step="give shares, not percents")
