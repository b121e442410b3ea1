"""Outputs by what they are, and small parts of an output by their own size."""

import numpy as np
import pytest

from tasks.mnn.onnx_compare import compare_output, parts

TOLERANCE = 1e-4
RNG = np.random.default_rng(0)
BOXES, SCORES = 640 * RNG.random((3, 1, 4, 50)), RNG.random((3, 1, 3, 50))


def _worst(got, want, **options):
    found = parts(
        [want] if want.ndim == 3 else list(want), tolerance=TOLERANCE, **{"lossy": False, **options}
    )
    return max((part.worst(got, want)[0] for part in found), default=0.0)


def test_outputs_are_compared_by_what_they_are():
    """Integers count by share, NaN in the reference is skipped, infinity may be a large number."""
    assert (
        compare_output(np.array([1, 2, 3, 9], np.int32), np.array([1, 2, 3, 4]), plain=True).max_rel_error
        == 0.25
    )
    want = np.array([np.nan, np.inf, -np.inf, 1.0, 2.0], np.float32)
    got = np.array([7.0, 3e38, -np.inf, 1.0, 2.0], np.float32)
    assert compare_output(got, want, plain=True).max_rel_error == 0
    got[1] = 5.0
    assert compare_output(got, want, plain=True).max_rel_error == np.inf
    assert compare_output(got, want, plain=False).max_rel_error == 0
    assert compare_output(np.zeros((2, 1)), np.zeros((1, 2)), plain=True).max_rel_error == np.inf


def test_an_output_that_hardly_varies_for_one_input_is_measured_in_what_it_usually_varies():
    """The noise of a blank picture is no error; a wrong value still is."""
    want = np.float32([1e-7, 2e-7, -1e-7])
    assert compare_output(-want, want, plain=True).max_rel_error > 1
    assert compare_output(-want, want, plain=True, least_range=5.0).max_rel_error < 1e-6
    assert compare_output(want + 1, want, plain=True, least_range=5.0).max_rel_error == pytest.approx(0.2)
    assert compare_output(want * np.nan, want, plain=True, least_range=5.0).max_rel_error == np.inf


@pytest.mark.parametrize("axis", [1, 2])
def test_scores_beside_boxes_are_measured_by_their_own_size(axis):
    """An error of 0.01 in scores is 1.6e-5 of the boxes' range; it is found wherever the parts are joined."""
    if axis == 2:
        want = np.concatenate([BOXES[0].transpose(0, 2, 1), SCORES[0].transpose(0, 2, 1)], 2)
    else:
        want = np.concatenate([BOXES[0], SCORES[0]], 1)
    got = want.copy()
    got.swapaxes(1, axis)[:, 5] += 0.01
    assert compare_output(got, want, plain=True).max_rel_error < TOLERANCE
    assert _worst(got, want) > TOLERANCE
    assert _worst(got, want, lossy=True) == pytest.approx(0.01, rel=0.1)
    assert _worst(want + 1e-4, want) < TOLERANCE  # what float32 leaves of 640


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_part_is_named(axis):
    """Index and axis of the worst slice are told."""
    want = np.ones((4, 5, 6))
    want.swapaxes(0, axis)[2] *= 1e-2
    got = want.copy()
    got.swapaxes(0, axis)[2] *= 1.5
    (part,) = parts([want], tolerance=TOLERANCE, lossy=False)
    assert part.worst(got, want)[1].startswith(f"index 2 of axis {axis}")


def test_dead_slices_are_no_parts():
    """A slice of rounding noise beside real values may be anything of its own size."""
    want = RNG.standard_normal((1, 8, 30))
    for size in (0.0, 1e-9, 1e-7):
        want[:, 3] = size * RNG.standard_normal(30)
        got = want + 5e-7 * np.abs(want).max() * RNG.uniform(-1, 1, want.shape)
        assert _worst(got, want) < TOLERANCE


def test_noise_that_the_large_slices_have_too_is_no_error_of_a_small_one():
    """A logit that its bias alone makes small carries the error of the features, as all logits do."""
    want = RNG.standard_normal((1, 10)).astype(np.float32)
    want[0, 4] = 1e-3
    noise = RNG.uniform(-1, 1, want.shape) * 2e-5
    assert compare_output(want + noise, want, plain=True).max_rel_error < TOLERANCE
    assert _worst((want + noise)[:, :, None], want[:, :, None]) < TOLERANCE


def test_slices_without_a_gap_are_one_part():
    """The logits of a classifier and the rows of a picture differ smoothly: only a factor of 10 divides."""
    smooth = np.geomspace(1e-3, 1, 40)[None, :, None] * RNG.uniform(0.9, 1, (1, 40, 7))
    assert parts([smooth], tolerance=TOLERANCE, lossy=False) == ()
    assert parts([smooth > 0], tolerance=TOLERANCE, lossy=False) == ()
    assert parts([], tolerance=TOLERANCE, lossy=False) == ()


def test_small_probabilities_may_move_in_few_bits():
    """In few bits, a class that is never seen may come out at 0.01 instead of 0.0001, not at 0.1."""
    want = np.repeat(np.array([[0.7, 0.3, 1e-4], [0.4, 0.6, 1e-4]])[:, :, None], 8, axis=2)
    assert (
        parts(list(want[:, None, :, 0]), tolerance=TOLERANCE, lossy=True) == ()
    )  # a vector shares one noise
    moved = want + np.array([0, 0, 0.01])[:, None]
    assert _worst(moved, want, lossy=True) == pytest.approx(0.01 / 0.07)
    assert _worst(want + np.array([0, 0, 0.1])[:, None], want, lossy=True) == pytest.approx(0.1 / 0.07)


def test_one_small_value_by_chance_is_no_small_part():
    """Sizes are taken over all inputs: a logit that is near zero for one of them is not measured by that."""
    wants = [np.array([[1.0, -2.0, 1e-4]]), np.array([[-1.0, 1.5, 2.0]])]
    assert parts(wants, tolerance=TOLERANCE, lossy=False) == ()
