"""Two models on the same images: how far apart they are, and whether chance explains it.

The four counts of a paired 2 x 2 table: right in both, right only before, right only now, wrong in both.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Self

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Paired:
    """How often two models were right on the same images."""

    both: int
    lost: int
    """Right before, wrong now."""
    gained: int
    """Wrong before, right now."""
    neither: int

    @classmethod
    def of(cls, before: Flags, now: Flags) -> Self:
        """Count the table: whether each model is right, per image [N], in the same order."""
        assert before.shape == now.shape, (before.shape, now.shape)
        return cls(
            both=int((before & now).sum()),
            lost=int((before & ~now).sum()),
            gained=int((~before & now).sum()),
            neither=int((~before & ~now).sum()),
        )

    @property
    def n(self) -> int:
        """Images compared."""
        return self.both + self.lost + self.gained + self.neither

    @property
    def before(self) -> float:
        """Share right before."""
        return (self.both + self.lost) / self.n

    @property
    def now(self) -> float:
        """Share right now."""
        return (self.both + self.gained) / self.n

    @property
    def drop(self) -> float:
        """Share right before minus share right now; negative when it is better now."""
        return (self.lost - self.gained) / self.n

    @property
    def drop_pp(self) -> float:
        """`drop` in percentage points."""
        return 100 * self.drop

    @property
    def low_pp(self) -> float:
        """Lower end of the 95 % interval on `drop_pp`."""
        return 100 * self.drop_interval()[0]

    @property
    def high_pp(self) -> float:
        """Upper end of the 95 % interval on `drop_pp`."""
        return 100 * self.drop_interval()[1]

    def drop_interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Two-sided confidence interval on `drop`, as (low, high).

        Newcombe, R. G. (1998), Improved confidence intervals for the difference between binomial proportions
        based on paired data, Statistics in Medicine 17, 2635-2650, method 10: the Wilson intervals of both
        shares, squared and added, with a continuity-corrected estimate of their correlation. It keeps its
        coverage where the shares are near 1 and few images differ, as they are between releases.
        """
        z = NormalDist().inv_cdf((1 + confidence) / 2)
        low_before, high_before = _wilson(self.before, self.n, z)
        low_now, high_now = _wilson(self.now, self.n, z)
        phi = self._correlation()
        down = _side(self.before - low_before, high_now - self.now, phi)
        up = _side(high_before - self.before, self.now - low_now, phi)
        return self.drop - down, self.drop + up

    def _correlation(self) -> float:
        """Newcombe's estimate: phi of the table, its numerator moved n/2 towards 0 where it is positive."""
        right_before, right_now = self.both + self.lost, self.both + self.gained
        product = right_before * (self.n - right_before) * right_now * (self.n - right_now)
        numerator: float = self.both * self.neither - self.lost * self.gained
        if numerator > 0:
            numerator = max(numerator - self.n / 2, 0)
        return numerator / math.sqrt(product) if product else 0.0

    def p_value_lost(self) -> float:
        """Exact one-sided sign test: how likely as many losses among the changes are if both are as good.

        McNemar's test without its approximation: given `lost + gained` changes, losses are Binomial(1/2).
        """
        changes = self.lost + self.gained
        return sum(math.comb(changes, k) for k in range(self.lost, changes + 1)) / (1 << changes)


def _side(one: float, other: float, phi: float) -> float:
    return math.sqrt(max(one * one - 2 * phi * one * other + other * other, 0.0))


def _wilson(share: float, n: int, z: float) -> tuple[float, float]:
    """Wilson's score interval of one share, without continuity correction."""
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)) / (1 + z**2 / n)
    return centre - half, centre + half
