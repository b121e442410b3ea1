"""The interval of a paired difference is the published one, and covers what it says it covers."""

import numpy as np
import pytest

from tasks.paired import paired_drop


def _flags(both: int, lost: int, won: int, none: int) -> tuple[np.ndarray, np.ndarray]:
    before = [True] * (both + lost) + [False] * (won + none)
    after = [True] * both + [False] * lost + [True] * won + [False] * none
    return np.array(before), np.array(after)


def test_the_numbers_of_a_hand_computed_table():
    """36 right twice, 12 lost, 4 won, 8 wrong twice: d~ = 8/62, half = 1.96 sqrt((18/62 - (8/62)^2) / 62)."""
    drop = paired_drop(*_flags(36, 12, 4, 8))
    assert (drop.lost, drop.won, drop.n) == (12, 4, 60)
    assert drop.drop_pp == pytest.approx(100 * 8 / 60)
    assert drop.low_pp == pytest.approx(-0.1132, abs=0.01)
    assert drop.high_pp == pytest.approx(25.9197, abs=0.01)
    assert not drop.certain


def test_no_disagreement_is_no_certainty():
    """Two models that agree on 100 images may still differ by a few points."""
    drop = paired_drop(*_flags(90, 0, 0, 10))
    assert drop.drop_pp == 0
    assert -4 < drop.low_pp < -1 < 1 < drop.high_pp < 4


def test_a_clear_loss_is_certain_and_its_reverse_is_its_mirror():
    """Which model comes first decides the sign and nothing else."""
    before, after = _flags(60, 30, 2, 8)
    drop, gain = paired_drop(before, after), paired_drop(after, before)
    assert drop.certain
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
        drop = paired_drop(*_flags(n - lost - won, lost, won, 0))
        hits += drop.low_pp <= 100 * (p_lost - p_won) <= drop.high_pp
    assert hits / 2000 >= 0.94
