"""A device's samples and questions against the real gateway, from consent to erasure."""

import json
import time

import cv2
import gateway_kit as kit
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from fleet.device.monitor.client import GatewayClient
from fleet.device.preprocess import Preprocess
from fleet.device.privacy.body import Context
from fleet.device.privacy.consent import Consent
from fleet.device.privacy.fallback import CloudFallback
from fleet.device.privacy.samples import Samples
from tasks.mnn.converter import convert

LABELS = ("red", "green", "blue")


def picture(channel, seed):
    """Noise with one strong colour, RGB."""
    image = np.random.default_rng(seed).integers(0, 60, (24, 24, 3), np.uint8)
    image[..., channel] += 150
    return image


def context():
    window = kit.window(1)
    return Context(
        taken_ms=kit.now_ms(),
        versions=window.versions,
        environment=window.environment,
        predicted=0,
        confidence=0.1,
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A gateway with a model whose logits are the mean red, green and blue."""
    folder = tmp_path_factory.mktemp("cloud")
    graph = helper.make_graph(
        [helper.make_node("GlobalAveragePool", ["x"], ["p"]), helper.make_node("Flatten", ["p"], ["y"])],
        "colours",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])],
    )
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), str(folder / "model.onnx"))
    convert(folder / "model.onnx", folder / "model.mnn")
    preprocess = Preprocess(size_px=8, mean=(0.0, 0.0, 0.0), std=(0.1, 0.1, 0.1))
    card = {"variant": "colours-fp32", "labels": LABELS, "preprocess": preprocess.to_dict()}
    (folder / "card.json").write_text(json.dumps(card))
    with kit.gateway(folder / "state", classifier=folder / "model.mnn") as started:
        yield started


def files(running, device, suffix):
    folder = running.folder / "samples" / device.key.device
    return sorted(folder.rglob(f"*{suffix}")) if folder.exists() else []


def test_from_consent_to_erasure(running, tmp_path):
    """Samples arrive pixel for pixel; after revocation nothing is left here or there."""
    device = running.client()
    consent = Consent(tmp_path / "privacy")
    client = GatewayClient(f"http://127.0.0.1:{running.port}")
    samples = Samples(consent, client, device.key, confidence_minimum=0.5)
    consent.grant("2026-1", kit.now_ms())
    for seed in range(3):
        assert samples.offer(picture(1, seed), context())
    samples.work("wifi")
    kept = files(running, device, ".png")
    assert (samples.counts["sent"], len(kept)) == (3, 3)
    pixels = {cv2.imread(str(path))[..., ::-1].tobytes() for path in kept}
    assert pixels == {picture(1, seed).tobytes() for seed in range(3)}
    assert json.loads(files(running, device, ".json")[0].read_text())["reason"] == "low confidence"
    samples.offer(picture(1, 9), context())
    samples.revoke()
    samples.work("mobile")
    assert samples.counts["erased"] == 1
    assert files(running, device, "") == []
    assert not consent.erasure_is_due()


def test_the_clouds_answer(running, tmp_path):
    """Each colour is recognised by the gateway's model; it keeps none of the pictures."""
    device = running.client()
    consent = Consent(tmp_path / "privacy")
    consent.grant("2026-1", kit.now_ms())
    cloud = CloudFallback(
        f"http://127.0.0.1:{running.port}",
        device.key,
        consent,
        labels=LABELS,
        confidence_minimum=0.5,
        deadline_s=60.0,
    )
    cloud.enabled = True
    found = [cloud.ask(picture(channel, 5), context()).wait() for channel in range(3)]
    cloud.close()
    assert [(answer.index, answer.label, answer.model) for answer in found] == [
        (channel, LABELS[channel], "colours-fp32") for channel in range(3)
    ]
    assert files(running, device, "") == []


def test_a_gateway_that_is_killed_is_asked_again(tmp_path):
    """Neither a sample nor an erasure is lost; once it is back, both arrive."""
    state = tmp_path / "state"
    clock_s = [0.0]
    consent = Consent(tmp_path / "privacy")
    consent.grant("2026-1", kit.now_ms())
    with kit.gateway(state) as first:
        device = first.client()
        first.kill()
        away = GatewayClient(f"http://127.0.0.1:{first.port}")
        samples = Samples(consent, away, device.key, confidence_minimum=0.5, clock=lambda: clock_s[0])
        samples.offer(picture(0, 1), context())
        samples.work("wifi")
        assert samples.counts["sent"] == 0
    with kit.gateway(state) as second:
        back = GatewayClient(f"http://127.0.0.1:{second.port}")
        samples = Samples(consent, back, device.key, confidence_minimum=0.5, wall=time.time)
        samples.work("wifi")
        assert samples.counts["sent"] == 1
        assert len(files(second, device, ".png")) == 1
        consent.revoke(kit.now_ms())
        samples.work("wifi")
        assert files(second, device, "") == []
