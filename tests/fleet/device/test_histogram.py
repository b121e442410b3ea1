"""Exponential histograms: how far a quantile may be off, what merging keeps, and what is refused."""

import json
import math
import sys
from dataclasses import asdict, replace
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.device.histogram import (
    BASE,
    MOST_BUCKETS,
    RELATIVE_ERROR,
    Histogram,
    bucket_index,
    merged,
)

ANY = st.floats(allow_nan=False, allow_infinity=False)
NEAR = st.one_of(  # within 64 powers of two of each other: nothing is too near to zero for a bucket
    st.just(0.0),
    st.floats(1e-6, 1e6),
    st.floats(-1e6, -1e-6),
    st.sampled_from([BASE**k for k in range(-40, 40)]),
)
RANKS = st.integers(0, 1000)


@given(st.lists(NEAR, min_size=1, max_size=300), RANKS)
def test_a_quantile_is_within_the_relative_error_of_the_value_of_that_rank(values, thousandth):
    """For every q: against the sorted values themselves."""
    rank = max(1, math.ceil(Fraction(thousandth, 1000) * len(values)))
    true = float(np.sort(values)[rank - 1])
    estimate = Histogram.of(values).quantile(thousandth / 1000)
    assert abs(estimate - true) <= RELATIVE_ERROR * abs(true) * (1 + 1e-12)


@given(st.lists(ANY, min_size=1, max_size=100), RANKS)
def test_values_of_any_size_keep_the_bound_or_count_as_zero(values, thousandth):
    """Subnormal and huge: what is 64 powers of two below the largest of its sign is taken for 0."""
    histogram = Histogram.of(values)
    histogram.check()
    rank = max(1, math.ceil(Fraction(thousandth, 1000) * len(values)))
    true = float(np.sort(values)[rank - 1])
    lost = max(sys.float_info.min, max(abs(value) for value in values) * 2.0**-63)
    allowed = abs(true) if abs(true) < lost else RELATIVE_ERROR * abs(true) * (1 + 1e-12)
    assert abs(histogram.quantile(thousandth / 1000) - true) <= allowed


@given(st.lists(st.lists(ANY, max_size=40), max_size=6))
def test_merging_parts_is_the_histogram_of_all_values(parts):
    """Field by field; only the sum is rounded once more."""
    pooled = Histogram.of([value for part in parts for value in part])
    together = merged(Histogram.of(part) for part in parts)
    if pooled is None:
        assert together is None
        return
    slack = 1e-12 * sum(min(abs(value), 1e300) for part in parts for value in part) + 1e-320
    if all(abs(value) < 1e300 for part in parts for value in part):
        assert abs(together.sum - pooled.sum) <= slack
    assert replace(together, sum=0.0) == replace(pooled, sum=0.0)
    together.check()


@given(
    st.permutations([3e-310, 0.0, -0.0, 1e300, -1e300, 1e-7, 0.1, 0.2, 0.3, -5.0, 1.7e308, 1.7e308, -1.7e308])
)
def test_order_does_not_matter(values):
    """Not even for the sum, whose parts overflow in some orders."""
    fixed = Histogram.of(sorted(values))
    assert Histogram.of(values) == fixed
    assert json.dumps(asdict(Histogram.of(values))) == json.dumps(asdict(fixed))


@given(st.lists(ANY, min_size=1, max_size=50))
def test_json_brings_back_every_bit(values):
    """Through the standard library and through the parser of the gateway."""
    histogram = Histogram.of(values)
    text = json.dumps(asdict(histogram), allow_nan=False)
    assert msgspec.json.decode(text, type=Histogram) == histogram
    assert float(json.loads(text)["sum"]).hex() == histogram.sum.hex()


def test_bounds_belong_to_the_bucket_below():
    """Bucket i holds (BASE**i, BASE**(i + 1)]: at every power of two, exactly, and one double above it."""
    powers = np.ldexp(1.0, np.arange(-1022, 1024))
    expected = 16 * np.arange(-1022, 1024) - 1
    np.testing.assert_array_equal(bucket_index(powers), expected)
    np.testing.assert_array_equal(bucket_index(np.nextafter(powers, np.inf)), expected + 1)
    np.testing.assert_array_equal(bucket_index(np.nextafter(powers, 0)[1:]), expected[1:])


@pytest.mark.parametrize("k", range(1, 16))
def test_the_bounds_within_an_octave_are_exact(k):
    """Of the doubles around 2**(k/16), those whose 16th power is at most 2**k are in the bucket below."""
    near = [2 ** (k / 16)]
    for _ in range(3):
        near = [np.nextafter(near[0], 0), *near, np.nextafter(near[-1], 2)]
    for value in near:
        below = Fraction(float(value)) ** 16 <= 2**k
        assert int(bucket_index(np.array([value]))[0]) == (k - 1 if below else k)


def test_no_values_no_histogram():
    """Nothing is None; a NaN or an infinity is the caller's to count."""
    assert Histogram.of([]) is None
    assert merged([]) is merged([None]) is None
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="NaN or infinite"):
            Histogram.of([1.0, value])


def test_smallest_and_largest_are_exact():
    """P0 and P100 are recorded values; P99 of 100 values is the 99th."""
    histogram = Histogram.of(np.arange(1.0, 101.0))
    assert (histogram.quantile(0), histogram.quantile(1)) == (1.0, 100.0)
    assert histogram.quantile(0.99) == pytest.approx(99, rel=RELATIVE_ERROR)
    assert histogram.quantile(0.07) == pytest.approx(7, rel=RELATIVE_ERROR)
    assert histogram.mean == 50.5
    for q in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="0 to 1"):
            histogram.quantile(q)


GOOD = Histogram.of([1.5, 2.0, 40.0, 0.0, -3.0, -3.1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 7}, "hold 6 values"),
        ({"count": 0}, "count is 0"),
        ({"count": 2**60}, "count is"),
        ({"zero_count": -1, "count": 4}, "zero_count is -1"),
        ({"sum": math.nan}, "sum is nan"),
        ({"sum": 1e6}, "not between"),
        ({"min": math.inf}, "min is inf"),
        ({"min": 41.0}, "above max"),
        ({"min": -2.0}, "first bucket"),
        ({"min": -30.0}, "first bucket"),
        ({"max": 50.0}, "last bucket"),
        ({"max": 30.0}, "last bucket"),
        ({"counts": (0, *GOOD.counts)}, "is 0"),
        ({"counts": (*GOOD.counts, 0)}, "is 0"),
        ({"counts": (2, -1, 2)}, "holds -1"),
        ({"counts": (1,) * (MOST_BUCKETS + 1)}, "1025 buckets"),
        ({"offset": 10**9}, "begins at bucket"),
        ({"offset": -(10**9)}, "begins at bucket"),
        ({"negative_counts": ()}, "offset of no"),
    ],
)
def test_foreign_histograms_that_no_values_give_are_refused(change, message):
    """Each with what is wrong."""
    GOOD.check()
    with pytest.raises(ValueError, match=message):
        replace(GOOD, **change).check()


@settings(max_examples=300)
@given(
    st.builds(
        Histogram,
        count=st.integers(0, 20),
        sum=ANY,
        min=ANY,
        max=ANY,
        zero_count=st.integers(0, 3),
        offset=st.integers(-40, 40),
        counts=st.lists(st.integers(0, 4), max_size=4).map(tuple),
        negative_offset=st.integers(-40, 40),
        negative_counts=st.lists(st.integers(0, 4), max_size=4).map(tuple),
    )
)
def test_a_check_passes_or_refuses_and_never_crashes(histogram):
    """On arbitrary numbers: ValueError and no other; what passes has quantiles."""
    if _refused(histogram):
        return
    assert histogram.min <= histogram.quantile(0.5) <= histogram.max


def _refused(histogram):
    try:
        histogram.check()
    except ValueError:
        return True
    return False
