"""Windows on the disk: numbers never given twice, bounded, whole or not at all, every loss counted."""

import json
import os
import subprocess
import sys
import threading
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from telling import window

from fleet.device.errors import UserError
from fleet.device.monitor import spool as spool_module
from fleet.device.monitor.loss import LossCounter
from fleet.device.monitor.sequence import BLOCK, Sequences
from fleet.device.monitor.spool import MOST_IN_MEMORY, Spool
from fleet.device.wire import Loss

CLOCK_MS = 1_800_000_000_000


def opened(folder, loss=None, **more):
    return Spool(folder, loss or LossCounter(), wall_ms=lambda: CLOCK_MS, **more)


def marks(spool):
    """The latency that marks each window, by number."""
    return {
        number: json.loads(spool.read(number))["performance"]["latency_ms"]["max"]
        for number in spool.waiting()
    }


def test_windows_outlive_the_process(tmp_path):
    """With their numbers; those of the next process come after."""
    first = opened(tmp_path)
    for mark in (1.0, 2.0):
        first.put(window(mark=mark))
    first.close()
    second = opened(tmp_path)
    second.put(window(mark=3.0))
    found = marks(second)
    assert list(found.values()) == [1.0, 2.0, 3.0]
    assert list(found) == sorted(set(found))
    second.remove(found)
    assert second.waiting() == {}
    assert list((tmp_path / "windows").iterdir()) == []


def test_numbers_are_reserved_before_they_are_used(tmp_path):
    """A process that never came to write them leaves a gap, and nobody uses those."""
    path = tmp_path / "sequence"
    given = []
    for _ in range(3):
        numbers = Sequences(path, above=0, now_ms=CLOCK_MS)
        given += [numbers.next() for _ in range(BLOCK + 1)]
    assert len(set(given)) == len(given)
    assert given == sorted(given)
    assert given[0] == CLOCK_MS  # of another installation's, which had the same key, none is used again


def test_a_folder_emptied_beside_a_kept_key_repeats_no_number(tmp_path):
    """An app installed anew: the gateway knows the key, and would take a number of before for a repeat."""
    first = Sequences(tmp_path / "a", above=0, now_ms=CLOCK_MS)
    given = {first.next() for _ in range(500)}
    again = Sequences(tmp_path / "b", above=0, now_ms=CLOCK_MS + 60_000)
    assert not given & {again.next() for _ in range(500)}


@pytest.mark.parametrize("content", [b"", b"12", b"99 00000000\n", b"\xff\x00", b"-5 12345678"])
def test_a_broken_file_of_numbers_repeats_none(tmp_path, content):
    """They go on from the time, or after the highest in the spool."""
    first = opened(tmp_path)
    first.put(window())
    (used,) = first.waiting()
    first.close()
    (tmp_path / "sequence").write_bytes(content)
    second = opened(tmp_path)
    second.put(window())
    assert sorted(second.waiting()) == [used, max(CLOCK_MS, used + 1)]


def test_a_full_spool_drops_the_oldest_without_anomalies(tmp_path):
    """And the window that takes its place says so, with the losses that the dropped one told of."""
    loss = LossCounter()
    spool = opened(tmp_path, loss, most_windows=3)
    spool.put(window(mark=1.0, anomalous=True))
    spool.put(replace(window(mark=2.0), loss=Loss(overwritten_records=5, dropped_windows=2)))
    spool.put(window(mark=3.0))
    spool.put(window(mark=4.0))
    found = marks(spool)
    assert list(found.values()) == [1.0, 3.0, 4.0]
    assert json.loads(spool.read(max(found)))["loss"] == {
        "overwritten_records": 5,
        "dropped_windows": 3,
        "not_finite": 0,
    }
    for mark in (5.0, 6.0, 7.0):
        spool.put(window(mark=mark, anomalous=True))
    assert list(marks(spool).values()) == [5.0, 6.0, 7.0]  # anomalies only: the oldest of them go too
    assert len(list((tmp_path / "windows").iterdir())) == 3
    assert loss.take() == Loss()


def test_a_window_of_another_version_gives_way_too(tmp_path):
    """What it tells of losses is taken as far as it is known."""
    spool = opened(tmp_path, most_windows=1)
    spool.put(window(mark=1.0))
    (path,) = (tmp_path / "windows").iterdir()
    content = b'{"loss":{"overwritten_records":4,"of_later":9}}'
    path.write_bytes(b"%08x\n%s" % (zlib.crc32(content), content))
    spool.put(window(mark=2.0))
    (kept,) = spool.waiting()
    assert json.loads(spool.read(kept))["loss"]["overwritten_records"] == 4
    assert json.loads(spool.read(kept))["loss"]["dropped_windows"] == 1


def test_what_is_being_sent_does_not_give_way(tmp_path):
    """The gateway may be taking it just now: it would be both acknowledged and lost."""
    spool = opened(tmp_path, most_windows=2)
    for mark in (1.0, 2.0):
        spool.put(window(mark=mark))
    with spool.in_flight(list(spool.waiting())[:1]):
        spool.put(window(mark=3.0))
    assert list(marks(spool).values()) == [1.0, 3.0]


@pytest.mark.parametrize("damage", [b"", b"x", b"00000000\n{}"])
def test_a_broken_file_is_put_aside_and_counted(tmp_path, damage):
    """Cut short, garbage, or a wrong checksum; the others are not touched."""
    loss = LossCounter()
    spool = opened(tmp_path, loss)
    for mark in (1.0, 2.0):
        spool.put(window(mark=mark))
    broken, whole = spool.waiting()
    next((tmp_path / "windows").glob(f"*{broken}-n.json")).write_bytes(damage)
    assert spool.read(broken) is None
    assert list(spool.waiting()) == [whole]
    assert loss.take() == Loss(dropped_windows=1)
    assert [path.read_bytes() for path in (tmp_path / "aside").iterdir()] == [damage]


def test_a_flipped_bit_is_found(tmp_path):
    """Any one of a window's file."""
    spool = opened(tmp_path)
    spool.put(window())
    (path,) = (tmp_path / "windows").iterdir()
    good = bytearray(path.read_bytes())
    (number,) = spool.waiting()
    assert spool.read(number) is not None
    for place in range(0, len(good), 97):
        bad = good.copy()
        bad[place] ^= 4
        path.write_bytes(bad)
        spool._waiting[number] = False
        assert spool.read(number) is None
    assert len(list((tmp_path / "aside").iterdir())) == 1


def test_a_file_that_somebody_removed_is_counted_once(tmp_path):
    """Whoever cleans up behind the monitor's back loses windows, not the count."""
    loss = LossCounter()
    spool = opened(tmp_path, loss)
    spool.put(window())
    (number,) = spool.waiting()
    next((tmp_path / "windows").iterdir()).unlink()
    assert spool.read(number) is spool.read(number) is None
    assert loss.take() == Loss(dropped_windows=1)


def test_half_written_and_foreign_files_are_no_windows(tmp_path):
    """What a killed process was writing is swept; what is not the spool's stays and is not sent."""
    (tmp_path / "windows").mkdir()
    (tmp_path / "windows" / "00000000000000000007-n.json.partial").write_bytes(b"{")
    (tmp_path / "windows" / "notes.txt").write_bytes(b"mine")
    spool = opened(tmp_path)
    assert spool.waiting() == {}
    assert [path.name for path in (tmp_path / "windows").iterdir()] == ["notes.txt"]


def test_a_folder_that_cannot_be_written_keeps_the_newest_in_memory(tmp_path, monkeypatch):
    """A file in its place: bounded, counted, anomalies kept longest, and written when the way is free."""
    monkeypatch.setattr(spool_module, "_RETRY_S", 0.0)
    loss, folder = LossCounter(), tmp_path / "monitor"
    folder.write_bytes(b"in the way")
    spool = opened(folder, loss)
    spool.put(window(mark=1.0, anomalous=True))
    for index in range(MOST_IN_MEMORY + 4):
        spool.put(replace(window(mark=100.0 + index), loss=Loss(not_finite=1)))
    assert spool.in_memory == MOST_IN_MEMORY
    assert loss.take() == Loss(dropped_windows=5, not_finite=5)
    folder.unlink()
    spool.settle()
    kept = list(marks(spool).values())
    assert kept == [1.0, *(105.0 + index for index in range(MOST_IN_MEMORY - 1))]
    assert list(spool.waiting()) == list(range(CLOCK_MS, CLOCK_MS + MOST_IN_MEMORY))
    assert spool.close() == 0


def test_a_disk_that_stays_away_loses_what_it_says(tmp_path):
    """Closing tells how many windows go with the process."""
    (tmp_path / "monitor").write_bytes(b"in the way")
    spool = opened(tmp_path / "monitor")
    spool.put(window())
    assert spool.close() == 1


def test_a_write_that_fails_half_way_keeps_its_number(tmp_path, monkeypatch):
    """The window may lie there already: written again, it is the same one."""
    monkeypatch.setattr(spool_module, "_RETRY_S", 0.0)
    spool, real, fails = opened(tmp_path), os.fsync, [1]

    def fsync(descriptor):
        of_a_folder = Path(f"/proc/self/fd/{descriptor}").is_dir()
        if fails and of_a_folder and list((tmp_path / "windows").glob("*.json")):
            fails.pop()
            raise OSError(5, "I/O error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    spool.put(window(mark=1.0))
    assert fails == []
    assert spool.in_memory == 1
    spool.put(window(mark=2.0))
    assert marks(spool) == {CLOCK_MS: 1.0, CLOCK_MS + 1: 2.0}


def test_the_lock_goes_with_the_process(tmp_path):
    """Held by a living process, free after kill -9."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from fleet.device.monitor.loss import LossCounter\nfrom fleet.device.monitor.spool import Spool\n"
        "spool = Spool(Path(sys.argv[1]), LossCounter()); print('open', flush=True); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"open\n"
        with pytest.raises(UserError, match="another monitor"):
            opened(tmp_path)
    finally:
        child.kill()
        child.communicate()
    opened(tmp_path).close()


def test_one_reads_while_the_other_writes(tmp_path):
    """A reader that removes what it read and a writer with a small bound: each window is read or counted."""
    loss = LossCounter()
    spool, n, read = opened(tmp_path, loss, most_windows=4), 120, []
    template = window()
    written = threading.Event()

    def consume():
        while not (written.is_set() and not spool.waiting()):
            batch = list(spool.waiting())[:2]
            with spool.in_flight(batch) as kept:
                found = [json.loads(content) for number in kept if (content := spool.read(number))]
                read.extend(found)
                spool.remove([record["sequence"] for record in found])

    reader = threading.Thread(target=consume)
    reader.start()
    for _ in range(n):
        spool.put(template)
    written.set()
    reader.join()
    numbers = [record["sequence"] for record in read]
    told = sum(record["loss"]["dropped_windows"] for record in read)
    assert len(set(numbers)) == len(numbers)
    assert len(numbers) + told + loss.take().dropped_windows == n
