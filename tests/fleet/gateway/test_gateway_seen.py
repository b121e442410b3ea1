"""Which windows count as new, repeated or too late."""

from hypothesis import given
from hypothesis import strategies as st

from fleet.gateway import database
from fleet.gateway.buckets import Buckets
from fleet.gateway.seen import REACH, Seen


@given(st.lists(st.lists(st.integers(0, 300), max_size=20), max_size=20))
def test_every_number_is_new_once(batches):
    """In any order, with gaps, stored and read in between: a number is new exactly the first time."""
    seen, known = Seen(), set()
    for batch in batches:
        new, repeated, late = seen.add(enumerate(batch))
        for index, sequence in enumerate(batch):
            assert (index in new) == (sequence not in known)
            assert (index in repeated) == (sequence in known)
            known.add(sequence)
        assert late == []
        seen = Seen.of(seen.newest, seen.to_bytes())


def test_the_edge_of_the_reach():
    """The window exactly REACH behind the newest is late, the one before it is known."""
    seen = Seen()
    seen.add([(0, 10)])
    assert seen.add([(0, 10 + REACH)]) == ([0], [], [])
    assert seen.add([(0, 10)]) == ([], [], [0])
    assert seen.add([(0, 11)]) == ([0], [], [])
    assert seen.add([(0, 11)]) == ([], [0], [])


def test_a_hostile_number_costs_no_memory():
    """A jump to the largest number takes no more than the bits' own size."""
    seen = Seen()
    seen.add([(0, 1)])
    seen.add([(0, 1 << 52)])
    assert len(seen.to_bytes()) == 1
    assert seen.add([(0, (1 << 52) - REACH + 1)]) == ([0], [], [])
    assert len(seen.to_bytes()) == REACH // 8


def test_the_emptiest_buckets_outlive_an_overflow():
    """A device that used its rate up is not let in again because fifty thousand others came."""
    buckets = Buckets(per_s=0.001, burst=2)
    assert [buckets.wait_s("greedy", 0.0) for _ in range(2)] == [0, 0]
    for number in range(50_000):
        buckets.wait_s(str(number), 1.0)
    assert buckets.wait_s("greedy", 2.0) > 0


def test_a_commit_waits_for_the_disk(tmp_path):
    """FULL: what was answered outlives a power cut."""
    connection = database.opened(tmp_path)
    assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    connection.close()
