"""A small tracker: finds again, by its look, what an inference found (normalised cross-correlation)."""

from dataclasses import dataclass, replace

import cv2
import numpy as np
import numpy.typing as npt

from fleet.device.degrade.frames import Frame

SMALLEST_PX, LARGEST_PX = 8, 64
"""Of a side of the template: a smaller box is not followed, a larger one in a smaller picture."""
LOST_BELOW = 0.6
"""Correlation, -1 to 1, under which it is not the same thing."""
_FLAT = 2.0  # standard deviation of grey values, below which anything looks alike


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """What was recognised, and where."""

    label: str
    confidence: float
    box_xywh: tuple[int, int, int, int]
    """Left, top, width and height in pixels of the frame."""


class ShiftTracker:
    """`frames.Tracker` of one box that moves, by at most half its size a frame, and does not turn or grow."""

    def __init__(self) -> None:
        self._template: npt.NDArray[np.uint8] | None = None
        self._scale = 1.0

    def inferred(self, frame: Frame, result: Located) -> None:
        """Remember how it looks; nothing is followed that is too small, flat, or outside the frame."""
        self._template = None
        x, y, width, height = result.box_xywh
        inside = min(x, y) >= 0 and x + width <= frame.shape[1] and y + height <= frame.shape[0]
        if not inside or min(width, height) < SMALLEST_PX:
            return
        self._scale = min(1.0, LARGEST_PX / max(width, height))
        template = self._grey(frame[y : y + height, x : x + width])
        if template.std() >= _FLAT and min(template.shape) >= SMALLEST_PX // 2:
            self._template = template

    def update(self, frame: Frame, last: Located) -> Located | None:
        """Where it is now; None when nothing near looks like it."""
        if self._template is None:
            return None
        x, y, width, height = last.box_xywh
        left, top = max(0, x - width // 2), max(0, y - height // 2)
        part = frame[top : y + height + height // 2, left : x + width + width // 2]
        if part.size == 0:
            return None
        search = self._grey(part)
        if any(s < t for s, t in zip(search.shape, self._template.shape, strict=True)):
            return None
        scores = cv2.matchTemplate(search, self._template, cv2.TM_CCOEFF_NORMED)
        _, best, _, (column, row) = cv2.minMaxLoc(scores)
        if not best >= LOST_BELOW:
            self._template = None
            return None
        moved = (left + round(column / self._scale), top + round(row / self._scale), width, height)
        return replace(last, box_xywh=moved)

    def _grey(self, part: Frame) -> npt.NDArray[np.uint8]:
        grey = cv2.cvtColor(np.ascontiguousarray(part), cv2.COLOR_RGB2GRAY)
        if self._scale < 1.0:
            grey = cv2.resize(grey, None, fx=self._scale, fy=self._scale, interpolation=cv2.INTER_AREA)
        return np.asarray(grey, np.uint8)
