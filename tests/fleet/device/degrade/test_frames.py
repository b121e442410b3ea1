"""Which frames are inferred, and what is answered for the others."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.device.degrade.frames import LATE_S, MOST_AGE_S, SLACK, Frames, LatestFrame, Taken
from fleet.device.degrade.governor import Decision

BLACK = np.zeros((4, 4, 3), np.uint8)


def decision(fps=15.0):
    return Decision(fps=fps, model="full", paused=fps == 0, critical_only=False, reasons=())


def numbered(number):
    """A frame that says its number."""
    return np.full((2, 2, 3), number % 256, np.uint8)


class Camera:
    """A stream on a clock of its own, answered frame by frame."""

    def __init__(self, *, tracker=None, infer=lambda frame: int(frame[0, 0, 0])):
        self.now_s = 1000.0
        self.frames = Frames(infer, tracker=tracker, clock=lambda: self.now_s)

    def play(self, hz, seconds, fps=15.0):
        start_s = self.now_s
        answers = []
        for number in range(round(hz * seconds)):
            self.now_s = start_s + number / hz
            answers.append(self.show(numbered(number), fps))
        self.now_s = start_s + seconds
        return answers

    def show(self, frame, fps=15.0, *, age_s=0.0):
        return self.frames.answer(Taken(frame=frame, captured_s=self.now_s - age_s), decision(fps))


@pytest.mark.parametrize(
    ("hz", "fps", "inferred"),
    [
        (30, 15, 150),
        (30, 10, 100),
        (30, 5, 50),
        (25, 15, 150),
        (60, 15, 150),
        (15, 15, 150),
        (10, 15, 100),
        (30, 7.5, 75),
    ],
)
def test_the_rate_is_the_decisions(hz, fps, inferred):
    """Over ten seconds; a camera slower than the rate is inferred whole."""
    camera = Camera()
    answers = camera.play(hz, 10, fps)
    assert abs(camera.frames.counts["inferred"] - inferred) <= 1
    assert len(answers) == sum(camera.frames.counts.values()) == hz * 10


def test_in_between_the_last_result_is_repeated():
    """With how old it is, and saying so."""
    answers = Camera().play(30, 0.2)
    assert [a.origin for a in answers[:4]] == ["inferred", "repeated", "inferred", "repeated"]
    assert [a.result for a in answers[:4]] == [0, 0, 2, 2]
    assert [round(a.age_s, 3) for a in answers[:4]] == [0, 0.033, 0, 0.033]


class Counting:
    """A tracker that adds one, until it is lost."""

    def __init__(self, lost_after=99):
        self.lost_after, self.began, self.updates = lost_after, 0, 0

    def inferred(self, frame, result):
        self.began += 1
        self.updates = 0

    def update(self, frame, last):
        self.updates += 1
        return None if self.updates > self.lost_after else last + 1


def test_a_tracker_carries_the_result():
    """From frame to frame; each inference begins anew."""
    answers = Camera(tracker=Counting()).play(60, 0.1)
    assert [a.origin for a in answers] == ["inferred", *["tracked"] * 3, "inferred", "tracked"]
    assert [a.result for a in answers] == [0, 1, 2, 3, 4, 5]


def test_a_tracker_that_is_lost():
    """The last that it knew is repeated."""
    answers = Camera(tracker=Counting(lost_after=1)).play(60, 0.06)
    assert [(a.origin, a.result) for a in answers] == [
        ("inferred", 0),
        ("tracked", 1),
        ("repeated", 1),
        ("repeated", 1),
    ]


def test_late_frames_are_dropped():
    """Frames that are over, out of order or of the future: none is inferred, none harms the next."""
    camera = Camera()
    assert camera.show(numbered(1)).origin == "inferred"
    camera.now_s += 0.2
    for wrong_s in (LATE_S + 0.01, -LATE_S - 1, float("nan"), float("-inf"), float("inf")):
        answer = camera.show(numbered(2), age_s=wrong_s)
        assert (answer.late, answer.origin, answer.result) == (True, "repeated", 1), wrong_s
    assert camera.show(numbered(3)).result == 3
    assert camera.show(numbered(4)).late  # the same time again
    assert camera.frames.late == 6


def test_nothing_is_repeated_for_long():
    """Without frames in time the answer becomes none, not a memory."""
    camera = Camera()
    camera.show(numbered(7))
    camera.now_s += MOST_AGE_S + 0.1
    fps = 0.5
    answer = camera.show(numbered(8), fps)
    assert (answer.origin, answer.result) == ("none", None)


def test_paused():
    """Nothing is inferred or repeated; afterwards the first frame is."""
    camera = Camera()
    camera.show(numbered(1))
    camera.now_s += 0.1
    assert [(a.origin, a.result) for a in camera.play(30, 0.5, fps=0)] == [("none", None)] * 15
    assert camera.show(numbered(9)).result == 9


def test_another_rate_holds_at_once():
    """Up: no wait for the long period. Down: none too early."""
    camera = Camera()
    camera.show(numbered(1), 1.0)
    camera.now_s += 0.1
    assert camera.show(numbered(2), 15.0).origin == "inferred"
    camera.now_s += 0.1
    assert camera.show(numbered(3), 5.0).origin == "repeated"
    camera.now_s += 0.11
    assert camera.show(numbered(4), 5.0).origin == "inferred"


def test_a_stall_is_not_made_up():
    """After a second without frames there is no burst."""
    camera = Camera()
    camera.play(30, 1)
    camera.now_s += 1.0
    answers = camera.play(30, 1)
    assert sum(a.origin == "inferred" for a in answers) == 15


def test_an_inference_that_fails_is_the_callers_and_does_not_repeat_itself():
    """The error comes out once for its frame; the next in between says what was known, and the rate holds."""

    def infer(frame):
        if frame[0, 0, 0] == 2:
            raise ValueError("engine")
        return int(frame[0, 0, 0])

    camera = Camera(infer=infer)
    origins = []
    for number in range(6):
        try:
            origins.append(camera.show(numbered(number)).origin)
        except ValueError:
            origins.append("raised")
        camera.now_s += 1 / 30
    assert origins == ["inferred", "repeated", "raised", "repeated", "inferred", "repeated"]


@given(
    gaps=st.lists(st.floats(0.001, 0.5), min_size=1, max_size=100),
    fps=st.sampled_from([1.0, 5.0, 7.5, 10.0, 15.0, 30.0]),
)
@settings(deadline=None)
def test_never_more_than_the_rate(gaps, fps):
    """However frames come: at most fps inferences a second, and one."""
    camera = Camera()
    start_s = camera.now_s
    for number, gap in enumerate(gaps):
        camera.show(numbered(number), fps)
        assert camera.frames.counts["inferred"] <= (camera.now_s - start_s) * fps + 1 + SLACK + 1e-6
        camera.now_s += gap


def test_one_place_for_one_frame():
    """A slow taker gets the newest frame and how many it missed; without frames it does not wait on."""
    latest = LatestFrame()
    assert latest.take(0.01) is None
    for number in range(5):
        latest.put(numbered(number), float(number))
    taken = latest.take(0.01)
    assert (taken.captured_s, taken.replaced, int(taken.frame[0, 0, 0])) == (4.0, 4, 4)
    assert latest.take(0.01) is None


def test_a_taker_that_waits_is_woken():
    """By a frame, and by the end."""
    latest = LatestFrame()
    got = []
    thread = threading.Thread(target=lambda: got.extend([latest.take(30.0), latest.take(30.0)]))
    thread.start()
    latest.put(BLACK, 1.0)
    while len(got) == 0 and thread.is_alive() and latest._taken is not None:
        pass
    latest.close()
    thread.join(20)
    assert not thread.is_alive()
    assert got[0].captured_s == 1.0
    assert got[1] is None


def test_a_pause_forgets_the_last_result():
    """What was seen before it is not answered after it."""
    camera = Camera()
    camera.show(numbered(1))
    camera.now_s += 0.01
    assert camera.show(numbered(2)).origin == "repeated"
    camera.show(numbered(3), 0.0)
    camera.now_s += 0.01
    assert camera.show(numbered(4)).origin == "none"
