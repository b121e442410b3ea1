"""kill -9 of the gateway and of the compaction: every acknowledged window is there exactly once."""

import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import gateway_kit as kit
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import gateway_load as load

from fleet.gateway import database, parts
from fleet.gateway.compact import compact

_PER_BODY, _BODIES = 15, 40


def test_a_killed_gateway_loses_nothing_that_it_acknowledged(tmp_path):
    """Five times killed at a random moment under load, while it compacts: all is there, and once."""
    folder, rng = tmp_path / "state", random.Random(11)
    bodies = load.bodies(_BODIES, _PER_BODY)
    first = {b: load.FIRST + b * _PER_BODY for b in range(_BODIES)}
    acknowledged, left, devices = set(), None, None
    for _ in range(5):
        with kit.gateway(folder, compact_every_s=0.2) as running:
            if devices is None:
                devices = [running.client() for _ in range(8)]
                left = [(d, b) for b in range(_BODIES) for d in range(8)]
            # What was not acknowledged is sent again, and some of what was.
            again = rng.sample(sorted(acknowledged), len(acknowledged) // 4)
            wire = [(d, b, load.signed(devices[d].key, bodies[b])) for d, b in [*again, *left]]
            timer = threading.Timer(rng.uniform(0.1, 0.8), running.kill)
            timer.start()
            result = kit.run(load.run(running.port, wire, 8))
            timer.join()
        acknowledged |= set(result.acknowledged)
        left = [one for one in left if one not in acknowledged]
        found = kit.windows_in(folder)
        for device, body in acknowledged:
            for sequence in range(first[body], first[body] + _PER_BODY):
                assert found[devices[device].key.device, sequence] == 1
        assert set(found.values()) <= {1}
    assert acknowledged
    with kit.gateway(folder, compact_every_s=0) as running:
        wire = [(d, b, load.signed(devices[d].key, bodies[b])) for d, b in left]
        assert len(kit.run(load.run(running.port, wire, 8)).acknowledged) == len(left)
    while compact(folder):
        pass
    found = kit.windows_in(folder)
    assert set(found.values()) == {1}
    assert len(found) == 8 * _BODIES * _PER_BODY
    assert database.reader(folder).execute("SELECT count(*) FROM batches").fetchone() == (0,)


_KILLED_AT = """
import os, signal, sys
from pathlib import Path
from fleet.gateway import compact, database, parts

left = int(sys.argv[2])
def step(*_):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def killing(function):
    def stepped(*given, **named):
        step()
        result = function(*given, **named)
        step()
        return result
    return stepped

os.replace, os.fsync = killing(os.replace), killing(os.fsync)
opened = database.opened
def traced(folder):
    connection = opened(folder)
    connection.set_trace_callback(step)
    return connection
database.opened = traced
compact.compact(Path(sys.argv[1]))
print("done", left)
"""
"""Compacts, and dies before or after the n-th sync, rename or SQL statement."""


def _compact_killed_at(folder, step):
    return subprocess.run(
        [sys.executable, "-c", _KILLED_AT, str(folder), str(step)],
        cwd=kit.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def filled(tmp_path):
    """A state of two tiers and 60 windows, of which 20 were compacted before; and who sent them."""
    folder = tmp_path / "state"
    with kit.gateway(folder, compact_every_s=0) as running:
        device = running.client()
        for at in range(3):
            batch = [kit.with_tier(kit.window(at * 20 + k), "mid" if k % 2 else "low") for k in range(20)]
            assert device.upload(kit.batch_of(batch)).json()["accepted"] == 20
            if at == 0:
                assert compact(folder) == 20
    return folder, {(device.key.device, sequence): 1 for sequence in range(60)}


def test_a_killed_compaction_loses_and_doubles_nothing(filled):
    """Killed at every eleventh step, again and again, then left alone: each window and each count once."""
    source, expected = filled
    folder = source.with_name("copy")
    shutil.copytree(source, folder)
    steps = 1_000_000 - int(_compact_killed_at(folder, 1_000_000).stdout.split()[1])
    shutil.rmtree(folder)
    killed = 0
    for step in range(1, steps, 11):
        shutil.copytree(source, folder)
        done = _compact_killed_at(folder, step)
        assert done.returncode == -9, done.stderr
        killed += 1
        assert kit.windows_in(folder) == expected
        compact(folder)
        assert kit.windows_in(folder) == expected
        assert _rolled_up(folder) == 60
        listed = {file for kind in ("windows", "hours", "buckets") for file in _listed(folder, kind)}
        assert {file for file in (folder / parts.FOLDER).rglob("*") if file.is_file()} == listed
        shutil.rmtree(folder)
    assert killed >= 5


def _listed(folder, kind):
    connection = database.reader(folder)
    files = [folder / part.path for part in parts.live(connection, kind)]
    connection.close()
    return files


def _rolled_up(folder):
    return sum(
        sum(pq.ParquetFile(file).read(columns=["windows"])["windows"].to_pylist())
        for file in _listed(folder, "hours")
    )


def test_two_compactions_do_not_meet(filled):
    """A second one beside the first returns at once, and nothing is there twice."""
    folder, expected = filled
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "fleet.gateway.compact", str(folder)],
            cwd=kit.ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    printed = [int(child.communicate()[0]) for child in children]
    assert sum(printed) == 40
    assert kit.windows_in(folder) == expected


def test_a_batch_that_cannot_be_read_any_more_is_kept(filled):
    """A stored body that broke does not stop the rest, and is not thrown away."""
    folder, expected = filled
    connection = database.opened(folder)
    connection.execute("UPDATE batches SET body = x'00112233' WHERE id = (SELECT max(id) FROM batches)")
    assert compact(folder) == 20
    reason, raw = connection.execute("SELECT reason, raw FROM quarantine").fetchone()
    connection.close()
    assert (reason, raw) == ("stored, and unreadable now", b"\x00\x11\x22\x33")
    assert len(kit.windows_in(folder)) == len(expected) - 20
