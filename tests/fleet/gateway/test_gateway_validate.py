"""Which windows are sound, and what is said of the others."""

from dataclasses import replace

import gateway_kit as kit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.device.histogram import Histogram
from fleet.gateway.validate import fault, surely_sound

NOW_MS = 1_800_000_000_000
GOOD = kit.window(7, end_ms=NOW_MS)


def _with(part, **fields):
    return replace(GOOD, **{part: replace(getattr(GOOD, part), **fields)})


def _histogram(**fields):
    return replace(GOOD.performance.latency_ms, **fields)


BAD = {
    "sequence": replace(GOOD, sequence=-1),
    "boot": replace(GOOD, boot="0123456789ABCDEF"),
    "before 2020": replace(GOOD, start_ms=0, end_ms=1),
    "more than a day ahead": replace(GOOD, end_ms=NOW_MS + 86_400_001),
    "it lasts -1 ms": replace(GOOD, start_ms=NOW_MS + 1),
    "uptime_ms": replace(GOOD, uptime_ms=-1),
    "tier": _with("environment", tier="../../etc"),
    "tier is none of high, mid, low": _with("environment", tier="zz-4711"),
    "tier is none": _with("environment", tier=""),
    "device_model": _with("environment", device_model="x" * 129),
    "app": _with("versions", app="1\x1b[2J"),
    "101 inferences": _with("performance", inferences=101),
    "101 failures": _with("performance", failures=101),
    "throughput_hz": _with("performance", throughput_hz=-1.0),
    "a count is negative": _with("loss", dropped_windows=-1),
    "classes counts more": _with("quality", classes={"1": 60, "2": 60}),
    "classes has": _with("quality", classes={"cat": 1}),
    "latency_ms counts 100 values, 99": _with("performance", failures=1),
    "confidence has values": _with("quality", confidence=Histogram.of([0.5, 1.5])),
    "battery_percent has values": _with("resource", battery_percent=Histogram.of([101.0])),
    "temperature_c has values": _with("resource", temperature_c=Histogram.of([-300.0])),
    "power_w has values": _with("resource", power_w=Histogram.of([1e308])),
    "the buckets hold": _with("performance", latency_ms=_histogram(count=99)),
    "does not lie in": _with("performance", latency_ms=_histogram(offset=3)),
    "is not between": _with("performance", latency_ms=_histogram(sum=1e9)),
    "begins at bucket": _with("performance", latency_ms=_histogram(offset=1 << 40)),
}


def test_a_good_window_has_no_fault():
    """What a device measures is accepted, also at the ends of what is allowed."""
    assert fault(GOOD, server_ms=NOW_MS) is None
    ahead = replace(GOOD, start_ms=NOW_MS, end_ms=NOW_MS + 86_400_000)
    assert fault(ahead, server_ms=NOW_MS) is None
    bare = replace(GOOD, anomalies={})
    for part, name in (("performance", "latency_ms"), ("quality", "confidence"), ("resource", "memory_mb")):
        bare = replace(bare, **{part: replace(getattr(bare, part), **{name: None})})
    assert fault(bare, server_ms=NOW_MS) is None


@pytest.mark.parametrize("said", BAD)
def test_a_fault_is_named(said):
    """Each thing that cannot be is found, and its name is in the reason."""
    assert said in (fault(BAD[said], server_ms=NOW_MS) or "")


def test_a_count_beyond_the_inferences_is_found():
    """A histogram of confidence cannot hold more values than there were inferences."""
    many = _with("quality", confidence=Histogram.of(np.full(101, 0.5)))
    assert "confidence counts 101 values, 100 are possible" in (fault(many, server_ms=NOW_MS) or "")


@settings(max_examples=300)
@given(
    st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=60),
    st.sampled_from(["count", "sum", "min", "max", "offset", "counts", "zero_count", None]),
    st.floats(-3, 3),
)
def test_the_short_check_lets_nothing_through(values, field, change):
    """What the quick test calls sound passes the exact one, whatever was tampered with."""
    histogram = Histogram.of(values)
    if field == "counts":
        histogram = replace(histogram, counts=(*histogram.counts, int(change)))
    elif field is not None:
        kind = type(getattr(histogram, field))
        histogram = replace(histogram, **{field: kind(getattr(histogram, field) + kind(change))})
    if surely_sound(histogram):
        histogram.check()


def test_the_short_check_knows_the_common_case():
    """Ordinary distributions do not need the exact check: that is what it is for."""
    rng = np.random.default_rng(0)
    assert all(surely_sound(Histogram.of(rng.lognormal(3, 0.4, 100))) for _ in range(200))
