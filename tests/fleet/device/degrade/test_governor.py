"""Heat, battery and memory: levels, hysteresis, and one decision."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleet.device.degrade.battery import PLUGGED_S, RECOVERED_POINTS, BatteryGovernor
from fleet.device.degrade.governor import Decision, Governor, check
from fleet.device.degrade.ladder import climb
from fleet.device.degrade.memory import MemoryGovernor, Pressure, used_share
from fleet.device.degrade.thermal import MEDIAN_OF, MISSING_HOLD_S, Heat, ThermalGovernor
from fleet.device.errors import UserError
from fleet.device.release import FramePolicy
from fleet.device.sensors import Reading

POLICY = FramePolicy()
FINE = Reading(temperature_c=30.0, battery_percent=90.0, charging=False, memory_mb=100.0, available_mb=900.0)


def decided(**changes: object) -> Decision:
    """The decision of a fresh governor after some readings that say the same."""
    governor = Governor(POLICY)
    for second in range(MEDIAN_OF):
        decision = governor.decide(replace(FINE, **changes), float(second))
    return decision


@pytest.mark.parametrize(
    ("changes", "fps", "model", "reasons"),
    [
        ({}, 15, "full", ()),
        ({"temperature_c": 39.9}, 15, "full", ()),
        ({"temperature_c": 40.0}, 10, "full", ("warm",)),
        ({"temperature_c": 45.0}, 5, "light", ("hot",)),
        ({"temperature_c": 48.0}, 0, "light", ("too hot",)),
        ({"battery_percent": 20.0}, 15, "full", ()),
        ({"battery_percent": 19.0}, 7.5, "light", ("low battery",)),
        ({"battery_percent": 1.0, "charging": True}, 15, "full", ()),
        ({"battery_percent": 19.0, "temperature_c": 41.0}, 5, "light", ("warm", "low battery")),
        ({"available_mb": 42.0}, 15, "light", ("memory tight",)),
        ({"available_mb": 10.0}, 15, "light", ("memory short",)),
        ({"temperature_c": None}, 15, "full", ("temperature not exposed",)),
        ({"battery_percent": None, "charging": None}, 15, "full", ("battery not exposed",)),
        ({"available_mb": None}, 15, "full", ("memory not exposed",)),
    ],
)
def test_what_is_decided(changes, fps, model, reasons):
    """The thresholds of the policy; what is not exposed is said, and costs nothing."""
    decision = decided(**changes)
    assert (round(decision.fps, 9), decision.model, decision.reasons) == (fps, model, reasons)
    assert decision.paused is (fps == 0)
    assert decision.critical_only is ("memory short" in reasons)


class Thermal(RuleBasedStateMachine):
    """Any temperatures, missing sensors and times."""

    def __init__(self):
        super().__init__()
        self.now_s = 0.0
        self.governor, self.hotter = ThermalGovernor(POLICY), ThermalGovernor(POLICY)
        self.levels, self.medians, self.recent = [Heat.COOL], [None], []
        self.turned_at = None
        """(direction, median) of the last change."""

    @rule(celsius=st.floats(-40, 120), more=st.floats(0, 30))
    def reading(self, celsius, more):
        self.now_s += 1
        self.recent = [*self.recent, celsius][-MEDIAN_OF:]
        median = sorted(self.recent)[(len(self.recent) - 1) // 2]
        before = self.governor.level
        level = self.governor.step(celsius, self.now_s)
        if level != before:
            direction = 1 if level > before else -1
            if self.turned_at is not None and self.turned_at[0] == -direction:
                assert abs(median - self.turned_at[1]) >= POLICY.hysteresis_c - 1e-9
            self.turned_at = (direction, median)
        assert self.hotter.step(celsius + more, self.now_s) >= level
        forced = sum(median >= t for t in (POLICY.warm_c, POLICY.hot_c, POLICY.pause_c))
        assert level >= forced

    @rule()
    def no_sensor(self):
        self.now_s += 1
        before = self.governor.level
        self.recent = []
        assert self.governor.step(None, self.now_s) in (before, max(0, before - 1))
        self.hotter.step(None, self.now_s)
        self.turned_at = None

    @precondition(lambda self: self.governor.level > 0)
    @rule()
    def it_cools(self):
        """From any state, a cool device works fully after as many readings as are looked at together."""
        for _ in range(MEDIAN_OF):
            self.now_s += 1
            self.governor.step(20.0, self.now_s)
            self.hotter.step(20.0, self.now_s)
        self.recent = [20.0] * MEDIAN_OF
        self.turned_at = (-1, 20.0)
        assert self.governor.level == Heat.COOL

    @invariant()
    def not_hotter_than_the_hotter(self):
        assert self.governor.level <= self.hotter.level


TestThermal = Thermal.TestCase
TestThermal.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(
    middle=st.sampled_from([POLICY.warm_c, POLICY.hot_c, POLICY.pause_c]),
    noise=st.lists(st.floats(-0.99, 0.99), min_size=30, max_size=100),
)
@settings(deadline=None)
def test_noise_within_the_hysteresis_does_not_flap(middle, noise):
    """A sensor that shakes around a threshold by less than the hysteresis changes the level once at most."""
    governor = ThermalGovernor(POLICY)
    for second in range(MEDIAN_OF):
        governor.step(middle - 1.0, second)
    levels = [governor.step(middle + shaken, 10 + second) for second, shaken in enumerate(noise)]
    changes = sum(a != b for a, b in pairwise(levels))
    assert changes <= 1


def test_one_wrong_reading_moves_nothing():
    """A spike up while cool and one down while paused are outvoted."""
    governor = ThermalGovernor(POLICY)
    assert [governor.step(t, i) for i, t in enumerate([30, 30, 30, 99, 30, 30])] == [Heat.COOL] * 6
    levels = [governor.step(t, i) for i, t in enumerate([50, 50, 50, -30, 50, 50])]
    assert levels[1:] == [Heat.PAUSE] * 5


def test_a_sensor_that_dies_while_hot():
    """No action for a minute, then a level a minute: a paused device does not stay paused for good."""
    governor = ThermalGovernor(POLICY)
    for second in range(MEDIAN_OF):
        governor.step(50.0, second)
    seen = {second: governor.step(None, 10.0 + second) for second in range(int(3 * MISSING_HOLD_S) + 2)}
    hold = int(MISSING_HOLD_S)
    assert [seen[s] for s in (0, hold - 1, hold, 2 * hold - 1, 2 * hold, 3 * hold)] == [3, 3, 2, 2, 1, 0]
    for second in range(2):
        level = governor.step(50.0, 1000.0 + second)
    assert level == Heat.PAUSE


@pytest.mark.parametrize("absurd", [float("nan"), float("inf"), float("-inf")])
def test_a_temperature_that_is_no_number(absurd):
    """It is as good as none."""
    governor = ThermalGovernor(POLICY)
    assert governor.step(absurd, 0.0) == Heat.COOL


@given(
    up=st.lists(st.integers(-50, 50), min_size=1, max_size=4, unique=True).map(sorted),
    gap=st.integers(0, 20),
    values=st.lists(st.integers(-80, 80), min_size=1, max_size=30),
)
def test_a_ladder_asked_twice_says_the_same(up, gap, values):
    """A level is settled after one value: no value moves it twice."""
    down, level = [u - gap for u in up], 0
    for value in values:
        level = climb(level, value, up, down)
        assert climb(level, value, up, down) == level
        assert 0 <= level <= len(up)


def test_battery_has_hysteresis():
    """Low under the limit, well again only some points above it."""
    governor = BatteryGovernor(POLICY)
    low, well = POLICY.low_battery_percent, POLICY.low_battery_percent + RECOVERED_POINTS
    percents = [50, low, low - 1, low, well - 1, well, well - 1, low, low - 1]
    got = [governor.step(p, False, float(i)) for i, p in enumerate(percents)]
    assert got == [False, False, True, True, True, False, False, False, True]


def test_a_loose_plug_is_no_power():
    """Power from outside ends a low level when it has lasted; a plug that comes and goes changes nothing."""
    governor = BatteryGovernor(POLICY)
    governor.step(5.0, False, 0.0)
    assert all(governor.step(5.0, second % 2 == 0, float(second)) for second in range(1, 60))
    steady = [governor.step(5.0, True, 100.0 + second) for second in range(int(PLUGGED_S) + 1)]
    assert steady == [True] * int(PLUGGED_S) + [False]
    assert governor.step(5.0, False, 200.0) is True


@pytest.mark.parametrize("percent", [None, float("nan")])
def test_a_battery_that_is_not_there(percent):
    """Nothing is low; a battery that was low and can no longer be read is not low for ever."""
    assert BatteryGovernor(POLICY).step(percent, None, 0.0) is False
    governor = BatteryGovernor(POLICY)
    governor.step(5.0, False, 0.0)
    assert governor.step(percent, False, 1.0) is True
    assert governor.step(percent, None, 2.0) is False


def test_memory_has_hysteresis():
    """Tight from 70 %, short half way from there to all; each ends five points below its mark."""
    governor = MemoryGovernor(POLICY)
    shares = [0.69, 0.70, 0.66, 0.64, 0.86, 0.81, 0.79, 0.64, 0.9]
    got = [governor.step(share * 1000, (1 - share) * 1000) for share in shares]
    free, tight, short = Pressure.FREE, Pressure.TIGHT, Pressure.SHORT
    assert got == [free, tight, tight, free, short, short, tight, free, short]
    assert governor.step(None, 10.0) == short


@pytest.mark.parametrize(
    "pair", [(None, 1), (1, None), (-1, 5), (5, -1), (0, 0), (float("nan"), 1), (1, float("inf"))]
)
def test_memory_that_says_nothing(pair):
    """No share is made of what is no memory."""
    assert used_share(*pair) is None


def test_another_policy_holds_from_the_next_reading():
    """A signed policy lowers the limits; a senseless one changes nothing."""
    governor = Governor(POLICY)
    governor.decide(FINE, 0.0)
    with pytest.raises(UserError, match=r"frames\.hysteresis_c: 0\.0"):
        governor.set_policy(replace(POLICY, hysteresis_c=0.0))
    assert governor.decide(FINE, 1.0).reasons == ()
    governor.set_policy(replace(POLICY, warm_c=25.0, hot_c=29.0, base_fps=30.0))
    assert governor.decide(FINE, 2.0).reasons == ("hot",)
    assert governor.decide(FINE, 3.0).fps == 10.0


def test_another_policy_holds_for_memory_and_battery_too():
    """Its watermark and its low battery."""
    reading = replace(FINE, memory_mb=500.0, available_mb=500.0, battery_percent=50.0, charging=False)
    governor = Governor(POLICY)
    assert governor.decide(reading, 0.0).reasons == ()
    governor.set_policy(replace(POLICY, memory_watermark=0.4, low_battery_percent=60.0))
    assert set(governor.decide(reading, 1.0).reasons) >= {"memory tight", "low battery"}


def test_one_odd_reading_of_three_changes_nothing():
    """The level is the median's of three: it rises with the second hot reading, not with the first."""
    governor = ThermalGovernor(POLICY)
    celsius = [30.0, 30.0, 46.0, 30.0, 46.0, 46.0]
    levels = [governor.step(value, float(second)) for second, value in enumerate(celsius)]
    assert levels == [Heat.COOL, Heat.COOL, Heat.COOL, Heat.COOL, Heat.HOT, Heat.HOT]


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_fps": 0.0},
        {"base_fps": float("nan")},
        {"base_fps": 1e9},
        {"warm_c": 45.0},
        {"hot_c": 48.0},
        {"pause_c": float("inf")},
        {"warm_c": -300.0},
        {"hysteresis_c": 0.0},
        {"hysteresis_c": 1000.0},
        {"low_battery_percent": 101.0},
        {"memory_watermark": 0.0},
        {"memory_watermark": 1.0},
    ],
)
def test_a_policy_that_makes_no_sense(wrong):
    """It is refused with its values."""
    with pytest.raises(UserError, match="policy frames"):
        check(replace(POLICY, **wrong))


@given(
    st.lists(
        st.builds(
            Reading,
            temperature_c=st.none() | st.floats(),
            battery_percent=st.none() | st.floats(),
            charging=st.none() | st.booleans(),
            memory_mb=st.none() | st.floats(),
            available_mb=st.none() | st.floats(),
        ),
        max_size=30,
    )
)
@settings(deadline=None)
def test_no_reading_breaks_it_and_it_always_recovers(readings):
    """Any floats, NaN and infinities: a decision within bounds; and fine readings end in the base state."""
    governor = Governor(POLICY)
    for second, reading in enumerate(readings):
        decision = governor.decide(reading, float(second))
        assert 0 <= decision.fps <= POLICY.base_fps
        assert decision.paused == (decision.fps == 0)
    for second in range(MEDIAN_OF):
        decision = governor.decide(FINE, 1000.0 + second)
    assert decision == Decision(fps=15.0, model="full", paused=False, critical_only=False, reasons=())
