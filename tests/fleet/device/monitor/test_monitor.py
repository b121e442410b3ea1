"""The monitor as a whole: what was recorded arrives, nothing twice, nothing in the way."""

import threading
from dataclasses import replace

import msgspec
import pytest
from gateway_stub import GatewayStub
from telling import AT_ONCE, ENVIRONMENT, READING, VERSIONS, FixedSensors

from fleet.device.credentials import DeviceKey
from fleet.device.errors import UserError
from fleet.device.monitor import Monitor, read_log
from fleet.device.release import AnomalyLimits, UploadRule
from fleet.device.wire import Window

KEY = DeviceKey(bytes(range(32)))


def monitor(folder, url=None, **more):
    settings = {
        "versions": VERSIONS,
        "environment": ENVIRONMENT,
        "sensors": FixedSensors(),
        "upload": AT_ONCE,
    }
    return Monitor(folder, KEY, url, **(settings | more))


def spooled(folder):
    """Windows on the disk, in order."""
    paths = sorted((folder / "windows").iterdir())
    return [msgspec.json.decode(path.read_bytes().partition(b"\n")[2], type=Window) for path in paths]


def test_records_become_windows_at_the_gateway(tmp_path):
    """250 inferences: two full windows and a partial one, every value in them, and the spool empty after."""
    with GatewayStub(KEY) as gateway, monitor(tmp_path, gateway.url) as watched:
        for index in range(250):
            watched.record(10.0 + index, 0.5, index % 3, 100.0, 20.0)
        assert watched.flush()
        assert gateway.wait_for(lambda: len(gateway.bodies) == 3)
        windows = list(gateway.windows().values())
        assert gateway.wait_for(lambda: not list((tmp_path / "windows").iterdir()))
    first = windows[0].sequence
    assert [w.sequence for w in windows] == [first, first + 1, first + 2]
    assert [w.performance.inferences for w in windows] == [100, 100, 50]
    assert [(w.performance.latency_ms.min, w.performance.latency_ms.max) for w in windows] == [
        (10.0, 109.0),
        (110.0, 209.0),
        (210.0, 259.0),
    ]
    assert windows[0].quality.classes == {"0": 34, "1": 33, "2": 33}
    assert windows[0].quality.input_mean.sum == 10_000.0
    assert windows[0].environment == replace(ENVIRONMENT, network="wifi", charging=True)
    assert windows[0].resource.memory_mb.max == READING.memory_mb
    assert len({w.boot for w in windows}) == 1
    assert {r.outcome for r in read_log(tmp_path)} == {"ok"}


def test_no_window_spans_a_change_of_release(tmp_path):
    """What was recorded before belongs to the old versions, to the record."""
    with monitor(tmp_path) as watched:
        for _ in range(130):
            watched.record(20.0)
        watched.set_versions(replace(VERSIONS, release=4), replace(ENVIRONMENT, variant="mbv3s-p0-fp32-r48"))
        for _ in range(7):
            watched.record(30.0)
    windows = spooled(tmp_path)
    assert [(w.versions.release, w.performance.inferences) for w in windows] == [(3, 100), (3, 30), (4, 7)]
    assert windows[2].environment.variant == "mbv3s-p0-fp32-r48"
    assert windows[2].performance.latency_ms.min == 30.0


def test_a_change_of_policy_reaches_both_threads(tmp_path):
    """Nothing is due under the first; under the second the spool leaves, and a slower limit is in force."""
    never = tuple(replace(rule, share=0.0) for rule in AT_ONCE)
    with GatewayStub(KEY) as gateway, monitor(tmp_path, gateway.url, upload=never) as watched:
        for _ in range(100):
            watched.record(20.0)
        assert watched.flush()
        assert gateway.requests == []
        watched.set_policy(AT_ONCE, AnomalyLimits(latency_ms=15.0))
        assert gateway.wait_for(lambda: len(gateway.bodies) == 1)
        for _ in range(100):
            watched.record(20.0)
        assert gateway.wait_for(lambda: len(gateway.bodies) == 2)
        anomalies = [w.anomalies for w in gateway.windows().values()]
        with pytest.raises(ValueError, match="share"):
            watched.set_policy(
                [UploadRule(network="wifi", charging=True, every_s=9, share=2)], AnomalyLimits()
            )
    assert anomalies == [{}, {"latency": 100}]


def test_two_monitors_do_not_share_a_folder(tmp_path):
    """The second is told so; when the first has stopped, there is room."""
    with monitor(tmp_path), pytest.raises(UserError, match="another monitor"):
        monitor(tmp_path)
    monitor(tmp_path).stop()


@pytest.mark.parametrize(
    "url",
    ["http://gateway.example", "ftp://127.0.0.1", "https://", "https://a.example?x=1", "127.0.0.1:8000",
     "http://127.0.0.1.example", "https://me@a.example", "https://a.example:port",
     f"https://{'a' * 70}.example"],
)  # fmt: skip
def test_gateways_that_are_none_or_not_encrypted_are_refused(tmp_path, url):
    """Before any thread or file."""
    with pytest.raises(UserError, match="https"):
        monitor(tmp_path / "new", url)
    assert not (tmp_path / "new").exists()


def test_numbers_go_on_over_restarts(tmp_path):
    """And the boot changes."""
    for _ in range(3):
        with monitor(tmp_path) as watched:
            watched.record(20.0)
    windows = spooled(tmp_path)
    assert len({w.boot for w in windows}) == 3
    assert [w.sequence for w in windows] == sorted({w.sequence for w in windows})


def test_stopping_twice_is_stopping_once(tmp_path):
    """No window more, and no thread of the monitor left."""
    watched = monitor(tmp_path)
    watched.record(1.0)
    watched.stop()
    watched.stop()
    assert len(spooled(tmp_path)) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edgeloop-")]


def test_a_monitor_without_inferences_writes_nothing(tmp_path):
    """Not even a window that says so."""
    with monitor(tmp_path) as watched:
        assert watched.flush()
    assert spooled(tmp_path) == []


def test_more_records_than_the_ring_holds_are_counted(tmp_path):
    """Written faster than any worker reads: what is in windows and what is counted is everything."""
    with monitor(tmp_path) as watched:
        for _ in range(30_000):
            watched.record(20.0)
    windows = spooled(tmp_path)
    recorded = sum(w.performance.inferences for w in windows)
    assert recorded + sum(w.loss.overwritten_records for w in windows) == 30_000
    assert recorded >= 2047
