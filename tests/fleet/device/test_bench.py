"""The device side of a benchmark: when a warm-up ends, and what a run carries."""

import itertools

from fleet.device.bench import warm_up


def test_a_steady_latency_ends_the_warm_up():
    """Three windows of five queries and 20 ms that agree."""
    assert warm_up(lambda: 0.01) == (15, True)
    assert warm_up(lambda: 0.001) == (60, True)


def test_a_window_is_long_enough_to_see_a_clock_rise():
    """Of a quick model many queries make one."""
    spent, stable = warm_up(lambda: 0.0001)
    assert stable
    assert 600 <= spent <= 606


def test_a_warm_up_waits_while_it_gets_faster():
    """10 % less each window, then level: it ends three windows after that."""
    times = itertools.chain.from_iterable([0.02 * 0.9**window] * 5 for window in range(6))
    level = itertools.repeat(0.02 * 0.9**6)
    spent, stable = warm_up(itertools.chain(times, level).__next__)
    assert stable
    assert spent == 5 * (6 + 3)


def test_a_warm_up_that_never_settles_ends_and_says_so():
    """30 windows at most."""
    windows = itertools.chain.from_iterable([0.01 if window % 2 else 0.02] * 5 for window in range(40))
    assert warm_up(windows.__next__) == (150, False)


def test_single_spikes_do_not_matter():
    """An interruption in a window leaves its median alone."""
    assert warm_up(itertools.cycle([0.01, 0.01, 0.01, 0.5, 0.01]).__next__) == (15, True)
