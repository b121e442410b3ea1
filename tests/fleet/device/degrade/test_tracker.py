"""The small tracker, on pictures that move."""

import numpy as np
import pytest

from fleet.device.degrade.tracker import Located, ShiftTracker


def scene(seed=0):
    return np.random.default_rng(seed).integers(0, 60, (240, 320, 3), np.uint8)


def with_thing(x, y, width=40, height=30, seed=1):
    """A frame with a checkered thing at a place."""
    frame = scene()
    thing = np.random.default_rng(seed).integers(0, 2, (height // 5, width // 5, 1), np.uint8) * 195 + 60
    frame[y : y + height, x : x + width] = np.kron(thing, np.ones((5, 5, 3), np.uint8))
    return frame


def followed(positions, width=40, height=30):
    tracker = ShiftTracker()
    last = Located(label="thing", confidence=0.9, box_xywh=(*positions[0], width, height))
    tracker.inferred(with_thing(*positions[0], width, height), last)
    found = []
    for x, y in positions[1:]:
        moved = tracker.update(with_thing(x, y, width, height), last)
        last = moved or last
        found.append(None if moved is None else moved.box_xywh[:2])
    return found


def test_it_follows():
    """To the pixel, over several frames and to the edge of the picture."""
    path = [(100, 80), (110, 85), (125, 80), (140, 66), (154, 52), (150, 40), (148, 25), (150, 12), (150, 0)]
    assert followed(path) == path[1:]


def test_a_large_thing_is_followed_in_a_smaller_picture():
    """To within a pixel of the smaller picture."""
    path = [(40, 40), (52, 46), (60, 40)]
    found = followed(path, 150, 120)
    assert np.abs(np.array(found) - path[1:]).max() <= 3


def test_it_is_lost():
    """The thing is gone, or another one is there."""
    tracker = ShiftTracker()
    last = Located(label="thing", confidence=0.9, box_xywh=(100, 80, 40, 30))
    tracker.inferred(with_thing(100, 80), last)
    assert tracker.update(with_thing(100, 80, seed=9), last) is None
    assert tracker.update(with_thing(100, 80), last) is None  # until the next inference
    tracker.inferred(with_thing(100, 80), last)
    assert tracker.update(with_thing(100, 80), last) == last


@pytest.mark.parametrize(
    "box",
    [
        (0, 0, 7, 7),
        (-1, 0, 40, 30),
        (300, 0, 40, 30),
        (0, 0, 0, 0),
        (0, 0, -5, 20),
        (10, 230, 40, 30),
        (0, 0, 320, 9),
    ],
)
def test_boxes_that_cannot_be_followed(box):
    """Too small, or not inside the frame: nothing is found, and nothing raises."""
    tracker = ShiftTracker()
    last = Located(label="thing", confidence=0.9, box_xywh=box)
    tracker.inferred(scene(), last)
    assert tracker.update(scene(), last) is None


def test_a_flat_thing_is_not_followed():
    """On a white wall everything looks alike."""
    tracker = ShiftTracker()
    last = Located(label="wall", confidence=0.9, box_xywh=(50, 50, 40, 40))
    white = np.full((240, 320, 3), 250, np.uint8)
    tracker.inferred(white, last)
    assert tracker.update(white, last) is None


def test_frames_of_another_size():
    """A camera that changes its resolution: the thing is lost, not an error."""
    tracker = ShiftTracker()
    last = Located(label="thing", confidence=0.9, box_xywh=(100, 80, 40, 30))
    tracker.inferred(with_thing(100, 80), last)
    assert tracker.update(np.zeros((60, 80, 3), np.uint8), last) is None
