"""The comparison behind parity: definitions at the edges, and properties over arbitrary floats."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tasks.mnn.compare import Comparison, combine, compare

finite_f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
any_f32 = st.floats(width=32)


def arrays(elements, *, min_side=1):
    return hnp.arrays(
        np.float32, hnp.array_shapes(max_dims=3, max_side=5, min_side=min_side), elements=elements
    )


@st.composite
def pairs(draw):
    want = draw(arrays(finite_f32))
    return draw(hnp.arrays(np.float32, want.shape, elements=finite_f32)), want


def test_error_is_relative_to_the_range_of_the_reference():
    """0.5 off on an output that spans 10 is an error of 0.05, wherever it happens."""
    want = np.float32([-4, 0, 6])
    result = compare(want + np.float32([0, 0.5, 0]), want)
    assert result.max_abs_error == 0.5
    assert result.max_rel_error == pytest.approx(0.05)
    assert result.finite_count == 3


def test_cosine_is_the_angle():
    """(1, 0) against (1, 1) is 45 degrees; opposite vectors give -1."""
    assert compare(np.float32([1, 0]), np.float32([1, 1])).cosine == pytest.approx(math.sqrt(0.5))
    assert compare(np.float32([-2, -4]), np.float32([1, 2])).cosine == pytest.approx(-1)


@pytest.mark.parametrize(
    ("want", "got", "rel_error"),
    [
        pytest.param([5.0], [5.5], 0.1, id="one value: relative to its size"),
        pytest.param([2.0, 2.0], [2.0, 1.0], 0.5, id="constant: relative to its size"),
        pytest.param([0.0, 0.0], [0.0, 1e-3], 1e-3, id="all zero: absolute"),
        pytest.param([1000.0, 1000.001], [1000.0, 1001.001], 0.1, id="nearly constant: 1 % of its size"),
        pytest.param([0.0, 1e-9], [0.0, 0.0], 1.0, id="tiny values flushed to zero are wholly wrong"),
    ],
)
def test_outputs_without_a_useful_range(want, got, rel_error):
    """A constant, zero or nearly constant reference still has a meaningful error."""
    assert compare(np.float64(got), np.float64(want)).max_rel_error == pytest.approx(rel_error)


def test_empty_arrays_of_one_shape_are_equal_and_prove_nothing():
    """No elements: no error, and a count that shows it."""
    result = compare(np.zeros((0, 4), np.float32), np.zeros((0, 4), np.float32))
    assert (result.max_rel_error, result.finite_count) == (0.0, 0)


def test_shape_mismatch_names_both_shapes():
    """Arrays that would broadcast are still different outputs."""
    result = compare(np.zeros((1, 3), np.float32), np.zeros((3,), np.float32))
    assert result.max_rel_error == math.inf
    assert result.reason == "shape (1, 3), expected (3,)"


@pytest.mark.parametrize(
    ("got", "equal"),
    [
        ([math.nan, math.inf, -math.inf, 1.0], True),
        ([0.0, math.inf, -math.inf, 1.0], False),
        ([math.nan, -math.inf, -math.inf, 1.0], False),
        ([math.nan, math.inf, -math.inf, math.nan], False),
    ],
)
def test_non_finite_values_must_stand_in_the_same_places(got, equal):
    """NaN meets NaN and infinity meets its own sign; anything else no tolerance admits."""
    want = np.float32([math.nan, math.inf, -math.inf, 1.0])
    result = compare(np.float32(got), want)
    assert (result.max_rel_error == 0) is equal
    assert (result.max_rel_error == math.inf) is not equal
    assert bool(result.reason) is not equal
    assert result.finite_count == 1


def test_all_nan_proves_nothing():
    """Two outputs of nothing but NaN are equal, with no element that counts."""
    nan = np.full((2, 2), np.nan, np.float32)
    assert compare(nan, nan) == Comparison(max_abs_error=0.0, max_rel_error=0.0, cosine=1.0, finite_count=0)


def test_integers_and_booleans_are_right_or_wrong():
    """A class index off by one is wrong however large the range; only the width may differ."""
    want = np.int64([0, 1000])
    assert compare(np.int32([0, 1000]), want).max_rel_error == 0
    off = compare(np.int32([0, 999]), want)
    assert (off.max_abs_error, off.max_rel_error) == (1.0, math.inf)
    assert off.reason == "1 of 2 int64 values differ"
    assert compare(np.int32([1, 0]), np.array([True, False])).max_rel_error == 0
    assert compare(np.int64([2**60]), np.int64([2**60 + 1])).max_abs_error == 1.0
    assert compare(np.float32([math.nan]), np.int64([1])).max_rel_error == math.inf


def test_values_at_the_limit_of_float64_do_not_pass():
    """An overflowing difference is infinite, an overflowing range does not hide an error."""
    want = np.float64([-1.7e308, 1.7e308])
    assert compare(want, want).max_rel_error == 0
    assert compare(np.float64([-1.7e308, 0]), want).max_rel_error == math.inf


@given(arrays(any_f32, min_side=0))
def test_everything_equals_itself(values):
    """No float32 array, NaN and infinity included, differs from itself."""
    result = compare(values, values)
    assert (result.max_abs_error, result.max_rel_error) == (0.0, 0.0)
    assert result.cosine == pytest.approx(1.0)


@given(pairs())
def test_zero_error_means_equal(pair):
    """The error is zero exactly when the arrays are equal, and the cosine stays within -1..1."""
    got, want = pair
    result = compare(got, want)
    assert (result.max_rel_error == 0) == np.array_equal(got, want)
    assert -1 <= result.cosine <= 1


@given(pairs(), st.integers(-20, 20))
def test_relative_error_ignores_the_unit(pair, exponent):
    """Scaling both sides by a power of two leaves the relative error and the cosine as they are."""
    got, want = (side.astype(np.float64) for side in pair)
    before, after = compare(got, want), compare(got * 2.0**exponent, want * 2.0**exponent)
    if np.any(want):
        assert after.max_rel_error == pytest.approx(before.max_rel_error)
    assert after.cosine == pytest.approx(before.cosine)


@given(pairs(), pairs())
def test_combined_is_never_better_than_any_part(first, second):
    """Combining keeps the worst of each measure and adds up what was compared."""
    a, b = compare(*first), compare(*second)
    both = combine([a, b])
    assert both.max_rel_error == max(a.max_rel_error, b.max_rel_error)
    assert both.cosine == min(a.cosine, b.cosine)
    assert both.finite_count == first[0].size + second[0].size


def test_record_is_strict_json_and_still_compares_rightly():
    """Infinity is written as the largest float: valid JSON, above every tolerance."""
    record = compare(np.float32([math.nan]), np.float32([1])).to_dict()
    text = json.dumps(record, allow_nan=False)
    assert json.loads(text)["max_rel_error"] > 1e300
