"""Windows and batches as JSON: floats keep every bit, NaN cannot occur."""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from fleet.device.histogram import Histogram
from fleet.device.wire import (
    SCHEMA,
    Environment,
    Loss,
    Performance,
    Quality,
    Resource,
    Versions,
    Window,
)

_HISTOGRAM = {field.name: field.default for field in fields(Histogram)}
_NAMES = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (Window, Versions, Performance, Resource, Quality, Environment, Loss)
}


def encode_window(window: Window) -> bytes:
    """Compact JSON of one window; what a histogram has not, negative values mostly, is left out."""
    text = json.dumps(window, default=_record, separators=(",", ":"), allow_nan=False)
    return text.encode()


def encode_batch(windows: Sequence[bytes], sent_ms: int) -> bytes:
    """The body of `POST /v1/windows` from encoded windows, by joining: none is parsed again."""
    return b'{"schema":%d,"sent_ms":%d,"windows":[%s]}' % (SCHEMA, sent_ms, b",".join(windows))


def _record(value: Any) -> dict[str, Any]:
    if isinstance(value, Histogram):
        items = {name: getattr(value, name) for name in _HISTOGRAM}
        return {name: item for name, item in items.items() if item != _HISTOGRAM[name]}
    return {name: getattr(value, name) for name in _NAMES[type(value)]}
