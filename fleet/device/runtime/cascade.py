"""A light model screens, a heavy one decides what the light one is not sure of."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fleet.device.errors import UserError
from fleet.device.runtime.loaded import Answer
from fleet.device.runtime.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class CascadeAnswer:
    """The answer, and what it took."""

    answer: Answer
    light: Answer
    """What the light model said; the answer itself where it was sure."""

    @property
    def screened(self) -> bool:
        """Whether the light model's answer stands."""
        return self.answer is self.light


@dataclass(frozen=True, kw_only=True)
class Cascade:
    """Two runtimes, each with its own signed release; closing them stays with their owner."""

    light: Runtime
    heavy: Runtime
    decide_below: float
    """Confidence of the light model below which the heavy one is asked, 0 to 1."""

    def __post_init__(self) -> None:
        if not 0 <= self.decide_below <= 1:
            raise UserError(
                f"decide_below = {self.decide_below}", allowed="0 to 1", next_step="give a confidence"
            )

    def predict(self, image_HWC: npt.NDArray[np.uint8]) -> CascadeAnswer:
        """One answer; raises what `Runtime.predict` raises."""
        light = self.light.predict(image_HWC)
        answer = light if light.confidence >= self.decide_below else self.heavy.predict(image_HWC)
        return CascadeAnswer(answer=answer, light=light)
