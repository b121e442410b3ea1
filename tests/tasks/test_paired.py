"""The interval of a paired difference is the published one, and covers what it says it covers."""

import numpy as np
import pytest

from tasks.paired import Paired


@pytest.mark.parametrize(
    ("counts", "low", "high"),
    [
        ((14, 5, 0, 22), 0.011, 0.226),  # Altman et al., Statistics with Confidence (2000), p. 52
        ((59, 6, 16, 80), -0.1186, -0.0046),  # Fagerland, Lydersen, Laake (2017), ch. 8: Cavo et al. 2012
        (
            (1, 1, 7, 12),
            -0.5069,
            -0.0256,
        ),  # the same: Bentur et al. 2009, a negative correlation of the counts
    ],
)
def test_the_interval_is_the_published_one(counts, low, high):
    """Newcombe's method 10 on tables whose interval is printed in the literature, to its last digit."""
    both, lost, gained, neither = counts
    found = Paired(both=both, lost=lost, gained=gained, neither=neither).drop_interval()
    digits = len(str(low).partition(".")[2])
    assert found == pytest.approx((low, high), abs=0.51 * 10**-digits)


@pytest.mark.parametrize("counts", [(10, 0, 0, 0), (0, 10, 0, 0), (0, 0, 10, 0), (0, 0, 0, 10), (5, 0, 0, 5)])
def test_the_interval_holds_the_drop_where_all_agree(counts):
    """No change, all lost, all gained: a finite interval within -1..1 around what was observed."""
    both, lost, gained, neither = counts
    paired = Paired(both=both, lost=lost, gained=gained, neither=neither)
    low, high = paired.drop_interval()
    assert -1 <= low <= paired.drop <= high <= 1
    assert low < high


def test_the_sign_test_is_exact():
    """7 losses and no gain: 2^-7; as many gains as losses: more than a half; no change: certain."""
    assert Paired(both=0, lost=7, gained=0, neither=3).p_value_lost() == 2**-7
    assert Paired(both=9, lost=2, gained=1, neither=0).p_value_lost() == 0.5
    assert Paired(both=9, lost=5, gained=5, neither=0).p_value_lost() == pytest.approx(638 / 1024)
    assert Paired(both=9, lost=0, gained=0, neither=9).p_value_lost() == 1.0
    assert 0 < Paired(both=0, lost=3000, gained=2000, neither=0).p_value_lost() < 1e-40


def test_the_table_is_counted_from_flags():
    """Right twice, lost, gained, wrong twice: each image in its cell, and the drop in percentage points."""
    before = np.array([True] * 48 + [False] * 12)
    now = np.array([True] * 36 + [False] * 12 + [True] * 4 + [False] * 8)
    paired = Paired.of(before, now)
    assert paired == Paired(both=36, lost=12, gained=4, neither=8)
    assert paired.drop_pp == pytest.approx(100 * 8 / 60)
    assert (paired.low_pp, paired.high_pp) == pytest.approx([100 * end for end in paired.drop_interval()])


def test_which_model_comes_first_decides_the_sign_and_nothing_else():
    """A clear loss leaves out 0; its reverse is its mirror."""
    drop = Paired(both=60, lost=30, gained=2, neither=8)
    gain = Paired(both=60, lost=2, gained=30, neither=8)
    assert drop.low_pp > 10
    assert (gain.drop_pp, gain.low_pp, gain.high_pp) == pytest.approx(
        (-drop.drop_pp, -drop.high_pp, -drop.low_pp)
    )


@pytest.mark.parametrize(("p_lost", "p_won", "n"), [(0.02, 0.01, 200), (0.1, 0.02, 60), (0.005, 0.0, 400)])
def test_the_interval_covers_the_truth(p_lost, p_won, n):
    """Of 2,000 drawn tables at least 94 % hold the true difference, even where disagreements are rare."""
    rng = np.random.default_rng(0)
    hits = 0
    for lost, won, _ in rng.multinomial(n, [p_lost, p_won, 1 - p_lost - p_won], 2000):
        drop = Paired(both=n - lost - won, lost=lost, gained=won, neither=0)
        hits += drop.low_pp <= 100 * (p_lost - p_won) <= drop.high_pp
    assert hits / 2000 >= 0.94
