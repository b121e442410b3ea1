"""The switch between two models, and the priority of the inference thread."""

import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.device.degrade.priority import lower_thread_priority
from fleet.device.degrade.switch import MOST_AGE_S, SmoothSwitch, softmax
from fleet.device.errors import EngineError, UserError

LABELS = ("a", "b", "c")
IMAGE = np.zeros((2, 2, 3), np.uint8)
LOGITS = {"full": np.array([4.0, 0, 0], np.float32), "light": np.array([0, 4.0, 0], np.float32)}


class Both:
    """Two models whose logits a test sets, on a clock of its own."""

    def __init__(self, *, labels=None, blend_frames=5):
        self.logits, self.ran, self.now_s = dict(LOGITS), [], 0.0
        models = {model: lambda _image, model=model: self._run(model) for model in LOGITS}
        labels = labels or dict.fromkeys(LOGITS, LABELS)
        self.switch = SmoothSwitch(models, labels, blend_frames=blend_frames, clock=lambda: self.now_s)

    def _run(self, model):
        self.ran.append(model)
        return self.logits[model]

    def run(self, *wanted):
        outputs = []
        for model in wanted:
            outputs.append(self.switch.run(model, IMAGE))
            self.now_s += 1 / 15
        return np.array(outputs)


def test_a_change_comes_in_steps():
    """Straight from the one to the other in six equal steps, and only one model runs a frame."""
    both = Both()
    got = both.run("full", *["light"] * 7)
    full, light = softmax(LOGITS["full"].astype(float)), softmax(LOGITS["light"].astype(float))
    want = [full + (light - full) * k / 6 for k in range(7)]
    np.testing.assert_allclose(got, [*want, light], atol=1e-12)
    assert both.ran == ["full", *["light"] * 7]


def test_no_change_no_delay():
    """The first output, and each of a model that stays, is its own."""
    both = Both()
    first = both.run("light")[0]
    both.logits["light"] = np.array([0, 0, 9.0], np.float32)
    np.testing.assert_allclose(both.run("light")[0], softmax(np.array([0, 0, 9.0])))
    np.testing.assert_allclose(first, softmax(LOGITS["light"].astype(float)))


def test_after_a_pause_nothing_is_blended():
    """What was seen before a pause is another scene."""
    both = Both()
    both.run("full")
    both.now_s += MOST_AGE_S + 0.1
    np.testing.assert_allclose(both.run("light")[0], softmax(LOGITS["light"].astype(float)))


def test_zero_frames_switch_at_once():
    """The blend can be turned off."""
    np.testing.assert_allclose(
        Both(blend_frames=0).run("full", "light")[1], softmax(LOGITS["light"].astype(float))
    )


@given(
    wanted=st.lists(st.sampled_from(["full", "light"]), min_size=1, max_size=40),
    data=st.data(),
    blend=st.integers(0, 8),
)
@settings(deadline=None)
def test_always_probabilities(wanted, data, blend):
    """Whatever the models say and however often they change: finite, in 0..1, summing to 1."""
    both = Both(blend_frames=blend)
    for model in wanted:
        both.logits[model] = np.array(
            data.draw(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=3, max_size=3)), np.float32
        )
        (got,) = both.run(model)
        assert np.isfinite(got).all()
        assert got.min() >= 0
        assert abs(got.sum() - 1) < 1e-9


@given(wanted=st.lists(st.sampled_from(["full", "light"]), min_size=2, max_size=40), blend=st.integers(1, 8))
@settings(deadline=None)
def test_no_step_is_larger_than_a_blends(wanted, blend):
    """With a still scene, outputs never move by more than a step of the whole way, back and forth too."""
    got = Both(blend_frames=blend).run(*wanted)
    whole = np.abs(softmax(LOGITS["full"].astype(float)) - softmax(LOGITS["light"].astype(float))).max()
    assert np.abs(np.diff(got, axis=0)).max() <= whole / (blend + 1) + 1e-9


def test_what_comes_out_is_the_callers():
    """Writing into an output does not reach the next blend."""
    both = Both()
    both.switch.run("full", IMAGE)[:] = 99
    assert both.switch.run("light", IMAGE).max() <= 1


@pytest.mark.parametrize(
    "labels",
    [
        {"full": ("a", "b", "c"), "light": ("a", "c", "b")},
        {"full": ("a", "b", "c"), "light": ("a", "b")},
        {"full": ("a", "b", "c")},
        {"full": (), "light": ()},
    ],
)
def test_labels_must_agree(labels):
    """Same names in the same order, or no switch at all."""
    with pytest.raises(UserError, match="labels"):
        Both(labels=labels)


@pytest.mark.parametrize("bad", [[np.nan, 0, 0], [np.inf, 0, 0], [1, 2], [[1, 2, 3]], []])
def test_an_output_that_is_none(bad):
    """It raises, and the next good output stands as if it had not been."""
    both = Both()
    before = both.run("full")[0]
    both.logits["light"] = np.array(bad, np.float32)
    with pytest.raises(EngineError, match="light model"):
        both.run("light")
    np.testing.assert_allclose(both.run("full")[0], before)


def test_a_low_priority_is_the_threads_alone():
    """The thread that asks gets it; the others keep theirs."""
    main_before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    got = []

    def work():
        got.append(lower_thread_priority(15))
        got.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert (got[0].nice, got[0].refused, got[1]) == (15, "", 15)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == main_before


def test_a_refusal_is_reported():
    """A thread that does not exist, and a value that does not: said, not raised."""
    refused = lower_thread_priority(10, thread_id=2**22 + 1)
    assert refused.nice is None
    assert "No such process" in refused.refused
    got = []
    thread = threading.Thread(target=lambda: got.append(lower_thread_priority(99)))
    thread.start()
    thread.join(20)
    assert (got[0].nice, got[0].refused) == (19, "the system made it 19")
