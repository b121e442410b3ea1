"""Whether a window is one: its form, its ranges, its counts. What fails is kept apart with the reason."""

import re
from collections.abc import Iterator
from typing import get_args

from fleet.device.histogram import BASE, MOST_BUCKETS, Histogram
from fleet.device.release import Tier
from fleet.device.wire import INFERENCES_PER_WINDOW, Window

_TEXT_CHARACTERS = 128
_MOST_CLASSES = 1_000
_MOST_COUNT = 1 << 31
_MOST_VALUE = 1e15
"""Of anything measured: sums over a fleet stay finite."""
_MOST_SEQUENCE = 1 << 53
_EARLIEST_MS = 1_577_836_800_000
"""2020-01-01: before it a clock was never set."""
_AHEAD_MS = 86_400_000
_MOST_DURATION_MS = 366 * 86_400_000
_BOOT = re.compile(r"[0-9a-f]{16}")
_TIERS = get_args(Tier)
"""Each becomes a folder, so that a device cannot have as many as it likes."""
_INTERIOR = 1e-9
"""Nearer to a bucket's bound than this, relatively, the exact check decides."""


def fault(window: Window, *, server_ms: int) -> str | None:
    """What is wrong with a window that has the right form; None when nothing is.

    Args:
        window: As decoded.
        server_ms: The gateway's clock, milliseconds since 1970.
    """
    return next(_faults(window, server_ms), None)


def _faults(window: Window, server_ms: int) -> Iterator[str]:
    yield from _time_faults(window, server_ms)
    yield from _text_faults(window)
    yield from _count_faults(window)
    yield from _histogram_faults(window)


def _time_faults(window: Window, server_ms: int) -> Iterator[str]:
    if not 0 <= window.sequence < _MOST_SEQUENCE:
        yield f"sequence is {window.sequence}"
    if not _BOOT.fullmatch(window.boot):
        yield "boot is not 16 hex digits"
    if not _EARLIEST_MS <= window.end_ms <= server_ms + _AHEAD_MS:
        yield f"end_ms {window.end_ms} is before 2020 or more than a day ahead of {server_ms}"
    if not 0 <= window.end_ms - window.start_ms <= _MOST_DURATION_MS:
        yield f"it lasts {window.end_ms - window.start_ms} ms"
    if not (0 <= window.uptime_ms < _MOST_SEQUENCE and abs(window.clock_jump_ms) < _MOST_SEQUENCE):
        yield f"uptime_ms is {window.uptime_ms}, clock_jump_ms {window.clock_jump_ms}"


def _text_faults(window: Window) -> Iterator[str]:
    versions, environment = window.versions, window.environment
    for name, text in (
        ("model", versions.model),
        ("engine", versions.engine),
        ("config", versions.config),
        ("monitor", versions.monitor),
        ("app", versions.app),
        ("device_model", environment.device_model),
        ("os", environment.os),
        ("backend", environment.backend),
        ("driver", environment.driver),
        ("variant", environment.variant),
    ):
        if len(text) > _TEXT_CHARACTERS or not text.isprintable():
            yield f"{name} has {len(text)} characters, or some that cannot be printed"
    if environment.tier not in _TIERS:
        yield f"tier is none of {', '.join(_TIERS)}"


def _count_faults(window: Window) -> Iterator[str]:
    performance, quality, loss = window.performance, window.quality, window.loss
    if not 0 <= performance.inferences <= INFERENCES_PER_WINDOW:
        yield f"{performance.inferences} inferences, {INFERENCES_PER_WINDOW} are allowed"
    if not 0 <= performance.failures <= performance.inferences:
        yield f"{performance.failures} failures of {performance.inferences} inferences"
    if performance.throughput_hz is not None and not 0 <= performance.throughput_hz <= _MOST_VALUE:
        yield f"throughput_hz is {performance.throughput_hz}"
    counts = (performance.skipped_frames, quality.abnormal_outputs, window.versions.release)
    losses = (loss.overwritten_records, loss.dropped_windows, loss.not_finite)
    if any(not 0 <= count < _MOST_COUNT for count in (*counts, *losses, *window.anomalies.values())):
        yield "a count is negative or above 2**31"
    classes = quality.classes
    if len(classes) > _MOST_CLASSES or not all(name.isdecimal() and len(name) <= 6 for name in classes):
        yield "classes has more than 1000 entries, or names that are no index"
    if any(not 0 < count <= performance.inferences for count in classes.values()) or (
        sum(classes.values()) > performance.inferences
    ):
        yield f"classes counts more than {performance.inferences} inferences"


def _histogram_faults(window: Window) -> Iterator[str]:
    performance, resource, quality = window.performance, window.resource, window.quality
    done = performance.inferences - performance.failures
    for name, histogram, low, high, most in (
        ("latency_ms", performance.latency_ms, 0, _MOST_VALUE, done),
        ("memory_mb", resource.memory_mb, 0, _MOST_VALUE, _MOST_COUNT),
        ("cpu_percent", resource.cpu_percent, 0, _MOST_VALUE, _MOST_COUNT),
        ("temperature_c", resource.temperature_c, -273.15, _MOST_VALUE, _MOST_COUNT),
        ("power_w", resource.power_w, -_MOST_VALUE, _MOST_VALUE, _MOST_COUNT),
        ("battery_percent", resource.battery_percent, 0, 100, _MOST_COUNT),
        ("confidence", quality.confidence, 0, 1 + 1e-6, performance.inferences),
        ("input_mean", quality.input_mean, 0, 255, performance.inferences),
        ("input_std", quality.input_std, 0, 255, performance.inferences),
    ):
        if histogram is None:
            continue
        if histogram.count > most:
            yield f"{name} counts {histogram.count} values, {most} are possible"
        elif not (low <= histogram.min and histogram.max <= high):
            yield f"{name} has values from {histogram.min} to {histogram.max}, {low} to {high} exist"
        elif not surely_sound(histogram):
            try:
                histogram.check()
            except ValueError as error:
                yield f"{name}: {error}"


def surely_sound(histogram: Histogram) -> bool:
    """Whether a histogram passes `check`, for the common case and at a tenth of its cost.

    False says nothing: values on the bound of a bucket, zeros and negative values are left to `check`.
    """
    counts, count = histogram.counts, histogram.count
    if not counts or histogram.zero_count or histogram.negative_counts or histogram.negative_offset:
        return False
    last = histogram.offset + len(counts)
    return bool(
        histogram.offset > -MOST_BUCKETS
        and last < MOST_BUCKETS
        and counts[0] > 0
        and counts[-1] > 0
        and min(counts) >= 0
        and sum(counts) == count
        and _within(histogram.min, histogram.offset)
        and _within(histogram.max, last - 1)
        and histogram.min <= histogram.max
        and histogram.min * count <= histogram.sum <= histogram.max * count
    )


_LOW: list[float] = [BASE**i * (1 + _INTERIOR) for i in range(-MOST_BUCKETS, MOST_BUCKETS)]
_HIGH: list[float] = [BASE ** (i + 1) * (1 - _INTERIOR) for i in range(-MOST_BUCKETS, MOST_BUCKETS)]


def _within(value: float, bucket: int) -> bool:
    return _LOW[bucket + MOST_BUCKETS] < value < _HIGH[bucket + MOST_BUCKETS]
