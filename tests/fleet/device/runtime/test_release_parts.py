"""Signed releases whose parts are not what they claim: found before download, or before the first answer."""

from dataclasses import replace

import numpy as np
import pytest
from release_rig import IMAGES, LABELS, PREPROCESS, Rig, logits_of, update, write_golden

from fleet.device.runtime import UpdateRefusedError
from fleet.device.runtime.golden import Golden


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
