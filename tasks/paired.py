"""Two models on the same images: what one loses against the other, and how sure that is."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Z_95 = 1.959964
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Drop:
    """Accuracy lost from one model to another, in percentage points; negative where it gained."""

    drop_pp: float
    low_pp: float
    high_pp: float
    """Ends of the 95 % interval."""
    lost: int
    """Images that only the first model gets right."""
    won: int
    """Images that only the second gets right."""
    n: int

    @property
    def certain(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low_pp > 0 or self.high_pp < 0


def paired_drop(before: Flags, after: Flags) -> Drop:
    """What is lost from `before` to `after`, with the adjusted Wald interval for paired proportions.

    One image is added to each kind of disagreement, which keeps the interval honest where there are few
    (Bonett and Price, Adjusted Wald confidence interval for a difference of binomial proportions based on
    paired data, 2012).

    Args:
        before: Whether the first model is right, per image [N], N > 0.
        after: The same of the second, in the same order.
    """
    assert before.shape == after.shape, (before.shape, after.shape)
    assert len(before) > 0
    n = len(before)
    lost, won = int((before & ~after).sum()), int((~before & after).sum())
    p_lost, p_won = (lost + 1) / (n + 2), (won + 1) / (n + 2)
    middle = p_lost - p_won
    half = _Z_95 * math.sqrt((p_lost + p_won - middle**2) / (n + 2))
    return Drop(
        drop_pp=100 * (lost - won) / n,
        low_pp=100 * max(middle - half, -1.0),
        high_pp=100 * min(middle + half, 1.0),
        lost=lost,
        won=won,
        n=n,
    )
