"""Windows as an Arrow table: a column a field, a struct a histogram; floats stay exact, absent is null."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from fleet.device.histogram import Histogram
from fleet.device.wire import Anomaly, Window

HISTOGRAMS = {
    "latency_ms": "performance",
    "memory_mb": "resource",
    "cpu_percent": "resource",
    "temperature_c": "resource",
    "power_w": "resource",
    "battery_percent": "resource",
    "confidence": "quality",
    "input_mean": "quality",
    "input_std": "quality",
}
"""Column, and the part of a window that holds it."""
ANOMALIES: tuple[Anomaly, ...] = ("latency", "memory", "confidence", "failures")

_HISTOGRAM = pa.struct(
    [
        ("count", pa.int64()),
        ("sum", pa.float64()),
        ("min", pa.float64()),
        ("max", pa.float64()),
        ("zero_count", pa.int64()),
        ("offset", pa.int32()),
        ("counts", pa.list_(pa.int64())),
        ("negative_offset", pa.int32()),
        ("negative_counts", pa.list_(pa.int64())),
    ]
)
_PLAIN: tuple[tuple[str, str, Any], ...] = (
    ("sequence", "", pa.int64()),
    ("boot", "", pa.string()),
    ("start_ms", "", pa.int64()),
    ("end_ms", "", pa.int64()),
    ("uptime_ms", "", pa.int64()),
    ("clock_jump_ms", "", pa.int64()),
    ("release", "versions", pa.int64()),
    ("model", "versions", pa.string()),
    ("engine", "versions", pa.string()),
    ("config", "versions", pa.string()),
    ("monitor", "versions", pa.string()),
    ("app", "versions", pa.string()),
    ("inferences", "performance", pa.int64()),
    ("failures", "performance", pa.int64()),
    ("skipped_frames", "performance", pa.int64()),
    ("throughput_hz", "performance", pa.float64()),
    ("abnormal_outputs", "quality", pa.int64()),
    ("device_model", "environment", pa.string()),
    ("os", "environment", pa.string()),
    ("network", "environment", pa.string()),
    ("charging", "environment", pa.bool_()),
    ("backend", "environment", pa.string()),
    ("driver", "environment", pa.string()),
    ("tier", "environment", pa.string()),
    ("variant", "environment", pa.string()),
    ("overwritten_records", "loss", pa.int64()),
    ("dropped_windows", "loss", pa.int64()),
    ("not_finite", "loss", pa.int64()),
)
SCHEMA = pa.schema(
    [
        ("device", pa.string()),
        ("received_ms", pa.int64()),
        *((name, kind) for name, _, kind in _PLAIN),
        *((name, _HISTOGRAM) for name in HISTOGRAMS),
        ("classes", pa.map_(pa.string(), pa.int64())),
        *((f"anomalies_{name}", pa.int64()) for name in ANOMALIES),
    ]
)


@dataclass(frozen=True, slots=True)
class Received:
    """A window and what the gateway knows about it."""

    device: str
    received_ms: int
    window: Window


def table(received: Sequence[Received]) -> pa.Table:
    """One row a window, columns as in SCHEMA."""
    windows = [one.window for one in received]
    parts = {
        name: [getattr(window, name) for window in windows]
        for name in ("versions", "performance", "resource", "quality", "environment", "loss")
    } | {"": windows}
    columns: list[Any] = [
        pa.array([one.device for one in received], pa.string()),
        pa.array([one.received_ms for one in received], pa.int64()),
        *(pa.array([getattr(p, name) for p in parts[part]], kind) for name, part, kind in _PLAIN),
        *(_histograms([getattr(p, name) for p in parts[part]]) for name, part in HISTOGRAMS.items()),
        pa.array([list(window.quality.classes.items()) for window in windows], SCHEMA.field("classes").type),
        *(
            pa.array([window.anomalies.get(name) or 0 for window in windows], pa.int64())
            for name in ANOMALIES
        ),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


_EMPTY = Histogram(count=0, sum=0.0, min=0.0, max=0.0)


def _histograms(column: list[Histogram | None]) -> Any:
    there = [histogram or _EMPTY for histogram in column]
    fields = [
        pa.array([getattr(histogram, field.name) for histogram in there], field.type) for field in _HISTOGRAM
    ]
    absent = pa.array([histogram is None for histogram in column], pa.bool_())
    return pa.StructArray.from_arrays(fields, fields=list(_HISTOGRAM), mask=absent)
