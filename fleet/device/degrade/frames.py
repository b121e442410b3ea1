"""Frames of a camera: which are inferred, and what is answered for those in between (M8).

    latest = LatestFrame()                       # the camera's thread: latest.put(frame, time.monotonic())
    frames = Frames(infer, tracker=ShiftTracker())
    while (taken := latest.take(timeout_s=1.0)):
        answer = frames.answer(taken, decision)

Nothing queues: a frame that nobody took in time is replaced by the next. All times are of one monotonic
clock.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from fleet.device.degrade.governor import Decision

Frame = npt.NDArray[np.uint8]
"""uint8 RGB [H, W, 3]."""
Result = TypeVar("Result")
Origin = Literal["inferred", "tracked", "repeated", "none"]
MOST_AGE_S = 1.0
"""An inference is answered for no longer than this after the frame it was made of."""
LATE_S = 0.25
"""A frame older than this is not inferred: what it shows is over. Nor is one from so far in the future."""

SLACK = 0.05
"""Of a period: so much too early is in time, for cameras whose clock shakes. The grid keeps the rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """A frame and when the camera made it."""

    frame: Frame
    captured_s: float
    replaced: int = 0
    """Frames since the one taken before that nobody took."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered(Generic[Result]):
    """What is known when a frame has been looked at."""

    result: Result | None
    """None with the origin `none`: before the first inference, when paused, or too long after it."""
    origin: Origin
    age_s: float
    """From the frame that was inferred to the one answered for; 0 when this one was."""
    late: bool = False
    """It came too late, or out of order, to be inferred."""


class Tracker(Protocol[Result]):
    """Carries a result from the frame that was inferred to later ones, cheaper than an inference."""

    def inferred(self, frame: Frame, result: Result) -> None:
        """Begin anew from this frame."""
        ...

    def update(self, frame: Frame, last: Result) -> Result | None:
        """The result for this frame, given that of the one before; None when it is lost."""
        ...


class LatestFrame:
    """One place for one frame between the camera's thread and the inference thread."""

    def __init__(self) -> None:
        self._taken: Taken | None = None
        self._closed = False
        self._changed = threading.Condition()

    def put(self, frame: Frame, captured_s: float) -> None:
        """Replace what nobody took; never waits for the inference."""
        with self._changed:
            replaced = 0 if self._taken is None else self._taken.replaced + 1
            self._taken = Taken(frame=frame, captured_s=captured_s, replaced=replaced)
            self._changed.notify()

    def take(self, timeout_s: float) -> Taken | None:
        """The newest frame; None when none came in time, or it is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._taken is not None or self._closed, timeout_s)
            taken, self._taken = self._taken, None
            return taken

    def close(self) -> None:
        """Let the inference thread go on without a frame."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Frames(Generic[Result]):
    """Infers frames at the rate of a decision, and answers for each. Belongs to one thread."""

    def __init__(
        self,
        infer: Callable[[Frame], Result],
        *,
        tracker: Tracker[Result] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`infer` may raise: the frame is then tried, and the error the caller's; the next goes on."""
        self._infer, self._tracker, self._clock = infer, tracker, clock
        self._last: Result | None = None
        self._last_captured_s = self._newest_s = float("-inf")
        self._period_s, self._tried_s, self._due_s = 0.0, float("-inf"), float("-inf")
        self.counts: dict[Origin, int] = {"inferred": 0, "tracked": 0, "repeated": 0, "none": 0}
        self.late = 0
        """Frames that came too late, or out of order."""

    def answer(self, taken: Taken, decision: Decision) -> Answered[Result]:
        """Infer the frame if it is due and not late, else carry the last result to it."""
        now_s = self._clock()
        late = not self._is_next(taken.captured_s, now_s)
        self.late += late
        if decision.paused or decision.fps <= 0:
            self._last = None
            return self._said(None, "none", 0.0, late=late)
        if late or not self._is_due(now_s, 1 / decision.fps):
            return self._carried(taken, now_s if late else taken.captured_s, late=late)
        return self._inferred(taken, now_s)

    def _is_next(self, captured_s: float, now_s: float) -> bool:
        """Whether the frame is of now, and after all others; one with an absurd time changes nothing."""
        if not (abs(now_s - captured_s) <= LATE_S and captured_s > self._newest_s):
            return False
        self._newest_s = captured_s
        return True

    def _is_due(self, now_s: float, period_s: float) -> bool:
        if period_s != self._period_s:  # another rate holds at once, from the last inference on
            self._period_s, self._due_s = period_s, self._tried_s + period_s
        return now_s >= self._due_s - SLACK * period_s

    def _inferred(self, taken: Taken, now_s: float) -> Answered[Result]:
        # On a grid, so that frames at 25 Hz give 15 inferences a second and not 12.5; what was missed by more
        # than a period is not made up.
        on_grid_s = self._due_s + self._period_s
        self._due_s = on_grid_s if on_grid_s > now_s else now_s + self._period_s
        self._tried_s = now_s
        result = self._infer(taken.frame)
        self._last, self._last_captured_s = result, taken.captured_s
        if self._tracker is not None:
            self._tracker.inferred(taken.frame, result)
        return self._said(result, "inferred", 0.0, late=False)

    def _carried(self, taken: Taken, at_s: float, *, late: bool) -> Answered[Result]:
        age_s = max(0.0, at_s - self._last_captured_s)
        if self._last is None or age_s > MOST_AGE_S:
            self._last = None
            return self._said(None, "none", 0.0, late=late)
        if self._tracker is not None and not late:
            moved = self._tracker.update(taken.frame, self._last)
            if moved is not None:
                self._last = moved
                return self._said(moved, "tracked", age_s, late=late)
        return self._said(self._last, "repeated", age_s, late=late)

    def _said(self, result: Result | None, origin: Origin, age_s: float, *, late: bool) -> Answered[Result]:
        self.counts[origin] += 1
        return Answered(result=result, origin=origin, age_s=age_s, late=late)
