"""Pooling and judging runs: made-up samples with known answers."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from fleet.device.engine import RuntimeConfig
from fleet.lab.flags import FLAGS, WARNINGS
from fleet.lab.measurement import config_name, summarize
from fleet.lab.validity import rises


def test_percentiles_are_those_of_all_samples(raw_run):
    """Two runs of different speed: the median is that of the union, not the mean of medians."""
    got = summarize([raw_run([1.0] * 300), raw_run([2.0] * 200)])
    assert (got.n, got.p50_ms, got.p90_ms, got.round_p50_ms) == (500, 1.0, 2.0, (1.0, 2.0))


def test_every_percentile_has_its_bound_with_rank(raw_run):
    """Of 1..500 the bound is its own rank; 500 samples bound all three."""
    got = summarize([raw_run(np.arange(1.0, 501.0))])
    ranks = {b.rank for b in (got.p90_bound, got.p95_bound, got.p99_bound)}
    assert ranks == {466, 487, 500}
    assert got.p95_bound.value == got.p95_bound.rank


def test_the_worst_of_the_processes_counts(raw_run):
    """Peak memory is the highest, free memory the lowest; throughput is all queries over all time."""
    got = summarize(
        [
            raw_run([1.0] * 300, steady_s=1.0, peak_memory_mb=5.0, available_memory_mb=50.0, load_ms=3.0),
            raw_run([1.0] * 300, steady_s=2.0, peak_memory_mb=9.0, available_memory_mb=10.0, load_ms=5.0),
        ]
    )
    assert (got.peak_memory_mb, got.available_memory_mb, got.memory_share) == (9.0, 10.0, 0.9)
    assert (got.throughput_per_s, got.load_ms) == (200.0, 4.0)
    assert got.warnings == ("memory",)


@pytest.mark.parametrize(("peak_mb", "warned"), [(700.0, ()), (701.0, ("memory",)), (None, ())])
def test_more_than_70_percent_of_the_free_memory_warns(raw_run, peak_mb, warned):
    """The limit itself does not; and no warning without a number."""
    assert summarize([raw_run(peak_memory_mb=peak_mb)]).warnings == warned


def test_what_is_not_exposed_is_none(raw_run):
    """And stays so as JSON."""
    got = summarize([raw_run(load_memory_mb=None, available_memory_mb=None)])
    assert got.load_memory_mb is got.temp_after_c is got.memory_share is got.end_to_end_p50_ms is None
    json.dumps(asdict(got), allow_nan=False)


rng = np.random.default_rng(0)
JITTER = rng.normal(1, 0.03, 600)
RISING = JITTER * np.linspace(1, 1.3, 600)


@pytest.mark.parametrize(
    ("runs", "flags"),
    [
        ([{}], ()),
        ([{"latency_ms": [1.0] * 458}], ("too_few_queries",)),
        ([{}, {"warmup_stable": False}], ("unstable_warmup",)),
        ([{"core_share": 0.5}], ("noisy",)),
        ([{"latency_ms": RISING}], ("throttled",)),
        ([{"latency_ms": RISING[:300]}, {"latency_ms": RISING[300:]}], ("throttled",)),
        ([{"latency_ms": RISING}, {"latency_ms": RISING}], ("throttled",)),  # cools between the runs
        ([{"clock_before_mhz": 2000.0, "clock_after_mhz": 1600.0}], ("throttled",)),
        ([{"clock_before_mhz": 2000.0, "clock_after_mhz": 1900.0}], ()),
        ([{"temp_before_c": 40.0, "temp_after_c": 60.0}], ()),  # warm and as fast as before
    ],
)
def test_doubts_become_flags(raw_run, runs, flags):
    """Each on its own, and none without reason."""
    assert summarize([raw_run(**run) for run in runs]).flags == flags
    assert set(flags) <= set(FLAGS)


@pytest.mark.parametrize(
    ("latency_ms", "rising"),
    [
        (JITTER, False),
        (RISING, True),
        (RISING[::-1], False),  # a clock that is still rising makes it faster
        (JITTER * np.linspace(1, 1.05, 600), False),
        (np.where(np.arange(600) % 50 == 0, 9.0, RISING), True),  # interruptions do not hide it
        (np.where(np.arange(600) >= 550, 9.0, JITTER), False),  # nor are they it
        (JITTER * np.where(np.arange(600) < 300, 1, 1.3), False),  # a neighbour that came
        (RISING[::12], False),  # 50 samples: too few
    ],
    ids=["jitter", "rising", "falling", "little", "spikes", "end", "step", "short"],
)
def test_a_steady_rise_is_told_from_noise(latency_ms, rising):
    """Heat slows down steadily; an interruption or a neighbour does not."""
    assert rises(np.asarray(latency_ms)) is rising


def test_configs_have_names():
    """Threads, precision, memory, as the samples have them."""
    assert config_name(RuntimeConfig(threads=2, precision="low")) == "t2-low-normal"


def test_every_flag_and_warning_is_explained():
    """In a sentence without a full stop, to stand in a line."""
    assert all(text and not text.endswith(".") for text in (*FLAGS.values(), *WARNINGS.values()))
