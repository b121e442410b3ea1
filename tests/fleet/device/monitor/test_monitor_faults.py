"""Kill -9, a full or read-only disk, a broken network: nothing acknowledged is lost, every loss is told."""

import itertools
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_stub import GatewayStub
from telling import AT_ONCE, ENVIRONMENT, VERSIONS, FixedSensors

from fleet.device.credentials import DeviceKey
from fleet.device.monitor import Monitor, read_log
from fleet.device.monitor import spool as spool_module
from fleet.device.monitor import upload_policy as policy_module

KEY = DeviceKey(bytes(range(32)))
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
KILLS = 5


def monitor(folder, url=None):
    return Monitor(
        folder, KEY, url, versions=VERSIONS, environment=ENVIRONMENT, sensors=FixedSensors(), upload=AT_ONCE
    )


def numbers_on_disk(folder):
    return {int(path.name[:20]) for path in (folder / "windows").glob("*.json")}


def kill_at_a_random_moment(folder, gateway, counter, rng):
    """Let a child record, kill it; (recorded before, recorded after, numbers on the disk)."""

    def recorded():
        return struct.unpack("<q", counter.read_bytes())[0]

    def arrived():
        texts = list(gateway.bodies.values())
        return max((json.loads(text)["quality"]["input_mean"]["max"] for text in texts), default=-1)

    before = recorded()
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{HERE}"}
    child = subprocess.Popen(
        [sys.executable, HERE / "recording_child.py", folder, gateway.url, counter], env=environment
    )
    try:
        wanted = rng.randrange(150, 900)
        assert gateway.wait_for(lambda: recorded() >= before + wanted and arrived() >= before)
    finally:
        child.kill()
        child.wait()
    return before, recorded(), numbers_on_disk(folder)


def test_kill_9_at_random_moments_loses_the_open_window_only(tmp_path):
    """Five times, with a network that fails too. What was on the disk arrives; no number names two windows;
    no inference is in two; within each process what arrived and what is counted as lost has no hole."""
    rng, counter, folder = random.Random(), tmp_path / "counter", tmp_path / "monitor"
    counter.write_bytes(struct.pack("<q", 0))
    with GatewayStub(KEY) as gateway:
        runs = []
        for _ in range(KILLS):
            gateway.faults.clear()  # four in a row would be a minute's pause
            gateway.faults += rng.choices(["lost answer", "cut answer", "hang up", 500, None], k=2)
            runs.append(kill_at_a_random_moment(folder, gateway, counter, rng))
        gateway.faults.clear()
        with monitor(folder, gateway.url):
            assert gateway.wait_for(lambda: not numbers_on_disk(folder))
        windows = gateway.windows()
    assert set().union(*(on_disk for _, _, on_disk in runs)) <= set(windows)
    spans = sorted(
        (w.quality.input_mean.min, w.quality.input_mean.max, w.performance.inferences)
        for w in windows.values()
    )
    assert all(one[1] < other[0] for one, other in itertools.pairwise(spans))
    boots = {w.boot for w in windows.values()}
    assert len(boots) == KILLS
    for boot in boots:
        mine = [w for w in windows.values() if w.boot == boot]
        first = min(w.quality.input_mean.min for w in mine)
        last = max(w.quality.input_mean.max for w in mine)
        told = sum(w.performance.inferences + w.loss.overwritten_records for w in mine)
        assert told == last - first + 1
        assert sum(w.loss.dropped_windows for w in mine) == 0
        assert first in {before for before, _, _ in runs}
    assert {request.outcome for request in read_log(folder)} <= {"ok", "network", "5xx"}


def test_a_network_that_fails_in_every_way_costs_nothing(tmp_path, monkeypatch):
    """Sixteen requests that fail at random, whole turns among them: each window arrives under one number."""
    monkeypatch.setattr(policy_module, "PAUSE_S", 0)
    monkeypatch.setattr("fleet.device.monitor.delivery.BACKOFF_S", 0.01)
    monkeypatch.setattr("fleet.device.monitor.uploader._POLL_S", 0.02)
    faults = ["hang up", "cut answer", "lost answer", "portal", "redirect", 500, 502, 429, 408, 404, 403]
    with GatewayStub(KEY) as gateway:
        gateway.faults += random.Random().choices(faults, k=16)
        with monitor(tmp_path, gateway.url) as watched:
            for index in range(1000):
                watched.record(20.0, 0.9, 1, float(index))
            assert watched.flush()
            assert gateway.wait_for(lambda: not numbers_on_disk(tmp_path))
        windows = gateway.windows().values()
        assert not gateway.faults
    assert sum(w.performance.inferences for w in windows) == 1000
    assert sorted(w.quality.input_mean.min for w in windows) == list(range(0, 1000, 100))


def test_stopping_does_not_wait_for_a_gateway_that_does_not_answer(tmp_path, monkeypatch):
    """The request under way is cut; its windows are there for the next process."""
    monkeypatch.setattr("fleet.device.monitor.uploader._POLL_S", 0.02)
    with GatewayStub(KEY) as gateway:
        gateway.faults += ["drip"] * 9
        watched = monitor(tmp_path, gateway.url)
        for _ in range(100):
            watched.record(20.0)
        assert gateway.wait_for(lambda: gateway.requests)
        watched.stop()
        assert len(numbers_on_disk(tmp_path)) == 1
        assert not watched._uploader.is_alive()
        gateway.faults.clear()
        with monitor(tmp_path, gateway.url):
            assert gateway.wait_for(lambda: not numbers_on_disk(tmp_path))
    assert len(gateway.bodies) == 1


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def record_windows(watched, n, first=0):
    """n full windows, so slowly that the ring never overflows; the image's mean is the inference's number."""
    for index in range(first * 100, (first + n) * 100):
        watched.record(20.0, 0.9, 1, float(index))
        if index % 1000 == 999:
            watched.flush()
    watched.flush()


def everything(windows):
    """Inferences in windows, and in those that the windows say were dropped."""
    return sum(w.performance.inferences + 100 * w.loss.dropped_windows for w in windows)


@pytest.mark.parametrize("trouble", ["full", "read-only"])
def test_a_disk_that_takes_nothing_costs_what_is_told(small_disk, tmp_path, monkeypatch, trouble):
    """Recording goes on, the last 64 windows wait in memory; with room again, all arrive or are told of."""
    monkeypatch.setattr(spool_module, "_RETRY_S", 0.0)
    folder = small_disk / "monitor"
    with GatewayStub(KEY) as gateway:
        with monitor(folder, None) as watched:
            record_windows(watched, 10)
            if trouble == "full":
                _fill(small_disk / "filler")
            else:
                subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
            record_windows(watched, 90, first=10)
            assert not watched.flush()
            assert 10 <= len(numbers_on_disk(folder)) < 30
            if trouble == "full":
                (small_disk / "filler").unlink()
            else:
                subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
            record_windows(watched, 1, first=100)
        with monitor(folder, gateway.url):
            assert gateway.wait_for(lambda: not numbers_on_disk(folder))
        windows = gateway.windows().values()
    dropped = sum(w.loss.dropped_windows for w in windows)
    assert dropped > 0
    assert everything(windows) == 10_100


def _fill(path):
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            return


def test_a_limit_on_files_is_a_full_disk(tmp_path):
    """The same by RLIMIT_FSIZE, which needs no root: a child whose files may hold a kilobyte, then more."""
    code = f"""
import resource, sys
sys.path[:0] = [{str(ROOT)!r}, {str(HERE)!r}]
from pathlib import Path
from fleet.device.monitor import spool
from test_monitor_faults import monitor, record_windows
spool._RETRY_S = 0.0
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
with monitor(Path(sys.argv[1])) as watched:
    record_windows(watched, 3)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    record_windows(watched, 70, first=3)
    assert not watched.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    record_windows(watched, 1, first=73)
"""
    folder = tmp_path / "monitor"
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with GatewayStub(KEY) as gateway, monitor(folder, gateway.url):
        assert gateway.wait_for(lambda: not numbers_on_disk(folder))
        windows = gateway.windows().values()
    assert sum(w.loss.dropped_windows for w in windows) == 70 - 64
    assert everything(windows) == 7400
