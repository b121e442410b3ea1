"""Two models, one output: a change between them is blended over some frames (M8)."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fleet.device.degrade.governor import Model
from fleet.device.errors import EngineError, UserError
from fleet.device.probabilities import softmax

Probabilities = npt.NDArray[np.float64]
"""[classes], in 0..1, sums to 1."""
BLEND_FRAMES = 5
MOST_AGE_S = 1.0
"""An output older than this is not blended with: the scene is another."""


class SmoothSwitch:
    """Runs the wanted model; after a change its output comes in step by step. Belongs to one thread.

    Only one model runs a frame: a device changes models because it is hot or short of memory. What fades out
    is the last output before the change. With BLEND_FRAMES = n the weight of the new model is 1/(n+1),
    2/(n+1) ... and after n frames its output stands alone.
    """

    def __init__(
        self,
        models: Mapping[Model, Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.float32]]],
        labels: Mapping[Model, Sequence[str]],
        *,
        blend_frames: int = BLEND_FRAMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take two models.

        Args:
            models: From a uint8 RGB image [H, W, 3] to logits [classes].
            labels: Of each model's outputs, in order.
            blend_frames: Over how many frames a change goes; 0: at once.
            clock: Monotonic seconds.

        Raises:
            UserError: the labels differ, a model is missing, or `blend_frames` is negative.
        """
        names = [tuple(labels[model]) for model in models if model in labels]
        if (
            not models
            or len(names) != len(models)
            or len(set(names)) != 1
            or not names[0]
            or blend_frames < 0
        ):
            raise UserError(
                f"models {sorted(models)} with labels of {[len(n) for n in names]} classes, "
                f"{len(set(names))} different lists; blend_frames = {blend_frames}",
                allowed="the same labels in the same order for each model; 0 frames or more",
                next_step="release both models from one build",
            )
        self.labels = names[0]
        self._models, self._blend_frames, self._clock = dict(models), blend_frames, clock
        self._running: Model | None = None
        self._before: Probabilities | None = None
        self._step = 0
        self._last: Probabilities | None = None
        self._last_s = float("-inf")

    def run(self, wanted: Model, image: npt.NDArray[np.uint8]) -> Probabilities:
        """The output for an image.

        Raises:
            EngineError: the model's output is not finite, or of another length; nothing is blended with it.
        """
        model = wanted if wanted in self._models else next(iter(self._models))
        now = self._probabilities(model, image)
        now_s = self._clock()
        if model != self._running:
            fresh = self._last is not None and now_s - self._last_s <= MOST_AGE_S
            self._before, self._step = (self._last if fresh else None), 0
            self._running = model
        self._last, self._last_s = self._blended(now), now_s
        return self._last.copy()

    def _blended(self, now: Probabilities) -> Probabilities:
        if self._before is None:
            return now
        self._step += 1
        if self._step > self._blend_frames:
            self._before = None
            return now
        weight = self._step / (self._blend_frames + 1)
        mixed: Probabilities = weight * now + (1 - weight) * self._before
        mixed /= mixed.sum()
        return mixed

    def _probabilities(self, model: Model, image: npt.NDArray[np.uint8]) -> Probabilities:
        logits = np.asarray(self._models[model](image), np.float64)
        if logits.shape != (len(self.labels),) or not np.isfinite(logits).all():
            raise EngineError(
                f"the {model} model answered {logits.shape} for {len(self.labels)} labels, "
                f"{int((~np.isfinite(logits)).sum())} of them not finite"
            )
        return softmax(logits)
