"""What a device does not run: a part of a release changed alone, damaged files, another app around it."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from release_rig import (
    IMAGES,
    PHONE,
    Rig,
    policy,
    prove,
    update,
)

from fleet.device.engine import ENGINE_VERSION
from fleet.device.runtime import UpdateRefusedError
from fleet.device.runtime.trust import Sealed


@dataclass
class Listener:
    """A monitor that keeps what it hears."""

    version: str
    heard: list = None

    def __post_init__(self):
        self.heard = []

    def answered(self, image_HWC, answer, latency_ms):
        self.heard.append((image_HWC.shape, answer.release, latency_ms > 0))

    def failed(self, error, latency_ms, how):
        self.heard.append(type(error).__name__)


def _two_releases(rig: Rig):
    """A device with release 2, and 1 to fall back on."""
    rig.publish(1)
    made = None
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        made = rig.publish(2, model=1)
        update(runtime, rig)
        prove(runtime)
    return made


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def _flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _remove(path):
    path.unlink()


def _link(path):
    other = path.with_name("elsewhere")
    path.rename(other)
    path.symlink_to(other)


def _folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [_truncate, _flip, _remove, _link, _folder])
@pytest.mark.parametrize("which", ["model", "golden"])
def test_a_damaged_file(rig: Rig, damage, which):
    """It is found at load; the release before runs, and an update brings the file anew."""
    made = _two_releases(rig)
    file = getattr(made.tiers["high"], which)
    damage(rig.stored(file))
    with rig.runtime() as runtime:
        assert runtime.predict(IMAGES[0]).release == 1
        assert any("(hash)" in said or "(length)" in said for said in runtime.status().refusals)
        assert runtime.status().bad == {}
        rig.server.requests.clear()
        done = update(runtime, rig)
        assert (done.action, done.release) == ("repaired", 2)
        assert [file.sha256 in path for path, _ in rig.server.requests if "/files/" in path] == [True]
        assert runtime.predict(IMAGES[0]).release == 2


def _edit(rig: Rig, counter: int, change) -> None:
    """Edit the release that lies in a slot, as somebody with access to the disk would."""
    path = rig.home / "slots" / f"{counter}.json"
    sealed = Sealed.read(path)
    record = json.loads(sealed.content)
    change(record)
    path.write_bytes(replace(sealed, content=json.dumps(record)).to_bytes())


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record["tiers"]["high"]["config"].update(threads=4),
        lambda record: record["tiers"]["high"]["model"].update(record["tiers"]["high"]["golden"]),
        lambda record: record.update(engine_version="99.0.0"),
        lambda record: record.update(monitor_version="m2"),
        lambda record: record.update(labels=list(reversed(record["labels"]))),
        lambda record: record.update(confidence_minimum=0.0),
        lambda record: record.update(counter=9),
        lambda record: record.clear(),
    ],
    ids=["config", "model", "engine", "monitor", "labels", "threshold", "counter", "empty"],
)
def test_a_part_of_a_release_edited_alone(rig: Rig, change):
    """Nothing in a signed release changes alone: the edited one is refused, the one before runs."""
    _two_releases(rig)
    _edit(rig, 2, change)
    with rig.runtime() as runtime:
        assert runtime.predict(IMAGES[0]).release == 1
        assert any("(signature)" in said for said in runtime.status().refusals)
        assert update(runtime, rig).action == "repaired"
        assert runtime.predict(IMAGES[0]).release == 2


def test_a_model_put_in_the_place_of_another(rig: Rig):
    """A lone model update: another file under the name of the release's."""
    made = _two_releases(rig)
    rig.stored(made.tiers["high"].model).write_bytes(rig.models[2].read_bytes())
    with rig.runtime() as runtime:
        assert runtime.predict(IMAGES[0]).release == 1


def test_another_release_in_a_slot(rig: Rig):
    """A slot that holds another signed release than its name says."""
    _two_releases(rig)
    slots = rig.home / "slots"
    (slots / "2.json").write_bytes((slots / "1.json").read_bytes())
    with rig.runtime() as runtime:
        assert runtime.predict(IMAGES[0]).release == 1


def test_the_policys_key_seals_no_release(rig: Rig):
    """On this disk neither: signed by the delegated role, a release proves nothing."""
    _two_releases(rig)
    rig.repository.publish_policy(policy(1))
    with rig.runtime() as runtime:
        update(runtime, rig)
    path = rig.home / "slots" / "2.json"
    release, sealed = Sealed.read(path), Sealed.read(rig.home / "policy.json")
    path.write_bytes(replace(release, signers=sealed.signers).to_bytes())
    with rig.runtime() as runtime:
        assert runtime.predict(IMAGES[0]).release == 1
        assert any("(signature)" in said for said in runtime.status().refusals)


def test_another_root_of_trust(rig: Rig, tmp_path):
    """An app with another root runs nothing of what the first one's keys signed."""
    from tasks.release_repository import ReleaseRepository

    _two_releases(rig)
    other = ReleaseRepository.create(tmp_path / "other", tmp_path / "other-keys")
    with rig.runtime(root=other.root) as runtime, pytest.raises(UpdateRefusedError) as refused:
        runtime.predict(IMAGES[0])
    assert refused.value.reason == "signature"
    with pytest.raises(UpdateRefusedError) as refused:
        rig.runtime(root=b"{}")
    assert refused.value.reason == "signature"


@pytest.mark.parametrize(
    ("engine", "minimum", "proven"),
    [("99.0.0", "3.0.0", ENGINE_VERSION), ("2.9.9", "3.0.0", ENGINE_VERSION), ("3.9.0", "3.10.0", "3.11.0")],
    ids=["newer", "older", "by number, not by letter"],
)
def test_another_engine(rig: Rig, engine, minimum, proven):
    """A device keeps its model when its engine is not one that the release was proven on."""
    rig.publish(1, engine_version="99.9.9", engine_minimum="1.0.0")
    device = replace(PHONE, engine_version=engine)
    with rig.runtime(device) as runtime:
        update(runtime, rig)
        prove(runtime)
        rig.publish(2, model=1, engine_minimum=minimum, engine_version=proven)
        kept = update(runtime, rig)
        assert (kept.action, kept.reason, kept.release) == ("kept", "engine", 1)
        assert runtime.predict(IMAGES[0]).release == 1


def test_an_engine_that_changed_under_a_release(rig: Rig):
    """A lone engine update: the release is refused until the engine is back, and is not held to be bad."""
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
    with rig.runtime(replace(PHONE, engine_version="99.0.0")) as runtime:
        with pytest.raises(UpdateRefusedError, match=r"engine 99\.0\.0 is installed") as refused:
            runtime.predict(IMAGES[0])
        assert refused.value.reason == "engine"
    with rig.runtime() as runtime:
        assert runtime.predict(IMAGES[0]).release == 1


def test_another_monitor(rig: Rig):
    """A release is bound to a monitor: another one, or none, keeps what it has."""
    rig.publish(1, monitor_version="m1")
    listener = Listener("m1")
    with rig.runtime(monitor_hook=listener) as runtime:
        update(runtime, rig)
        prove(runtime)
    assert listener.heard == [((16, 16, 3), 1, True)] * 3
    for monitor in (Listener("m2"), None):
        with rig.runtime(monitor_hook=monitor) as runtime, pytest.raises(UpdateRefusedError) as refused:
            runtime.predict(IMAGES[0])
        assert refused.value.reason == "monitor"


def test_the_monitor_hears_of_a_failure_that_another_release_answered(rig: Rig, trap):
    """The failed inference and the answer are both told."""
    rig.publish(1)
    listener = Listener("none")
    rig.models, rig.goldens = [*rig.models, trap[0]], [*rig.goldens, trap[1]]
    with rig.runtime(monitor_hook=listener) as runtime:
        update(runtime, rig)
        prove(runtime)
        rig.publish(2, model=3)
        update(runtime, rig)
        listener.heard.clear()
        runtime.predict(np.zeros_like(IMAGES[0]))
    assert listener.heard == ["AbnormalOutputError", ((16, 16, 3), 1, True)]
