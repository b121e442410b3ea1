"""What a device does not run: a part of a release changed alone, damaged files, another app around it."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
from release_rig import (
    IMAGES,
    LABELS,
    PHONE,
    PREPROCESS,
    Rig,
    logits_of,
    policy,
    prove,
    update,
    write_golden,
)

from fleet.device.engine import ENGINE_VERSION
from fleet.device.release import Denied, Rollout, bucket_of
from fleet.device.runtime import UpdateRefusedError
from fleet.device.runtime.golden import Golden
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

    def failed(self, error, latency_ms):
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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"preprocess_sha256": "0" * 64}, "preprocess"),
        ({"preprocess": {**PREPROCESS.to_dict(), "color_order": "BGR"}}, "preprocess"),
        ({"preprocess": {**PREPROCESS.to_dict(), "size_px": 16.0}}, "preprocess"),
        ({"preprocess": {**PREPROCESS.to_dict(), "mean": [True, 0, 0]}}, "preprocess"),
        ({"preprocess": {"size_px": 16}}, "preprocess"),
        ({"config": {"backend": "CPU", "threads": True, "precision": "normal", "memory": "low"}}, "config"),
        ({"config": {"backend": "NPU", "threads": 1, "precision": "normal", "memory": "low"}}, "config"),
        ({"config": {"backend": "CPU", "threads": 65, "precision": "normal", "memory": "low"}}, "config"),
        ({"config": {"backend": "CPU"}}, "config"),
        (
            {"config": {"backend": "CPU", "threads": 1, "precision": "normal", "memory": "low", "x": 1}},
            "config",
        ),
    ],
)
def test_records_that_are_none(rig: Rig, changes, reason):
    """A release whose preprocessing or config is not what it claims is refused before it is downloaded."""
    rig.publish(1, tiers={"high": rig.plan(0, **changes)})
    with rig.runtime() as runtime, pytest.raises(UpdateRefusedError) as refused:
        update(runtime, rig)
    assert refused.value.reason == reason
    assert not list((rig.home / "files").iterdir())


def _refused_when_tried(rig: Rig, **changes) -> str:
    rig.publish(1, tiers={"high": rig.plan(0, **changes)})
    with rig.runtime() as runtime, pytest.raises(UpdateRefusedError) as refused:
        update(runtime, rig)
    return refused.value.reason


def test_labels_in_another_order(rig: Rig):
    """The publisher sorted the labels and the model did not: every answer would be wrong."""
    rig.publish(1, labels=tuple(reversed(LABELS)))
    with rig.runtime() as runtime, pytest.raises(UpdateRefusedError) as refused:
        update(runtime, rig)
    assert refused.value.reason == "labels"


def test_a_preprocessing_for_another_model(rig: Rig):
    """The record is sound, and the model takes images of another size."""
    other = replace(PREPROCESS, size_px=32)
    reason = _refused_when_tried(rig, preprocess=other.to_dict(), preprocess_sha256=other.digest())
    assert reason == "preprocess"


def test_a_model_that_is_none(rig: Rig, tmp_path):
    """Signed, with the right hash, and no model."""
    rig.models = [tmp_path / "none.mnn"]
    rig.models[0].write_bytes(b"no model at all" * 100)
    assert _refused_when_tried(rig) == "model"


@pytest.mark.parametrize("kind", ["pickle", "text", "nan", "shape", "missing"])
def test_golden_inputs_that_are_none(rig: Rig, tmp_path, kind):
    """No pickle is opened, and nothing else than finite arrays of the right shapes is taken."""
    path, logits = tmp_path / "golden.npz", logits_of(rig.models[0])
    arrays = {"images": IMAGES, "logits": logits, "labels": np.array(LABELS)}
    changes = {
        "pickle": {"labels": np.array([*LABELS, None], object)},
        "text": {"labels": np.arange(5)},
        "nan": {"logits": logits * np.nan},
        "shape": {"images": IMAGES[..., 0]},
    }
    arrays |= changes.get(kind, {})
    if kind == "missing":
        del arrays["logits"]
    np.savez(path, **arrays)
    rig.goldens = [path]
    assert _refused_when_tried(rig) == "golden"


def test_golden_bytes_repeat(rig: Rig, tmp_path):
    """Two builds of one release have the same golden file."""
    first = write_golden(rig.models[0], tmp_path / "a.npz").read_bytes()
    assert first == write_golden(rig.models[0], tmp_path / "b.npz").read_bytes()
    read = Golden.read(tmp_path / "a.npz")
    np.testing.assert_array_equal(read.images, IMAGES)
    assert read.labels == LABELS


def test_a_backend_that_is_not_here(rig: Rig):
    """The GPU's release runs on the CPU, and says so truthfully."""
    config = {"backend": "VULKAN", "threads": 2, "precision": "normal", "memory": "normal"}
    rig.publish(1, tiers={"high": rig.plan(0, config=config)})
    with rig.runtime() as runtime:
        update(runtime, rig)
        assert runtime.predict(IMAGES[0]).backend == "CPU"
        running = runtime.status().running
        assert running.config_name == "cpu-t2-normal-normal"
        assert "has no VULKAN here" in running.instead
        rig.repository.publish_policy(
            policy(1, deny=(Denied(device_model="Pixel*", backend="VULKAN", why="its driver is slow"),))
        )
        assert update(runtime, rig).action == "policy"
        assert runtime.status().running.instead == "its driver is slow"


def test_a_tier_that_keeps_what_it_has(rig: Rig):
    """A release may leave a tier out."""
    rig.publish(1)
    from fleet.device.release import TierPlan

    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        rig.publish(2, tiers={"high": TierPlan(action="keep"), "mid": rig.plan(1)})
        kept = update(runtime, rig)
        assert (kept.action, kept.reason, kept.release) == ("kept", "tier", 1)
        rig.repository.publish_policy(policy(1, tier_of={"Pixel 8": "mid"}))
        done = update(runtime, rig)
        assert (done.action, done.tier, done.release) == ("installed", "mid", 2)


def test_threads_by_rule_until_measured(rig: Rig):
    """An unmeasured tier gets the device's big cores; a measured one what was measured."""
    rig.publish(1, tiers={"high": rig.plan(0, measured=False, waiver="lab: no such phone")})
    with rig.runtime() as runtime:
        update(runtime, rig)
        assert runtime.status().running.config.threads == 4
        rig.publish(2)
        prove(runtime)
        update(runtime, rig)
        assert runtime.status().running.config.threads == 1


def test_a_policy_moves_a_device_to_another_tier(rig: Rig):
    """The same release, the other tier's model, without a release."""
    rig.publish(1, tiers={"high": rig.plan(0), "low": rig.plan(1)})
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        assert runtime.predict(IMAGES[0]).variant == "v0"
        rig.repository.publish_policy(policy(1, tier_of={"Pixel ?": "low", "*": "high"}))
        assert update(runtime, rig).action == "installed"
        assert runtime.predict(IMAGES[0]).variant == "v1"
        prove(runtime)
    with rig.runtime() as runtime:
        assert runtime.predict(IMAGES[0]).variant == "v1"


def test_a_policy_edited_on_disk_is_none(rig: Rig):
    """What nobody signed is not obeyed; the next update brings the true one."""
    rig.publish(1)
    rig.repository.publish_policy(policy(3, tier_of={"*": "low"}))
    with rig.runtime() as runtime:
        update(runtime, rig)
    path = rig.home / "policy.json"
    path.write_text(path.read_text().replace("low", "mid"))
    with rig.runtime() as runtime:
        assert runtime.status().policy_version == 0
        assert update(runtime, rig).policy_version == 3
        assert runtime.status().tier == "low"


def test_a_rollout_reaches_its_share(rig: Rig):
    """Only devices below the share take the release, and those of the control group never."""
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        rig.publish(2, model=1)
        mine = bucket_of("salt", PHONE.id)
        shares = [
            Rollout(counter=2, salt="salt", buckets=mine),
            Rollout(counter=2, salt="salt", buckets=10_000, control=10_000 - mine),
            Rollout(counter=2, salt="salt", buckets=10_000, stopped=True),
            Rollout(counter=1, salt="salt", buckets=10_000),
        ]
        for version, rollout in enumerate(shares, 1):
            rig.repository.publish_policy(policy(version, rollout))
            kept = update(runtime, rig)
            assert (kept.action, kept.reason, kept.release) == ("kept", "rollout", 1)
        rollout = Rollout(counter=2, salt="salt", buckets=mine + 1, control=9_999 - mine)
        rig.repository.publish_policy(policy(9, rollout))
        assert update(runtime, rig).release == 2
        rig.repository.publish_policy(policy(10, replace(rollout, buckets=0, stopped=True)))
        assert update(runtime, rig).release == 2  # a stop takes nothing back: a rollback is a new counter


def test_a_new_device_outside_the_rollout_gets_the_release_before(rig: Rig):
    """A device that has nothing is not left with nothing while a release is tried on others."""
    rig.publish(1)
    rig.repository.publish_policy(policy(1, Rollout(counter=1, salt="s", buckets=10_000)))
    rig.publish(2, model=1)
    rig.repository.publish_policy(policy(2, Rollout(counter=2, salt="s", buckets=0, stopped=True)))
    with rig.runtime() as runtime:
        assert update(runtime, rig).release == 1
        prove(runtime)
        rig.publish(3, model=2)
        rig.repository.publish_policy(policy(3, Rollout(counter=3, salt="s", buckets=0)))
        assert update(runtime, rig).reason == "rollout"
    rig.home = rig.folder / "newer device"
    with rig.runtime() as runtime:
        assert update(runtime, rig).release == 1  # 2 was never out for everybody
    rig.repository.publish_policy(policy(4, Rollout(counter=3, salt="s", buckets=10_000)))
    with rig.runtime() as runtime:
        assert update(runtime, rig).release == 3
