"""Hourly roll-ups: what windows sum to by hour, release, model, tier, device model and backend.

Two tables, both mergeable by adding rows up: `hours` (counts) and `buckets` (a histogram's counts, a row a
bucket). Hours are those of the windows' end on the device's clock.
"""

# ruff: noqa: S608  # names in the SQL are known ones; values are bound

from collections.abc import Sequence

from fleet.device.histogram import BASE
from fleet.gateway.columns import ANOMALIES, HISTOGRAMS

KEYS = ("hour_ms", "release", "model", "tier", "device_model", "backend")
COUNTED = (
    "inferences",
    "failures",
    "skipped_frames",
    "abnormal_outputs",
    "overwritten_records",
    "dropped_windows",
    "not_finite",
    *(f"anomalies_{name}" for name in ANOMALIES),
)
METRICS = tuple(HISTOGRAMS)
ZERO = 0
"""Codes of buckets: index i of positive values is 2**19 + i, 0 holds zeros, -(2**19 + i) negative ones, so
that their order is that of the values."""
_BIAS = 1 << 19

HOUR = "end_ms // 3600000 * 3600000"


def _keys_of_windows(keys: Sequence[str]) -> str:
    return "".join(f"{HOUR} AS hour_ms, " if key == "hour_ms" else f"{key}, " for key in keys)


def hours_sql(windows: str) -> str:
    """A SELECT of `hours` over a table expression of windows."""
    sums = ", ".join(f"CAST(sum({name}) AS BIGINT) AS {name}" for name in COUNTED)
    return f"SELECT {_keys_of_windows(KEYS)}count(*) AS windows, {sums} FROM {windows} GROUP BY ALL"


def buckets_sql(windows: str, metrics: Sequence[str] = METRICS, keys: Sequence[str] = KEYS) -> str:
    """A SELECT of `buckets` over a table expression of windows, for some of the metrics and keys."""
    return " UNION ALL ".join(_buckets_of(windows, metric, keys) for metric in metrics)


def _buckets_of(windows: str, metric: str, names: Sequence[str]) -> str:
    there = f"FROM {windows} WHERE {metric} IS NOT NULL"
    keys = f"{_keys_of_windows(names)}'{metric}' AS metric"
    positive = (
        f"SELECT {keys}, unnest(range({_BIAS} + {metric}.offset, {_BIAS} + {metric}.offset"
        f" + len({metric}.counts))) AS bucket, unnest({metric}.counts) AS n {there}"
    )
    zero = f"SELECT {keys}, {ZERO} AS bucket, {metric}.zero_count AS n {there} AND {metric}.zero_count > 0"
    negative = (
        f"SELECT {keys}, -unnest(range({_BIAS} + {metric}.negative_offset, {_BIAS} + {metric}.negative_offset"
        f" + len({metric}.negative_counts))) AS bucket, unnest({metric}.negative_counts) AS n {there}"
        f" AND len({metric}.negative_counts) > 0"
    )
    columns = ", ".join((*names, "metric"))
    return (
        f"SELECT {columns}, CAST(bucket AS BIGINT) AS bucket, CAST(sum(n) AS BIGINT) AS n"
        f" FROM ({positive} UNION ALL {zero} UNION ALL {negative}) WHERE n > 0 GROUP BY ALL"
    )


def merge_hours_sql(hours: str) -> str:
    """Rows of `hours` with the same keys, added up."""
    sums = ", ".join(f"CAST(sum({name}) AS BIGINT) AS {name}" for name in ("windows", *COUNTED))
    return f"SELECT {', '.join(KEYS)}, {sums} FROM {hours} GROUP BY ALL"


def merge_buckets_sql(buckets: str) -> str:
    """Rows of `buckets` with the same keys, added up."""
    columns = ", ".join((*KEYS, "metric", "bucket"))
    return f"SELECT {columns}, CAST(sum(n) AS BIGINT) AS n FROM {buckets} GROUP BY ALL"


def middle_sql(bucket: str) -> str:
    """The value that stands for a bucket: no recorded one is further from it than RELATIVE_ERROR."""
    size = f"pow({BASE}, abs({bucket}) - {_BIAS}) * {2 * BASE / (1 + BASE)}"
    return f"CASE WHEN {bucket} = {ZERO} THEN 0.0 ELSE sign({bucket}) * {size} END"
