"""The order of measurements, on a device that only counts; the noise criterion on made-up samples."""

import contextlib
from dataclasses import replace

import pytest

from fleet.device.engine import RuntimeConfig
from fleet.lab.schedule import Job, is_noisy, measure, pooled_ms


class CountingDevice:
    """A device in memory: answers with a run whose latency is the turn it was measured in."""

    name = "counting"

    def __init__(self, quiet):
        self.quiet, self.turns, self.locked, self.asked = quiet, [], 0, []

    @contextlib.contextmanager
    def lock(self):
        self.locked += 1
        yield
        self.locked -= 1

    def run(self, program, options, *, model=None):
        assert (program, self.locked) == ("fleet.device.bench", 1)
        self.turns.append((model, options["config"]["threads"]))
        self.asked.append(options["queries"])
        return replace(self.quiet, latency_ms=[float(len(self.turns))] * options["queries"]).to_dict()


def jobs(*names):
    return [Job(model=name, config=RuntimeConfig(threads=t)) for name in names for t in (1, 2)]


def test_models_and_configs_run_forth_and_back(raw_run):
    """ABBA over all of them: each second round is the first one backwards, under one lock."""
    device = CountingDevice(raw_run())
    measure(device, jobs("a", "b"), queries=4, rounds=2)
    forth = [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert device.turns == forth + forth[::-1]
    assert device.locked == 0


def test_drift_falls_on_all_alike(raw_run):
    """A device that grows slower with each run leaves two models with the same mean."""
    got = measure(CountingDevice(raw_run()), [Job(model="a"), Job(model="b")], queries=4, rounds=4)
    means = [pooled_ms(runs).mean() for runs in got]
    assert means[0] == means[1] == 4.5


def test_rounds_split_the_queries(raw_run):
    """Three rounds of an odd number of queries still give at least what was asked, in the rounds' order."""
    device = CountingDevice(raw_run())
    (a, b) = measure(device, [Job(model="a"), Job(model="b")], queries=100, rounds=3)
    assert device.asked == [34] * 6
    assert [run.latency_ms[0] for run in a] == [1, 4, 5]
    assert [run.latency_ms[0] for run in b] == [2, 3, 6]


def test_progress_sees_every_run(raw_run):
    """What shows progress gets all turns at once, so that it knows how many there are."""
    seen = []

    def progress(turns):
        seen.append(len(turns))
        return turns

    measure(CountingDevice(raw_run()), jobs("a"), queries=4, rounds=3, progress=progress)
    assert seen == [6]


@pytest.mark.parametrize(
    ("runs", "noisy"),
    [
        ([{}], False),
        ([{"core_share": 0.89}], True),
        ([{}, {"core_share": 0.5}], True),
        ([{"latency_ms": [1.0] * 400 + [1.6] * 100}], True),
        ([{"latency_ms": [1.0] * 400 + [1.4] * 100}], False),
        ([{"latency_ms": [1.0] * 250}, {"latency_ms": [1.2] * 250}], False),
        ([{"latency_ms": [1.0] * 250}, {"latency_ms": [1.3] * 250}], True),
        ([{"cpu_share": 0.5}], False),  # a second thread that waits for the first is no noise
    ],
    ids=["quiet", "lost core", "lost once", "wide", "less wide", "near rounds", "far rounds", "idle thread"],
)
def test_noise_is_a_lost_core_or_a_computation_that_does_not_repeat(raw_run, runs, noisy):
    """Within a run and between the processes."""
    assert is_noisy([raw_run(**run) for run in runs]) is noisy
