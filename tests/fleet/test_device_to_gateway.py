"""A signed release, a device that runs it, and the gateway that hears of it: the real parts, end to end."""

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
sys.path += [str(HERE / "gateway"), str(HERE / "device" / "runtime")]  # kits of these rooms

import gateway_kit as kit  # noqa: E402
import release_rig as rig  # noqa: E402

from fleet.device.agent import DeviceAgent, statistics  # noqa: E402
from fleet.device.credentials import DeviceKey  # noqa: E402
from fleet.device.monitor import MONITOR_VERSION  # noqa: E402
from fleet.device.release import AnomalyLimits, UploadRule  # noqa: E402
from fleet.device.sensors import Reading  # noqa: E402
from fleet.gateway import serve  # noqa: E402
from tasks.release_repository import ReleaseRepository  # noqa: E402

AT_ONCE = (UploadRule(network="wifi", charging=True, every_s=1, share=1.0),)
PATIENCE_S = 60


class OnTheDesk:
    """WiFi, charging, cool."""

    def read(self) -> Reading:
        return Reading(
            temperature_c=30.0, battery_percent=90.0, charging=True, network="wifi", memory_mb=80.0
        )


@pytest.fixture
def repository(tmp_path):
    """With a release and a policy that sends everything at once."""
    made = ReleaseRepository.create(tmp_path / "repository", tmp_path / "keys", demo=True)
    model = rig.make_model(tmp_path, 0)
    golden = rig.write_golden(model, model.with_suffix(".npz"))
    plan = rig.plan("mbv3s-p0-fp32-r16", model, golden)
    made.publish_release(rig.release(1, plan, monitor_version=MONITOR_VERSION), [model, golden])
    made.publish_policy(rig.policy(1, upload=AT_ONCE, anomalies=AnomalyLimits(confidence=0.0)))
    return made, plan


def stored(folder, device, count):
    """What the gateway stored of a device, when so many windows are there."""
    deadline = time.monotonic() + PATIENCE_S
    while len(found := kit.stored(folder, device)) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def test_a_release_is_run_watched_and_told_of(tmp_path, repository):
    """250 answers of release 1 and 100 of release 2 are four windows, each of one release, stored once."""
    made, plan = repository
    images = np.random.default_rng(3).integers(0, 256, (350, 40, 30, 3), np.uint8)
    with kit.gateway(tmp_path / "gateway", repository=tmp_path / "repository") as gateway:
        url = f"http://127.0.0.1:{gateway.port}"
        key = DeviceKey.load(tmp_path / "device.key")
        device = kit.Client(gateway.port, key)
        assert device.enrol(*serve.token(gateway.folder)).status == 201
        info = replace(rig.PHONE, id=key.device)
        with DeviceAgent(
            tmp_path / "agent", info, key, url, root=made.root, sensors=OnTheDesk(), app="7"
        ) as agent:
            assert agent.update().action == "installed"
            assert [agent.predict(image).release for image in images[:250]] == [1] * 250
            made.publish_release(replace(rig.release(2, plan), monitor_version=MONITOR_VERSION), [])
            assert agent.update().release == 2
            assert [agent.predict(image).release for image in images[250:]] == [2] * 100
            assert agent.flush()
            assert len(stored(gateway.folder, key.device, 4)) == 4
    windows = kit.windows(gateway.folder, key.device)
    told = [(w.versions.release, w.performance.inferences, w.environment.variant) for w in windows]
    variant = "mbv3s-p0-fp32-r16"
    assert told == [(1, 100, variant), (1, 100, variant), (1, 50, variant), (2, 100, variant)]
    assert {w.versions.app for w in windows} == {"7"}
    assert {w.environment.network for w in windows} == {"wifi"}
    assert sum(sum(w.quality.classes.values()) for w in windows) == 350
    means = sum(statistics(image)[0] for image in images[:100])
    assert windows[0].quality.input_mean.sum == pytest.approx(means, rel=1e-5)


def test_a_failure_is_booked_on_the_release_that_failed(tmp_path, repository):
    """Release 2 fails its first inference; release 1 answers; the failure's window says release 2."""
    made, _ = repository
    trap = rig.make_model(tmp_path, 9, trap=True)
    golden = rig.write_golden(trap, trap.with_suffix(".npz"))
    dark = np.zeros((16, 16, 3), np.uint8)
    images = np.random.default_rng(5).integers(100, 256, (30, 16, 16, 3), np.uint8)  # beyond the trial
    with kit.gateway(tmp_path / "gateway", repository=tmp_path / "repository") as gateway:
        key = DeviceKey.load(tmp_path / "device.key")
        assert kit.Client(gateway.port, key).enrol(*serve.token(gateway.folder)).status == 201
        info = replace(rig.PHONE, id=key.device)
        url = f"http://127.0.0.1:{gateway.port}"
        with DeviceAgent(
            tmp_path / "agent", info, key, url, root=made.root, sensors=OnTheDesk(), app="7"
        ) as agent:
            agent.update()
            for image in images:
                agent.predict(image)
            broken = rig.plan("mbv3s-p30-fp32-r16", trap, golden)
            made.publish_release(rig.release(2, broken, monitor_version=MONITOR_VERSION), [trap, golden])
            assert agent.update().action == "installed"
            assert agent.predict(dark).release == 1
            assert agent.flush()
            stored(gateway.folder, key.device, 3)
    windows = kit.windows(gateway.folder, key.device)
    told = [(w.versions.release, w.performance.inferences, w.quality.abnormal_outputs) for w in windows]
    assert told == [(1, 30, 0), (2, 1, 1), (1, 1, 0)]


def test_a_monitor_of_another_version_is_refused(tmp_path, repository):
    """The monitor is bound to the release as the model is (R1)."""
    made, plan = repository
    made.publish_release(rig.release(2, plan, monitor_version="0"), [])
    with rig.serving(tmp_path) as server:
        key = DeviceKey.load(tmp_path / "device.key")
        info = replace(rig.PHONE, id=key.device)
        agent = DeviceAgent(
            tmp_path / "agent", info, key, server.url, root=made.root, sensors=OnTheDesk(), app="7"
        )
        with agent:
            update = agent.update()
            assert (update.action, update.reason) == ("kept", "monitor")


@pytest.mark.parametrize("shape", [(1, 1), (16, 16), (480, 640), (3000, 20)])
def test_input_statistics_are_the_images(shape):
    """Of small images exactly, of large ones from every so-manieth pixel."""
    image = np.random.default_rng(1).integers(0, 256, (*shape, 3), np.uint8)
    mean, std = statistics(image)
    few = min(shape) < 128
    assert mean == pytest.approx(image.mean(), abs=1e-9 if few else 3)
    assert std == pytest.approx(image.std(), abs=1e-6 if few else 3)
