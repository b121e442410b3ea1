"""Requests while releases change, and what is left of models that went."""

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from release_rig import IMAGES, Rig, prove, update

from fleet.device.errors import UserError
from fleet.device.host import resident_mb
from fleet.device.runtime import Cascade
from fleet.device.runtime.loaded import MOST_SESSIONS


def test_no_request_fails_or_mixes_releases_while_they_change(rig: Rig):
    """Six threads ask all the time; each answer is wholly of one release, and the newest comes to all."""
    expected = {counter: rig.expected((counter - 1) % 3) for counter in range(1, 8)}
    rig.publish(1)
    failures, seen, stop = [], [], threading.Event()

    def ask(runtime):
        try:
            while not stop.is_set():
                answer = runtime.predict(IMAGES[0])
                np.testing.assert_allclose(answer.logits, expected[answer.release], rtol=1e-5)
                assert answer.variant == f"v{(answer.release - 1) % 3}"
                seen.append(answer.release)
        except Exception as error:  # noqa: BLE001 - whatever a thread dies of is the finding
            failures.append(error)

    with rig.runtime() as runtime:
        update(runtime, rig)
        threads = [threading.Thread(target=ask, args=(runtime,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for counter in range(2, 8):
            rig.publish(counter, model=(counter - 1) % 3)
            assert update(runtime, rig).release == counter
            deadline = time.monotonic() + 30
            while runtime.status().trying and time.monotonic() < deadline:
                time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert set(seen) == set(range(1, 8))
        assert runtime.status().sessions <= MOST_SESSIONS


def test_a_release_on_trial_fails_under_load(rig: Rig, trap):
    """Every request of every thread is answered, by release 1 where release 2 could not."""
    rig.publish(1)
    rig.models, rig.goldens = [*rig.models, trap[0]], [*rig.goldens, trap[1]]
    dark, answers, failures = np.zeros_like(IMAGES[0]), [], []
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        rig.publish(2, model=3)
        update(runtime, rig)

        def ask():
            try:
                answers.extend(runtime.predict(dark).release for _ in range(20))
            except Exception as error:  # noqa: BLE001 - as above
                failures.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert answers == [1] * 80
        assert list(runtime.status().bad) == ["2/high"]


def test_a_request_on_its_way_ends_on_its_own_release(rig: Rig):
    """A model that is replaced stays open until its last request has ended, and is closed then."""
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        with runtime._request() as old:
            rig.publish(2, model=1)
            update(runtime, rig)
            assert runtime.predict(IMAGES[0]).release == 2
            np.testing.assert_allclose(old.predict(IMAGES[0]).logits, rig.expected(0), rtol=1e-5)
            assert old.sessions == 1
        assert old.sessions == 0


def test_a_file_damaged_under_a_model_that_runs(rig: Rig):
    """A second request at the same time waits for the session that is open: no more open on such a file."""
    made = rig.publish(1)
    answers = []
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        rig.stored(made.tiers["high"].model).write_bytes(b"damaged")
        with runtime._request() as model:
            asking = threading.Thread(target=lambda: answers.append(runtime.predict(IMAGES[0])))
            with model._session():
                asking.start()
                asking.join(0.3)
                assert answers == []
            asking.join()
        assert [answer.release for answer in answers] == [1]
        assert runtime.status().sessions == 1
        assert update(runtime, rig).action == "repaired"


def test_500_loads_leave_nothing_behind(rig: Rig):
    """Load, answer, unload: no file stays open, and memory does not grow with the cycles."""
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        opened, memory_mb = [], []
        for cycle in range(500):
            runtime.predict(IMAGES[0])
            runtime.unload()
            assert runtime.status().sessions == 0
            if cycle % 50 == 49:
                gc.collect()
                opened.append(len(list(Path("/proc/self/fd").iterdir())))
                memory_mb.append(resident_mb())
    assert len(set(opened)) == 1
    growth_mb = np.polyfit(np.arange(50, 501, 50)[2:], memory_mb[2:], 1)[0] * 500
    assert growth_mb < 5, memory_mb


def test_several_models_at_once(rig: Rig):
    """An app with two models has two runtimes, which answer side by side."""
    rig.publish(1)
    with rig.runtime() as first:
        update(first, rig)
        rig.publish(2, model=1)
        rig.home = rig.folder / "second"
        with rig.runtime() as second:
            update(second, rig)
            for _ in range(3):
                np.testing.assert_allclose(first.predict(IMAGES[0]).logits, rig.expected(0), rtol=1e-5)
                np.testing.assert_allclose(second.predict(IMAGES[0]).logits, rig.expected(1), rtol=1e-5)


def test_a_light_model_screens(rig: Rig):
    """The heavy model is asked below the confidence, and only then."""
    rig.publish(1)
    with rig.runtime() as light:
        update(light, rig)
        rig.publish(2, model=1)
        rig.home = rig.folder / "heavy"
        with rig.runtime() as heavy:
            update(heavy, rig)
            confidence = light.predict(IMAGES[0]).confidence
            sure = Cascade(light=light, heavy=heavy, decide_below=confidence).predict(IMAGES[0])
            assert (sure.screened, sure.answer.release) == (True, 1)
            unsure = Cascade(light=light, heavy=heavy, decide_below=min(1.0, confidence * 1.001))
            decided = unsure.predict(IMAGES[0])
            assert (decided.screened, decided.answer.release, decided.light.release) == (False, 2, 1)
            with pytest.raises(UserError, match="decide_below"):
                Cascade(light=light, heavy=heavy, decide_below=1.5)
