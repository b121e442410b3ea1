"""From records to windows: what is counted where, clocks that jump, pauses, and what is anomalous."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from telling import ENVIRONMENT, READING, VERSIONS, builder, now, records

from fleet.device.histogram import Histogram, merged
from fleet.device.monitor.encoding import encode_batch, encode_window
from fleet.device.monitor.loss import LossCounter
from fleet.device.monitor.ring import ABNORMAL, ABSENT, DONE, FAILED, SKIPPED
from fleet.device.monitor.window import throughput_hz
from fleet.device.release import AnomalyLimits
from fleet.device.sensors import Reading
from fleet.device.wire import Batch, Loss, Window


def windows_of(made, *, loss=None, limits=None, reading=READING):
    build = builder(loss, limits)
    closed = build.add(made, reading, now())
    last = build.close(now())
    return [*closed, *([last] if last else [])]


@given(st.lists(st.integers(0, 130), max_size=8))
def test_how_the_records_arrive_does_not_matter(cuts):
    """In any pieces: the same windows as in one."""
    n = sum(cuts)
    rng = np.random.default_rng(n)
    made = records(n, latency_ms=rng.lognormal(3, 0.3, n), kind=rng.choice([DONE, FAILED, SKIPPED], n))
    build, pieces, at = builder(), [], 0
    for cut in cuts:
        pieces += build.add(made[at : at + cut], READING, now())
        at += cut
    last = build.close(now())
    pieces += [last] if last else []
    whole = windows_of(made)
    assert [w.performance for w in pieces] == [w.performance for w in whole]
    assert sum(w.performance.inferences + w.performance.skipped_frames for w in whole) == n
    assert all(w.performance.inferences == 100 for w in whole[:-1])
    pooled = merged(w.performance.latency_ms for w in whole)
    done = made[made["kind"] == DONE]["latency_ms"]
    assert pooled is None if not len(done) else pooled.counts == Histogram.of(done).counts


def test_failures_and_skipped_frames_have_no_latency():
    """Failures are inferences, skipped frames are not."""
    kinds = np.array([DONE, FAILED, SKIPPED, DONE, ABNORMAL])
    (made,) = windows_of(records(5, kind=kinds, latency_ms=np.array([1.0, ABSENT, ABSENT, 2.0, 3.0])))
    assert (made.performance.inferences, made.performance.failures, made.performance.skipped_frames) == (
        4,
        1,
        1,
    )
    assert (made.performance.latency_ms.count, made.performance.latency_ms.sum) == (3, 6.0)
    assert made.quality.abnormal_outputs == 1


def test_what_is_not_finite_is_counted_and_left_out():
    """NaN and infinity, of records and of sensors; what was not measured is neither."""
    made = records(4, latency_ms=np.array([10.0, math.nan, math.inf, 20.0]))
    made["confidence"] = [math.nan, ABSENT, 0.5, 0.7]
    (window,) = windows_of(made, reading=Reading(temperature_c=math.nan, power_w=2.0))
    assert window.loss == Loss(not_finite=4)
    assert window.performance.latency_ms.count == window.quality.confidence.count == 2
    assert window.quality.input_mean is None
    assert window.resource.temperature_c is None
    assert window.resource.power_w.sum == 2.0
    encode_window(window)  # refuses NaN


def test_loss_elsewhere_is_told_once():
    """By the next window, and not by the one after."""
    loss = LossCounter()
    loss.add(Loss(overwritten_records=7, dropped_windows=1))
    first, second = windows_of(records(150), loss=loss)
    assert first.loss == Loss(overwritten_records=7, dropped_windows=1)
    assert second.loss == Loss()


def test_a_loss_without_inferences_is_still_told():
    """At the end: a window without inferences, rather than silence; in between the next window tells."""
    loss = LossCounter()
    loss.add(Loss(overwritten_records=7))
    assert builder(loss).close(now()) is None
    window = builder(loss).close(now(), last=True)
    assert (window.performance.inferences, window.loss.overwritten_records) == (0, 7)


@pytest.mark.parametrize("jump_ms", [3_600_000, -3_600_000, -1_800_000_000_000])
def test_a_jump_of_the_wall_clock_is_told_and_spoils_no_duration(jump_ms):
    """An hour ahead, an hour back, and to 1970: start before end, and the rate is the other clock's."""
    build = builder()
    build.add(records(50), READING, now(forward_ms=1_000_490, wall_ms=1_800_000_000_490))
    (window,) = build.add(
        records(50, first=50), READING, now(forward_ms=1_000_990, wall_ms=1_800_000_000_990 + jump_ms)
    )
    assert window.clock_jump_ms == jump_ms
    assert window.end_ms == 1_800_000_000_990 + jump_ms
    assert window.start_ms == max(0, window.end_ms - 990)
    assert window.performance.throughput_hz == pytest.approx(100.0)
    assert window.uptime_ms == 1_000_990
    (after,) = build.add(
        records(100, first=100), READING, now(forward_ms=1_001_990, wall_ms=1_800_000_001_990 + jump_ms)
    )
    assert after.clock_jump_ms == 0


def test_a_pause_is_not_a_low_rate():
    """Two hours of sleep between two halves at 100 Hz are still 100 Hz; a slow but steady camera is slow."""
    halves = np.concatenate([records(50), records(50)])["time_ns"]
    halves[50:] += halves[49] - halves[0] + 7200 * 10**9
    assert throughput_hz(halves) == pytest.approx(100.0)
    assert throughput_hz(records(10, period_ms=10_000)["time_ns"]) == pytest.approx(0.1)
    assert throughput_hz(records(1)["time_ns"]) is None
    assert throughput_hz(np.zeros(5, np.int64)) is None


def test_anomalies_by_the_fixed_limits():
    """Above 200 ms, above 500 MiB, below 0.3; the limit itself is none."""
    made = records(5, latency_ms=np.array([200.0, 200.1, 10.0, 10.0, math.nan]))
    made["confidence"] = [0.3, 0.29, 0.0, ABSENT, math.nan]
    (window,) = windows_of(made, reading=Reading(memory_mb=500.1))
    assert window.anomalies == {"latency": 1, "confidence": 2, "memory": 1}
    (window,) = windows_of(records(5), reading=Reading(memory_mb=500.0))
    assert window.anomalies == {}


def test_twice_the_p99_of_the_windows_before_is_anomalous():
    """Only when there were a hundred inferences; the window itself does not hide it."""
    made = records(300, latency_ms=20.0)
    made["latency_ms"][[50, 150, 250]] = 45.0
    assert [w.anomalies for w in windows_of(made)] == [{}, {"latency": 1}, {"latency": 1}]
    made["latency_ms"][:100] = 30.0
    assert [w.anomalies for w in windows_of(made)] == [{}, {}, {}]
    few = builder()
    few.add(records(50), READING, now())
    few.close(now())
    assert few.add(records(100, latency_ms=100.0), READING, now())[0].anomalies == {}


def test_the_p99_is_no_lower_quantile_and_of_the_last_windows():
    """Five slow ones of a hundred make 150 ms usual; ten fast windows later it is not."""
    usual = np.r_[np.full(95, 10.0), np.full(5, 100.0)]
    fast, slow = np.full(100, 10.0), np.r_[np.full(99, 10.0), 150.0]
    after = windows_of(records(200, latency_ms=np.r_[usual, slow]))
    assert [w.anomalies for w in after] == [{}, {}]
    later = windows_of(records(1200, latency_ms=np.r_[usual, np.tile(fast, 10), slow]))
    assert later[-1].anomalies == {"latency": 1}


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 120)), max_size=8), st.integers(1, 12))
@example([(False, 95), (True, 10), (False, 1)], 10)
def test_failures_in_a_row_count_over_the_bounds_of_windows(runs, limit):
    """Each failure that at least limit - 1 failures came directly before; against a plain loop."""
    failed = [fails for fails, length in runs for _ in range(length)]
    expected = in_a_row = 0
    for one in failed:
        in_a_row = in_a_row + 1 if one else 0
        expected += in_a_row >= limit
    made = records(len(failed), kind=np.where(np.array(failed, bool), FAILED, DONE))
    found = windows_of(made, limits=AnomalyLimits(consecutive_failures=limit))
    assert sum(w.anomalies.get("failures", 0) for w in found) == expected


def test_the_json_of_a_window_brings_it_back():
    """Every field and bit, by the parser of the gateway; and only fields of the schema are in it."""
    rng = np.random.default_rng(0)
    made = records(100, latency_ms=rng.lognormal(3, 1, 100), label=rng.integers(0, 5, 100))
    made["input_mean"], made["confidence"] = rng.normal(size=(2, 100)) * 1e-3 / 3
    (window,) = windows_of(made)
    assert msgspec.json.decode(encode_window(window), type=Window) == window
    batch = msgspec.json.decode(encode_batch([encode_window(window)] * 2, 12), type=Batch)
    assert batch == Batch(schema=1, sent_ms=12, windows=(window, window))
    assert (window.versions, window.environment.variant) == (VERSIONS, ENVIRONMENT.variant)


def test_a_long_pause_with_skipped_frames_holds_no_memory():
    """Frames are counted, not kept; nor are the readings taken meanwhile."""
    build = builder()
    for _ in range(1000):
        build.add(records(10, kind=SKIPPED), Reading(memory_mb=1.0), now())
    window = build.close(now())
    assert (window.performance.skipped_frames, window.performance.inferences) == (10_000, 0)
    assert window.resource.memory_mb is None
