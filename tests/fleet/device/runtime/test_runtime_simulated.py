"""A simulated device on the real runtime: its windows say what the model says of the images."""

import json
from collections import Counter

import numpy as np
import pytest
from release_rig import IMAGES, prove, update

from fleet.device.credentials import DeviceKey
from fleet.device.errors import UserError
from fleet.simulator.device import Character, SimulatedDevice
from fleet.simulator.drift import low_light
from fleet.simulator.made_up import made_up_classes, made_up_temperatures
from fleet.simulator.on_runtime import RuntimeSource
from fleet.simulator.plan import VERSIONS

CLASS = made_up_classes()[1]


def windows_of(device, until_h):
    device.measure(until_h * 3600)
    return [json.loads(content) for content in device.spooled().values()]


def device_on(source):
    character = Character(number=0, device_class=CLASS, versions=VERSIONS)
    return SimulatedDevice(
        character,
        DeviceKey(bytes(32)),
        made_up_temperatures(),
        seed=0,
        start_ms=1_760_000_000_000,
        source=source,
    )


def test_windows_of_a_real_release(rig):
    """Classes, confidences and pixels are those of model and images; versions follow an update."""
    rig.publish(1, model=0)
    source = RuntimeSource(IMAGES, CLASS)
    with rig.runtime(monitor_hook=source) as runtime:
        source.runtime = runtime
        update(runtime, rig)
        prove(runtime)
        device = device_on(source)
        before = windows_of(device, 6)
        rig.publish(2, model=1)
        update(runtime, rig)
        after = windows_of(device, 12)[len(before) :]
    assert len(before) > 3
    assert len(after) > 3
    for windows, model, release in ((before, 0, 1), (after, 1, 2)):
        chosen = Counter(str(rig.expected(model, image).argmax()) for image in IMAGES)
        for window in windows:
            assert window["quality"]["classes"] == {name: 25 * count for name, count in chosen.items()}
            assert window["versions"]["release"] == release
            assert window["versions"]["model"] == f"m{release}"
            assert window["environment"]["variant"] == f"v{model}"
            assert window["performance"]["failures"] == 0
            assert window["performance"]["latency_ms"]["min"] > 0
            assert window["quality"]["input_mean"]["sum"] == pytest.approx(100 * IMAGES.mean())


def test_drifted_images_show(rig):
    """Images in low light are told as dark."""
    rig.publish(1)
    dark = low_light(IMAGES, 1.0)
    source = RuntimeSource(dark, CLASS)
    with rig.runtime(monitor_hook=source) as runtime:
        source.runtime = runtime
        update(runtime, rig)
        windows = windows_of(device_on(source), 3)
    assert windows
    for window in windows:
        assert window["quality"]["input_mean"]["sum"] == pytest.approx(100 * dark.mean())


def test_a_release_that_fails_on_trial(rig, trap):
    """The failure is counted, the release before answers the same image, and a window stays a hundred."""
    model, golden = trap
    rig.publish(1, model=0)
    images = np.concatenate([IMAGES, np.zeros_like(IMAGES[:1])])
    source = RuntimeSource(images, CLASS)
    with rig.runtime(monitor_hook=source, trial_inferences=20) as runtime:
        source.runtime = runtime
        update(runtime, rig)
        prove(runtime, 20)
        rig.models = [*rig.models, model]  # the list is the whole session's
        rig.goldens = [*rig.goldens, golden]
        rig.publish(2, model=len(rig.models) - 1)
        update(runtime, rig)
        windows = windows_of(device_on(source), 6)
    assert windows
    assert all(window["performance"]["inferences"] == 100 for window in windows)
    assert sum(window["quality"]["abnormal_outputs"] for window in windows) == 1
    assert {window["versions"]["release"] for window in windows} == {1}


def test_no_images():
    """One error."""
    with pytest.raises(UserError, match="images"):
        RuntimeSource(IMAGES[:0], CLASS)
