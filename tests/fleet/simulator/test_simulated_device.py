"""Simulated devices without a gateway: what they measure, and what they keep."""

import gzip
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from fleet.device.credentials import DeviceKey
from fleet.device.errors import UserError
from fleet.simulator.device import Character, SimulatedDevice
from fleet.simulator.faults import ENDS_AS, Sent, altered
from fleet.simulator.fleet import Fleet
from fleet.simulator.made_up import made_up_classes, made_up_temperatures
from fleet.simulator.plan import VERSIONS, Plan

START_MS = 1_760_000_000_000
HOURS = 24.0


def plan(**changes):
    return Plan(
        **{
            "count": 12,
            "classes": made_up_classes(),
            "temperatures": made_up_temperatures(),
            "start_ms": START_MS,
            "hours": HOURS,
        }
        | changes
    )


def measured(made):
    """Every window of a fleet, encoded, before anything is sent."""
    devices = Fleet(made).devices
    for device in devices:
        device.measure(made.hours * 3600)
    return [device.spooled() for device in devices]


def test_the_same_seed_makes_the_same_windows():
    """Byte for byte, whatever the keys are; another seed makes others."""
    first = measured(plan(seed=4))
    assert first == measured(plan(seed=4))
    assert first != measured(plan(seed=5))
    assert sum(map(len, first)) > 300  # 12 devices, 24 hours, 2 an hour


def test_steps_do_not_change_what_is_measured():
    """A day at once or in steps of five minutes: the windows are the same."""
    whole = measured(plan(seed=4, count=3))
    devices = Fleet(plan(seed=4, count=3)).devices
    for device in devices:
        for until_s in range(300, int(HOURS * 3600) + 1, 300):
            device.measure(until_s)
    assert [device.spooled() for device in devices] == whole


def test_a_window_is_one_of_its_device():
    """100 inferences of the class, in simulated time, with the sensors of the phone; numbers without gaps."""
    for spooled in measured(plan(seed=1)):
        windows = [json.loads(content) for content in spooled.values()]
        assert [window["sequence"] for window in windows] == list(range(1, len(windows) + 1))
        assert len({window["boot"] for window in windows}) == 1
        for before, after in itertools.pairwise(windows):
            assert before["end_ms"] <= after["start_ms"]
        for window in windows:
            assert START_MS <= window["start_ms"] < window["end_ms"]
            assert window["performance"]["latency_ms"]["count"] == 100
            low = {"fast": 4, "middling": 18, "slow": 60}[window["environment"]["device_model"].split()[-1]]
            assert low <= window["performance"]["latency_ms"]["min"] <= 4 * 190
            assert window["performance"]["throughput_hz"] <= 15.001
            assert 20 < window["resource"]["temperature_c"]["min"] < 52
            assert window["environment"]["network"] in {"wifi", "mobile", "none"}
            assert sum(window["quality"]["classes"].values()) == 100


def test_heat_slows_a_device():
    """The windows of hot moments are slower than those of cool ones, by the throttle of the class."""
    pairs = []
    for spooled in measured(plan(seed=2, count=6)):
        for content in spooled.values():
            window = json.loads(content)
            latency, warmth = window["performance"]["latency_ms"], window["resource"]["temperature_c"]["max"]
            low = {"fast": 4, "middling": 18, "slow": 60}[window["environment"]["device_model"].split()[-1]]
            pairs.append((warmth, latency["min"] / low))
    cool = [slower for warmth, slower in pairs if warmth < 36]
    hot = [slower for warmth, slower in pairs if warmth >= 45]
    assert len(cool) > 20
    assert len(hot) > 5
    assert max(cool) < 2
    assert min(hot) >= 4


def test_networks_follow_the_day():
    """At home mostly wifi, out mostly mobile, as assumed."""
    seen = {True: [], False: []}
    for spooled in measured(plan(seed=3, count=60, windows_per_h=4)):
        for content in spooled.values():
            window = json.loads(content)
            hour = window["start_ms"] // 3_600_000 % 24
            seen[hour >= 20 or hour < 8].append(window["environment"]["network"])
    assert seen[True].count("wifi") / len(seen[True]) == pytest.approx(0.9, abs=0.05)
    assert seen[False].count("mobile") / len(seen[False]) == pytest.approx(0.6, abs=0.08)


def test_a_full_spool_drops_calm_windows_first():
    """The oldest without anomalies go, each is counted, and a later window tells of it."""
    character = Character(
        number=0, device_class=made_up_classes()[2], versions=VERSIONS, windows_per_h=20, spool_windows=20
    )
    device = SimulatedDevice(
        character, DeviceKey(bytes(32)), made_up_temperatures(), seed=0, start_ms=START_MS
    )
    device.measure(6 * 3600)
    tally, windows = device.tally, [json.loads(content) for content in device.spooled().values()]
    assert tally.made == tally.waiting + tally.lost["spool full"]
    assert tally.waiting == len(windows) == 20
    calm = [window["sequence"] for window in windows if not window["anomalies"]]
    odd = [window["sequence"] for window in windows if window["anomalies"]]
    assert odd
    assert min(odd) < tally.made - 20  # an old one stayed, since calm ones went in its place
    assert all(number > min(odd) for number in calm)
    newest = windows[-1]
    assert newest["loss"]["dropped_windows"] == 1  # by the window before


@pytest.mark.parametrize(
    "changes",
    [
        {"count": 0},
        {"hours": 0.0},
        {"speed": 0.0},
        {"speed": float("nan")},
        {"threads": 0},
        {"faulty": {"garbage": -1}},
        {"windows_per_h": 1e6},
        {"count": 3, "faulty": {"stolen_key": 2}},
    ],
)
def test_a_plan_that_cannot_be_followed(changes):
    """One error."""
    with pytest.raises(UserError, match="devices"):
        Fleet(plan(**changes))


def test_faulty_devices_are_in_the_fleet():
    """As many of each as asked for; the two of a stolen key have one key and differ in what they measure."""
    fleet = Fleet(plan(count=40, faulty=dict.fromkeys(ENDS_AS, 2)))
    faults = [device.character.fault for device in fleet.devices]
    assert {fault: faults.count(fault) for fault in ENDS_AS} == dict.fromkeys(ENDS_AS, 2) | {"stolen_key": 4}
    assert faults.count(None) == 40 - 16
    thieves = [device for device in fleet.devices if device.character.fault == "stolen_key"]
    assert len({device.key.device for device in thieves}) == 2
    assert fleet.identities == 38
    for device in thieves:
        device.measure(3600 * 6)
    assert len({tuple(device.spooled().values()) for device in thieves}) == 4


@pytest.mark.parametrize("fault", [None, *ENDS_AS])
def test_one_answer_is_heard(fault):
    """Whatever is sent in addition; what is changed is signed anew, a replay is not."""
    signed = []

    def sign(body):
        signed.append(body)
        return {"signed": str(len(signed))}

    body = gzip.compress(b'{"schema":1,"sent_ms":0,"windows":[]}')
    sent = Sent(body=body, headers={"signed": "0"})
    made = altered(fault, sent, sign, np.random.default_rng(0))
    assert sum(one.heard for one in made) == 1
    if fault == "replay":
        assert made[0] == replace(made[1], heard=True) == sent
    elif fault == "old_schema":
        assert gzip.decompress(made[0].body) == b'{"schema":0,"sent_ms":0,"windows":[]}'
    elif fault == "duplicates":
        assert [one.body for one in made] == [body, body]
        assert made[0].headers != made[1].headers
    assert len(signed) == (1 if fault in {"duplicates", "old_schema", "garbage"} else 0)
