"""A signed release from the repository to answers, and from one release to the next."""

import numpy as np
import pytest
from release_rig import IMAGES, LABELS, PHONE, Rig, prove, update

from fleet.device.errors import UserError
from fleet.device.runtime import UpdateRefusedError


def test_a_release_arrives_and_answers(rig: Rig):
    """The first update brings the model, and its answers are the engine's."""
    made = rig.publish(1)
    with rig.runtime() as runtime:
        done = update(runtime, rig)
        assert (done.action, done.release, done.demo, done.tier) == ("installed", 1, True, "high")
        answer = runtime.predict(IMAGES[0])
    np.testing.assert_allclose(answer.logits, rig.expected(0), rtol=1e-6)
    best = int(rig.expected(0).argmax())
    assert (answer.label, answer.index, answer.release) == (LABELS[best], best, 1)
    assert (answer.variant, answer.backend) == ("v0", "CPU")
    odds = np.exp(rig.expected(0) - rig.expected(0).max())
    assert answer.confidence == pytest.approx(odds.max() / odds.sum(), rel=1e-5)
    assert rig.stored(made.tiers["high"].model).read_bytes() == rig.models[0].read_bytes()


def test_only_what_changed_is_downloaded(rig: Rig):
    """A release that shares its golden inputs' file with the one before costs one file."""
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        rig.server.requests.clear()
        assert update(runtime, rig).action == "nothing"
        assert not [path for path, _ in rig.server.requests if "/files/" in path]
        rig.publish(2, changes=("the same files",))
        rig.server.requests.clear()
        assert update(runtime, rig).action == "installed"
        assert not [path for path, _ in rig.server.requests if "/files/" in path]
        rig.publish(3, model=1)
        rig.server.requests.clear()
        update(runtime, rig)
        assert len([path for path, _ in rig.server.requests if "/files/" in path]) == 2
        assert runtime.predict(IMAGES[0]).release == 3


def test_what_ran_runs_after_a_restart_without_a_network(rig: Rig):
    """The device needs no repository to go on."""
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        assert not runtime.status().trying
    with rig.runtime() as runtime:
        assert runtime.status().running is None  # lazy
        assert runtime.predict(IMAGES[0]).release == 1


def test_a_low_tier_loads_at_once(rig: Rig):
    """Low devices preload, others load with the first request."""
    rig.publish(1)
    low = type(PHONE)(id="x", model="m", cores=2, big_cores=2, memory_mb=1000)
    with rig.runtime(low) as runtime:
        assert update(runtime, rig).tier == "low"
    with rig.runtime(low) as runtime:
        running = runtime.status().running
        assert running is not None
        assert running.entry.counter == 1


def test_old_files_go_when_the_next_release_is_good(rig: Rig):
    """The active release and the one before it stay on disk, older ones do not."""
    releases = []
    with rig.runtime() as runtime:
        for counter, model in ((1, 0), (2, 1), (3, 2)):
            releases.append(rig.publish(counter, model))
            update(runtime, rig)
            prove(runtime)
    here = {path.name for path in (rig.home / "files").iterdir()}
    wanted = {f.sha256 for r in releases[1:] for f in r.files_of("high")}
    assert here == wanted
    assert sorted(path.name for path in (rig.home / "slots").iterdir()) == ["2.json", "3.json"]


def test_a_device_without_a_release_says_so(rig: Rig):
    """Before the first update a request is refused, with a reason for programs."""
    with rig.runtime() as runtime:
        with pytest.raises(UpdateRefusedError) as refused:
            runtime.predict(IMAGES[0])
        assert refused.value.reason == "nothing"
        assert update(runtime, rig).action == "nothing"


def test_a_closed_runtime_answers_nothing(rig: Rig):
    """After `close` a request and an update are errors of the app."""
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
    for attempt in (lambda: runtime.predict(IMAGES[0]), lambda: update(runtime, rig), runtime.load):
        with pytest.raises(UserError, match="closed"):
            attempt()
    runtime.close()


def test_two_runtimes_on_one_folder(rig: Rig):
    """The second is told to keep out, and may come when the first has closed."""
    with rig.runtime(), pytest.raises(UserError, match="in use"):
        rig.runtime()
    rig.runtime().close()


def test_a_wrong_image_is_no_failure_of_the_release(rig: Rig):
    """The app's mistake does not cost a release its trial."""
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        for image in (IMAGES[0].astype(np.float32), IMAGES[0][..., 0], np.zeros((0, 4, 3), np.uint8)):
            with pytest.raises(UserError, match="image with shape"):
                runtime.predict(image)
        prove(runtime)
        assert runtime.status().bad == {}
