"""When windows are sent, as a state machine walked at random, and the defaults row by row."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from fleet.device.monitor.upload_policy import (
    DEFAULT_UPLOAD,
    LONGEST_PAUSE_S,
    LOW_BATTERY_PERCENT,
    PAUSE_S,
    UploadPolicy,
    is_in_share,
    is_low,
    state_of,
)
from fleet.device.release import UploadRule
from fleet.device.sensors import Reading

WIFI = Reading(network="wifi", charging=False, battery_percent=80.0)
MOBILE = replace(WIFI, network="mobile")


def turns(reading, *, hours=2.0, anomaly_every_s=0, rules=DEFAULT_UPLOAD):
    """(second, share, regular) of each turn within some hours, asked every five seconds."""
    policy, found, waiting = UploadPolicy(rules), [], False
    for now_s in range(0, int(hours * 3600), 5):
        waiting |= bool(anomaly_every_s) and now_s % anomaly_every_s == 0
        turn = policy.turn(now_s, reading, anomalies=waiting)
        if turn is not None:
            policy.done(now_s, turn)
            waiting = False
            found.append((now_s, turn.share, turn.regular))
    return found


@pytest.mark.parametrize(
    ("reading", "every_s", "share"),
    [
        (replace(WIFI, charging=True), 300, 1.0),
        (WIFI, 1800, 0.1),
        (replace(WIFI, network="ethernet"), 1800, 0.1),
        (replace(MOBILE, charging=True), 1800, 0.05),
        (MOBILE, 1800, 0.0),
        (replace(MOBILE, network="unknown"), 1800, 0.0),
        (Reading(network="ethernet"), 300, 1.0),  # a board on a cable: no battery, no word of charging
        (replace(WIFI, charging=None), 1800, 0.1),  # a battery whose charger is not known
    ],
)
def test_the_defaults(reading, every_s, share):
    """Each state: how often, and which share."""
    assert turns(reading) == [(second, share, True) for second in range(0, 7200, every_s)]


def test_anomalies_go_at_once_and_leave_the_others_their_time():
    """On a mobile network and a battery: every anomaly in its own turn, without any other window."""
    found = turns(MOBILE, hours=1, anomaly_every_s=600)
    assert [second for second, _, _ in found] == list(range(0, 3600, 600))
    assert {share for _, share, _ in found} == {0.0}
    assert [second for second, _, regular in found if regular] == [0, 1800]
    regular = [turn for turn in turns(WIFI, hours=1, anomaly_every_s=600) if turn[2]]
    assert regular == [(0, 0.1, True), (1800, 0.1, True)]


def test_on_a_low_battery_anomalies_wait_for_each_other():
    """In turns of the rule; from 20 % down, and not while charging."""
    low = replace(MOBILE, battery_percent=LOW_BATTERY_PERCENT)
    assert [second for second, _, _ in turns(low, anomaly_every_s=60)] == [0, 1800, 3600, 5400]
    charging = replace(low, charging=True)
    assert len(turns(charging, hours=1, anomaly_every_s=60)) == 60


def test_without_a_network_nothing_is_due():
    """Anomalies neither."""
    assert turns(replace(WIFI, network="none"), anomaly_every_s=60) == []


def test_a_gateway_that_is_down_is_asked_ever_less():
    """Anomalies wait 1, 2, 4 .. 30 minutes; a regular turn its whole time; success forgets it."""
    policy, tries, now_s = UploadPolicy(), [], 0
    while len(tries) < 8:
        turn = policy.turn(now_s, MOBILE, anomalies=True)
        if turn is not None:
            policy.failed(now_s, turn)
            tries.append(now_s)
        now_s += 5
    waits = [after - before for before, after in itertools.pairwise(tries)]
    assert waits == [min(PAUSE_S * 2**k, LONGEST_PAUSE_S) for k in range(7)]
    turn = policy.turn(now_s + 1800, MOBILE, anomalies=True)
    policy.done(now_s + 1800, turn)
    assert policy.turn(now_s + 1801, MOBILE, anomalies=True) is not None


def test_a_gateway_is_left_alone_as_long_as_it_asks():
    """By Retry-After, when that is longer than the pause."""
    policy = UploadPolicy()
    policy.failed(0, policy.turn(0, WIFI, anomalies=True), retry_after_s=500)
    assert policy.turn(499, WIFI, anomalies=True) is None
    assert policy.turn(500, WIFI, anomalies=True) is not None


def test_a_share_is_the_same_windows_each_time():
    """About that many, all of a smaller share in each larger one, others on another device."""
    numbers = range(20_000)
    tenth = {number for number in numbers if is_in_share("a" * 32, number, 0.1)}
    assert abs(len(tenth) - 2000) < 200
    assert {number for number in numbers if is_in_share("a" * 32, number, 0.05)} < tenth
    assert tenth != {number for number in numbers if is_in_share("b" * 32, number, 0.1)}
    assert all(is_in_share("a" * 32, number, 1.0) for number in numbers)
    assert not any(is_in_share("a" * 32, number, 0.0) for number in numbers)


@pytest.mark.parametrize(("every_s", "share"), [(0, 0.5), (60, 1.5), (60, -0.1), (60, float("nan"))])
def test_rules_that_cannot_be_followed_are_refused(every_s, share):
    """And those before stay."""
    policy = UploadPolicy()
    with pytest.raises(ValueError, match="share"):
        policy.set_rules([UploadRule(network="wifi", charging=False, every_s=every_s, share=share)])
    assert policy.turn(0, WIFI, anomalies=False).share == 0.1


def test_the_first_rule_for_a_state_counts_and_a_state_without_sends_anomalies_only():
    """A policy may name some states only."""
    rules = [UploadRule(network="wifi", charging=False, every_s=60, share=share) for share in (0.5, 0.9)]
    policy = UploadPolicy(rules)
    assert policy.turn(0, WIFI, anomalies=False).share == 0.5
    assert policy.turn(0, MOBILE, anomalies=True).share == 0.0


class Device(RuleBasedStateMachine):
    """A device that moves between networks and chargers, with windows that wait: what the policy promises."""

    @initialize()
    def begin(self):
        self.policy, self.now_s = UploadPolicy(), 0.0
        self.reading = Reading(network="wifi", charging=True, battery_percent=50.0)
        self.anomalous = 0  # windows that wait
        self.regular, self.failures, self.held_until = [], 0, 0.0

    @rule(
        network=st.sampled_from(["wifi", "ethernet", "mobile", "none", "unknown"]),
        charging=st.sampled_from([True, False, None]),
        battery=st.one_of(st.none(), st.floats(0, 100)),
    )
    def move(self, network, charging, battery):
        self.reading = Reading(network=network, charging=charging, battery_percent=battery)

    @rule()
    def find_an_anomaly(self):
        self.anomalous += 1

    @rule(seconds=st.sampled_from([1, 5, 59, 60, 299, 300, 1800, 7200]))
    def wait(self, seconds):
        self.now_s += seconds

    @rule(works=st.booleans(), retry_after_s=st.sampled_from([0, 0, 90, 4000]))
    def poll(self, works, retry_after_s):
        turn = self.policy.turn(self.now_s, self.reading, anomalies=bool(self.anomalous))
        network, charging = state_of(self.reading)
        rules = {(r.network, r.charging): r for r in DEFAULT_UPLOAD}
        active = rules[network, charging]
        offline = self.reading.network == "none"
        held = self.now_s < self.held_until
        due = not self.regular or self.now_s - self.regular[-1] >= active.every_s
        if offline or held:
            assert turn is None
            return
        if turn is None:
            assert not due
            assert not self.anomalous or is_low(self.reading)
            return
        assert turn.regular == due
        assert turn.share == (active.share if due else 0.0)
        assert due or (self.anomalous and not is_low(self.reading))
        if turn.regular:
            self.regular.append(self.now_s)
        if not works:
            self.policy.failed(self.now_s, turn, retry_after_s=retry_after_s)
            pause_s = min(PAUSE_S * 2**self.failures, LONGEST_PAUSE_S)
            self.failures, self.held_until = self.failures + 1, self.now_s + max(pause_s, retry_after_s)
            return
        self.policy.done(self.now_s, turn)
        self.failures = self.anomalous = 0


Device.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDevice = Device.TestCase
