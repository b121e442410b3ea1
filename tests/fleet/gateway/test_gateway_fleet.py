"""A simulated fleet against a real gateway: the two accounts agree, and faulty devices disturb nobody."""

import contextlib
import socket
import sqlite3
import threading
import time
from collections import Counter

import gateway_kit as kit
import numpy as np
import pyarrow.parquet as pq
import pytest

from fleet.device.errors import UserError
from fleet.device.histogram import RELATIVE_ERROR
from fleet.device.monitor.client import GatewayClient
from fleet.gateway import database, parts, serve
from fleet.gateway.compact import compact
from fleet.gateway.queries import Fleet as Questions
from fleet.simulator.device_classes import DeviceClass, Quantiles, Throttle
from fleet.simulator.drift import Drift
from fleet.simulator.faults import ENDS_AS
from fleet.simulator.fleet import Fleet
from fleet.simulator.made_up import made_up_classes, made_up_temperatures
from fleet.simulator.plan import Plan

DAY_S = 86_400.0
STEADY = DeviceClass(
    name="steady",
    soc="none",
    source="made_up",
    latency=Quantiles(at=(0.0, 0.5, 0.9, 0.99, 1.0), ms=(10.0, 20.0, 30.0, 45.0, 60.0)),
    tier="mid",
    share=1.0,
    throttle=Throttle(factor=1.0),
)
"""As fast when hot, and never anomalous: what reaches the gateway is a fair sample of what was measured."""


def plan(**changes):
    given = {
        "count": 200,
        "classes": (*made_up_classes(), STEADY),
        "temperatures": made_up_temperatures(),
        "start_ms": kit.now_ms() - int(DAY_S * 1000),
        "threads": 8,
    }
    return Plan(**given | changes)


def tokens(folder, count):
    made = iter(serve.token(folder, count=count))
    return lambda: next(made)


def run(gateway, fleet):
    fleet.run(f"http://127.0.0.1:{gateway.port}", tokens(gateway.folder, fleet.identities))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """200 devices through one simulated day; the gateway is gone, its folder stays."""
    with kit.gateway(tmp_path_factory.mktemp("fleet") / "state", compact_every_s=0) as gateway:
        fleet = Fleet(plan(faulty=dict.fromkeys(ENDS_AS, 2), drifted={Drift(kind="blur", strength=0.9): 10}))
        run(gateway, fleet)
    return gateway.folder, fleet


def test_both_accounts_agree(ran):
    """Every accepted window is stored once, device by device; nothing else is; nothing failed."""
    folder, fleet = ran
    stored = kit.windows_in(folder)
    assert max(stored.values()) == 1
    by_device = Counter(device for device, _ in stored)
    told = Counter()
    for device in fleet.devices:
        told[device.key.device] += device.tally.accepted
    assert +told == by_device
    total = fleet.tally()
    assert total.made > 8_000
    assert total.made == total.delivered + total.waiting + total.lost.total()
    assert not total.failed


def test_nothing_that_a_sound_device_was_told_of_is_missing(ran):
    """What left a device is stored, number by number; what waits is not."""
    folder, fleet = ran
    stored = set(kit.windows_in(folder))
    for device in fleet.devices:
        if device.character.fault is None:
            waiting = set(device.spooled())
            gone = set(range(1, device.tally.made + 1)) - waiting
            assert {number for name, number in stored if name == device.key.device} == gone
    sound = fleet.tallies()["sound"]
    assert sound.accepted == sound.delivered > 5_000
    assert (sound.duplicates, sound.quarantined, sound.refused) == (0, 0, Counter())


def test_each_fault_ends_as_documented(ran):
    """By its code or its count, and never with a 5xx."""
    folder, fleet = ran
    by = fleet.tallies()
    clock = by["clock"]
    assert clock.refused["clock"] > 0
    assert (clock.accepted, clock.quarantined) == (0, clock.delivered)
    twice = by["duplicates"]
    assert twice.accepted == twice.duplicates == twice.delivered > 0
    reordered = by["reordered"]
    assert reordered.accepted == reordered.delivered > 0
    assert not reordered.refused
    old = by["old_schema"]
    assert (old.accepted, old.quarantined) == (0, old.requests)
    assert old.delivered > 0
    garbage = by["garbage"]
    assert set(garbage.refused) == {"gzip", "batch"}
    assert (garbage.delivered, garbage.waiting) == (0, garbage.made)
    replay = by["replay"]
    assert replay.refused == Counter(replay=replay.requests // 2)
    assert (replay.accepted, replay.duplicates) == (replay.delivered, 0)
    stolen = by["stolen_key"]
    assert stolen.accepted + stolen.duplicates == stolen.delivered
    assert stolen.duplicates > 0
    with contextlib.closing(database.reader(folder)) as connection:
        reasons = connection.execute("SELECT reason, count(*) FROM quarantine GROUP BY reason").fetchall()
    assert sum(count for _, count in reasons) == clock.quarantined + old.quarantined
    assert sum(count for reason, count in reasons if reason.startswith("schema 0")) == old.quarantined


def test_percentiles_are_those_of_the_class(ran):
    """Of a class that does not throttle: within the histogram's error and 2 % for the sample."""
    folder, _ = ran
    compact(folder)
    quantiles = (0.25, 0.5, 0.9, 0.99)
    by_model = {
        group.keys["device_model"]: group
        for group in Questions(folder).percentiles("latency_ms", by=("device_model",), quantiles=quantiles)
    }
    assert set(by_model) == {one.name for one in (*made_up_classes(), STEADY)}
    steady = by_model["steady"]
    assert steady.count > 100_000
    true = np.exp(np.interp(quantiles, STEADY.latency.at, np.log(STEADY.latency.ms)))
    np.testing.assert_allclose(steady.values, true, rtol=RELATIVE_ERROR + 0.02)


def test_drift_shows_in_confidence(ran):
    """The ten devices with blur, and no other, have inferences below the limit of confidence."""
    folder, fleet = ran
    compact(folder)
    with contextlib.closing(database.reader(folder)) as connection:
        files = [folder / part.path for part in parts.live(connection, "windows")]
    unsure = Counter()
    for file in files:
        rows = pq.ParquetFile(file).read(columns=["device", "anomalies_confidence"]).to_pydict()
        for device, count in zip(rows["device"], rows["anomalies_confidence"], strict=True):
            unsure[device] += count
    blurred = {d.key.device for d in fleet.devices if d.character.drift.kind == "blur"}
    assert len(blurred) == 10
    assert set(+unsure) == blurred


def test_a_revoked_key_serves_neither_of_two(tmp_path):
    """Owner and thief are refused from then on; another device goes on."""
    with kit.gateway(tmp_path / "state") as gateway:
        fleet = Fleet(plan(count=3, hours=12.0, faulty={"stolen_key": 1}))
        run(gateway, fleet)
        before = kit.windows_in(gateway.folder)
        both = [device for device in fleet.devices if device.character.fault == "stolen_key"]
        serve.revoke(gateway.folder, both[0].key.device)
        client = GatewayClient(f"http://127.0.0.1:{gateway.port}")
        for device in fleet.devices:
            for until_s in range(12 * 3600, 48 * 3600, 300):
                device.step(until_s, client, lambda _: True)
        client.close()
        added = {device for device, _ in kit.windows_in(gateway.folder) - before}
    assert all(set(device.tally.refused) == {"revoked"} for device in both)
    (sound,) = set(fleet.devices) - set(both)
    assert added == {sound.key.device}
    assert not sound.tally.refused


def test_a_gateway_that_is_killed_loses_nothing(tmp_path):
    """kill -9 in the middle of the day, started again: all that devices were told of is there, once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path / "state"
    fleet = Fleet(plan(count=60, windows_per_h=6.0))
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(kit.gateway(folder, port=port))
        running = threading.Thread(target=run, args=(first, fleet))
        running.start()
        while running.is_alive() and sum(device.tally.accepted for device in fleet.devices) < 1_000:
            time.sleep(0.02)
        first.kill()
        stack.enter_context(kit.gateway(folder, port=port))
        running.join()
        stored = kit.windows_in(folder)
    assert max(stored.values()) == 1
    assert fleet.tally().failed["network"] > 0
    assert fleet.tally().delivered > 2_000
    for device in fleet.devices:
        gone = set(range(1, device.tally.made + 1)) - set(device.spooled())
        assert gone <= {number for name, number in stored if name == device.key.device}


def test_no_gateway_and_no_token(tmp_path):
    """One error that names the gateway, and the threads are gone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UserError, match=f"127.0.0.1:{port}"):
        Fleet(plan(count=3)).run(f"http://127.0.0.1:{port}", lambda: "token")
    with (
        kit.gateway(tmp_path / "state") as gateway,
        pytest.raises(UserError, match=r"401.*token"),
    ):
        Fleet(plan(count=3)).run(f"http://127.0.0.1:{gateway.port}", lambda: "token")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edgeloop-simulator")]


def test_enrolment_waits_for_the_gateway(tmp_path):
    """More devices than an address may enrol at once: each gets in, at the gateway's pace."""
    limits = kit.Limits(enrolments_per_s=4.0, enrolments_burst=2)
    with kit.gateway(tmp_path / "state", limits=limits) as gateway:
        fleet = Fleet(plan(count=6, hours=0.5))
        run(gateway, fleet)
        with contextlib.closing(sqlite3.connect(gateway.folder / database.FILE)) as connection:
            assert connection.execute("SELECT count(*) FROM devices").fetchone() == (6,)
