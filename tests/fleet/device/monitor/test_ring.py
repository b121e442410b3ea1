"""The ring buffer: what is read is what was written, what was overwritten is counted, nobody waits."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.device.monitor.ring import DONE, FAILED, Ring


def fill(ring, n, first=0):
    for index in range(first, first + n):
        ring.write(DONE, float(index), 0.5, index % 7, 1.0, 2.0)


def test_a_record_comes_out_as_it_went_in():
    """Every field, bit by bit, and the time between the writes around it."""
    ring = Ring(4)
    ring.write(FAILED, 0.1, float("nan"), -1, 1e308, -0.0)
    ring.write(DONE, 5e-324, 1.0, 2**31 - 1, 3.0, 4.0)
    first, second = ring.drain().records
    assert (first["sequence"], first["kind"], first["latency_ms"], first["label"]) == (1, FAILED, 0.1, -1)
    assert np.isnan(first["confidence"])
    assert first["input_mean"] == 1e308
    assert (second["sequence"], second["latency_ms"], second["label"]) == (2, 5e-324, 2**31 - 1)
    assert second["time_ns"] >= first["time_ns"]


@given(st.lists(st.integers(0, 40), max_size=12))
def test_read_and_overwritten_are_everything(bursts):
    """Bursts of any length between reads: the newest survive, in order, and the sum holds."""
    ring, written, lost, seen = Ring(16), 0, 0, []
    for burst in bursts:
        fill(ring, burst, written)
        written += burst
        drained = ring.drain()
        kept = drained.records["sequence"].tolist()
        assert kept == list(range(written - len(kept) + 1, written + 1))
        assert len(kept) >= min(burst, 15)
        assert drained.records["latency_ms"].tolist() == [number - 1.0 for number in kept]
        lost += drained.overwritten
        seen += kept
        assert drained.head == written
    assert len(seen) + lost == written


@pytest.mark.parametrize("slots", [0, 1, 3, 1000])
def test_slots_are_a_power_of_two(slots):
    """Anything else would map two records onto one slot wrongly."""
    with pytest.raises(ValueError, match="power of two"):
        Ring(slots)


def test_a_writer_at_full_speed_is_never_read_torn():
    """Two threads: each record's fields belong together, numbers only rise, and read + lost = written."""
    ring, n = Ring(256), 60_000
    writer = threading.Thread(target=fill, args=(ring, n))
    seen, lost, last = 0, 0, 0
    writer.start()
    while True:
        running = writer.is_alive()
        drained = ring.drain()
        numbers = drained.records["sequence"].astype(np.int64)
        if len(numbers):
            assert numbers[0] > last
            assert (np.diff(numbers) > 0).all()
            last = int(numbers[-1])
        np.testing.assert_array_equal(drained.records["latency_ms"], numbers - 1.0)
        np.testing.assert_array_equal(drained.records["label"], (numbers - 1) % 7)
        seen, lost = seen + len(numbers), lost + drained.overwritten
        if not running:
            break
    assert seen + lost == n


def test_what_the_writer_may_be_overwriting_is_not_read():
    """The writer overtakes while the reader copies: the slots it passed and the one it is in are dropped."""

    class Overtaking(Ring):
        """Writes 3 more records between the copy and the second look at the head."""

        def __init__(self, slots):
            self.looks = 0
            super().__init__(slots)

        @property
        def head(self):
            self.looks += 1
            return self._head + (3 if self.armed and self.looks == 2 else 0)

        @head.setter
        def head(self, value):
            self._head = value

        armed = False

    ring = Overtaking(8)
    fill(ring, 8)
    ring.armed, ring.looks = True, 0
    drained = ring.drain()
    assert drained.records["sequence"].tolist() == [5, 6, 7, 8]
    assert drained.overwritten == 4
