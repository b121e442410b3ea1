"""Preprocessing mismatches are named, on real photographs: from a dumped tensor, and from a trained model."""

import io
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from fleet.device.engine import Session
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.mnn.converter import convert
from tasks.mnn.onnx_export import export_onnx
from tasks.mnn.preprocess_alternatives import (
    CLOSER_CROP,
    DECODERS,
    Normalization,
    alternatives,
    claimed_pipeline,
)
from tasks.mnn.preprocess_behaviour import change_between
from tasks.mnn.preprocess_diagnosis import diagnose, engine_predict
from tasks.mnn.preprocess_explain import explain

CLOTHING = Path(__file__).resolve().parents[3] / ".." / "shared" / "data" / "clothing96.tar"
CONTRACT = Preprocess(size_px=40)  # 96 is no multiple of it: filters differ everywhere
CLAIMED = claimed_pipeline(CONTRACT)
ONE_STEP = {
    pipeline.differences(CLAIMED)[0]: pipeline
    for _, pipeline in alternatives(CLAIMED, CONTRACT, encoded=True)
}


@pytest.fixture(scope="session")
def photos():
    """File contents of 500 portrait and landscape photographs, short side 96 px."""
    if not CLOTHING.is_file():
        pytest.skip("needs shared/data/clothing96.tar: real photographs")
    with tarfile.open(CLOTHING) as tar:
        members = sorted((m for m in tar.getmembers() if m.name.endswith(".jpg")), key=lambda m: m.name)
        return [tar.extractfile(member).read() for member in members[:: len(members) // 500][:500]]


@pytest.fixture(scope="session")
def photo(photos):
    """One colourful photograph that is not square."""
    oblong = [data for data in photos if max(DECODERS["Pillow"](data).shape[:2]) > 120]
    return max(oblong[:50], key=lambda data: np.ptp(DECODERS["Pillow"](data).mean((0, 1))))


def test_the_claimed_pipeline_is_the_contract(photos):
    """What the diagnosis holds others against is exactly what training and the device compute."""
    for contract in (
        CONTRACT,
        Preprocess(
            size_px=24, interpolation="bilinear", color_order="BGR", layout="NHWC", std=(0.2, 0.3, 0.4)
        ),
    ):
        for data in photos[:5]:
            ours = contract.apply(DECODERS["Pillow"](data))
            theirs = claimed_pipeline(contract).apply(data)
            assert theirs.shape == ours.shape
            np.testing.assert_allclose(theirs, ours, atol=1e-6)


def test_an_equal_tensor_has_no_mismatch(photo):
    """The contract's own output is recognised, from the file and from decoded pixels."""
    pixels = DECODERS["Pillow"](photo)
    for picture in (photo, pixels):
        found = explain(CONTRACT.apply(pixels), picture, CONTRACT)
        assert found.mismatches == ()
        assert found.reproduced
        assert found.residual_levels < 0.01
        assert str(found).startswith("no mismatch")


@pytest.mark.parametrize("difference", [d for d in ONE_STEP if not d.startswith("decoder")])
def test_each_known_difference_is_named(photo, difference):
    """Colour order, normalisation, filter, crop or layout: exactly that step is named and no other."""
    found = explain(ONE_STEP[difference].apply(photo), photo, CONTRACT)
    assert found.mismatches == (difference,)
    assert found.reproduced


def test_several_differences_are_named_together(photo):
    """An app that swaps colours, feeds 0..255 and resizes without averaging is told all three."""
    raw = next(p for d, p in ONE_STEP.items() if d.startswith("normalisation 0..255 without")).normalization
    theirs = replace(CLAIMED, color_order="BGR", normalization=raw, resize="nearest").apply(photo)
    found = explain(theirs, photo, CONTRACT)
    assert found.mismatches[:2] == (
        "resize filter nearest instead of area",
        "colour order BGR instead of RGB",
    )
    assert found.mismatches[2].startswith("normalisation 0..255 without scaling instead of")
    assert len(found.mismatches) == 3


def test_an_unknown_normalisation_is_named_by_its_numbers(photo):
    """A mean and std nobody listed are read off the tensor."""
    odd = Normalization(name="odd", scale=(1 / 51, 1 / 102, 1 / 25.5), offset=(-0.5, -0.25, -1.0))
    found = explain(replace(CLAIMED, normalization=odd).apply(photo), photo, CONTRACT)
    assert len(found.mismatches) == 1
    assert found.mismatches[0].startswith("normalisation mean/std 0.1/0.2, 0.1/0.4, 0.1/0.1 instead of")


def test_another_input_size_is_named(photo):
    """A tensor of another size is compared at its own size."""
    found = explain(replace(CLAIMED, size_px=32).apply(photo), photo, CONTRACT)
    assert found.mismatches == ("input size 32 instead of 40",)


def test_ignored_camera_rotation_is_named(photo):
    """A JPEG that says it is rotated, decoded without looking at that."""
    image = Image.open(io.BytesIO(photo))
    exif = image.getexif()
    exif[0x0112] = 6  # rotate by 90 degrees to show
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", exif=exif, quality=95)
    rotated = buffer.getvalue()
    theirs = replace(CLAIMED, decoder="Pillow without EXIF rotation").apply(rotated)
    found = explain(theirs, rotated, CONTRACT)
    assert found.mismatches == ("decoder Pillow without EXIF rotation instead of Pillow",)


def test_decoders_are_told_apart_when_their_pixels_differ(photo):
    """A cut-out with transparent parts: the prepare stage lays it over white, OpenCV shows what is hidden."""
    pixels = DECODERS["Pillow"](photo)
    alpha = np.zeros((*pixels.shape[:2], 1), np.uint8)
    alpha[:, : pixels.shape[1] // 2] = 255
    buffer = io.BytesIO()
    Image.fromarray(np.concatenate([pixels, alpha], axis=2)).save(buffer, "PNG")
    data = buffer.getvalue()
    theirs = replace(CLAIMED, decoder="OpenCV").apply(data)
    found = explain(theirs, data, CONTRACT)
    assert found.mismatches == ("decoder OpenCV instead of Pillow",)


def test_what_a_picture_cannot_tell_is_said(photo):
    """On a grey picture colour orders are equal: the simplest explanation wins, and nothing is invented."""
    grey = np.repeat(DECODERS["Pillow"](photo).mean(2, keepdims=True).astype(np.uint8), 3, axis=2)
    swapped = replace(CLAIMED, color_order="BGR").apply(grey)
    found = explain(swapped, grey, CONTRACT)
    assert found.mismatches == ()
    assert found.also_possible == (("colour order BGR instead of RGB",),)
    assert "cannot exclude" in str(found)


def test_a_tensor_of_another_picture_is_not_explained(photos):
    """No combination reproduces it, and the answer says so instead of naming the closest."""
    found = explain(CLAIMED.apply(photos[1]), photos[0], CONTRACT)
    assert not found.reproduced
    assert found.residual_levels > 5
    assert str(found).startswith("unknown preprocessing")


@pytest.mark.parametrize(
    "tensor",
    [
        np.zeros((3, 32, 32)),
        np.zeros((1, 3, 32, 30)),
        np.zeros((1, 1, 32, 32)),
        np.full((1, 3, 8, 8), np.nan),
    ],
)
def test_tensors_that_are_no_model_input_are_user_errors(photo, tensor):
    """The shape and what is allowed are in the message."""
    with pytest.raises(UserError, match=r"\[1, 3, S, S\]"):
        explain(tensor, photo, CONTRACT)


@pytest.fixture(scope="session")
def pixels_and_labels(photos):
    """Pictures and three classes that real colours decide: how red or blue the centre is, in equal thirds."""
    pictures = [DECODERS["Pillow"](data) for data in photos]
    redness = [np.subtract(*CONTRACT.resize(p)[10:30, 10:30].mean((0, 1))[[0, 2]]) for p in pictures]
    return pictures, np.digitize(redness, np.quantile(redness, [1 / 3, 2 / 3]))


@pytest.fixture(scope="session")
def model(pixels_and_labels, tmp_path_factory):
    """A small network trained with the contract on the first 300 pictures, converted and opened in MNN."""
    pictures, labels = pixels_and_labels
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 3),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    x, y = torch.from_numpy(CONTRACT.batch(pictures[:300])), torch.from_numpy(labels[:300])
    for _ in range(25):
        for rows in torch.randperm(300).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
    folder = tmp_path_factory.mktemp("diagnosis")
    export_onnx(net.eval(), CONTRACT, folder / "model.onnx")
    with Session(convert(folder / "model.onnx", folder / "model.mnn").path) as session:
        yield engine_predict(session)


def verdicts(diagnosis):
    return {step.step: step.verdict for step in diagnosis.steps}


def test_a_right_claim_fits(model, pixels_and_labels):
    """With the card's word nothing is open; without, colours alone do not tell rows from columns."""
    pictures, labels = pixels_and_labels
    found = diagnose(model, pictures[300:], labels[300:], CONTRACT, trained=CONTRACT)
    assert found.verdict == "fits"
    assert found.home == found.claimed == CLAIMED
    assert found.claimed_top1 == found.home_top1 > 0.8
    scrambled = next(t for t in found.trials if t.choice.startswith("NHWC values"))
    assert scrambled.t < -3.5
    assert scrambled.change.high < 0
    alone = diagnose(model, pictures[300:], labels[300:], CONTRACT)
    assert alone.verdict == "cannot tell"
    assert alone.mismatches == ()
    assert verdicts(alone)["colour order"] == "confirmed"
    assert next(s.rivals for s in alone.steps if s.step == "layout") == ("NCWH (rows and columns swapped)",)


BGR = replace(CONTRACT, color_order="BGR")
PLAIN = replace(CONTRACT, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


@pytest.mark.parametrize("trained", [None, CONTRACT], ids=["no card", "card"])
def test_swapped_colours_are_named(model, pixels_and_labels, trained):
    """A claim of BGR for a model trained on RGB; what it costs is counted pair by pair."""
    pictures, labels = pixels_and_labels
    found = diagnose(model, pictures[300:], labels[300:], BGR, trained=trained)
    assert found.verdict == "mismatch"
    assert found.mismatches == ("colour order RGB instead of BGR",)
    gained = found.home_top1 - found.claimed_top1
    assert found.change.points == pytest.approx(100 * gained)
    assert 0 < found.change.low < 100 * gained < found.change.high


def test_a_wrong_normalisation_is_named(model, pixels_and_labels):
    """A claim of 0..1 for a model trained with ImageNet's mean and std, or what cannot be told from it."""
    pictures, labels = pixels_and_labels
    found = diagnose(model, pictures[300:], labels[300:], PLAIN)
    step = next(step for step in found.steps if step.step == "normalisation")
    assert step.verdict == "mismatch"
    assert step.claimed == "0..1 without mean and std"
    assert "ImageNet's mean and std" in {step.home, *step.rivals}
    assert "0..255 without scaling" not in {step.home, *step.rivals}
    certain = diagnose(model, pictures[300:], labels[300:], PLAIN, trained=CONTRACT)
    assert certain.mismatches == (
        "normalisation ImageNet's mean and std instead of 0..1 without mean and std",
    )


def test_two_mistakes_that_hide_each_other_are_both_named(model, pixels_and_labels):
    """Colours swapped and pixels of 0..255, without a card: neither step alone is blamed for both."""
    pictures, labels = pixels_and_labels
    both = replace(BGR, mean=(0.0, 0.0, 0.0), std=(1 / 255,) * 3)
    found = diagnose(model, pictures[300:], labels[300:], both)
    named = {name.partition(" instead of")[0].split()[0] for name in found.mismatches}
    assert named == {"colour", "normalisation"}
    assert verdicts(found)["layout"] != "mismatch"
    assert found.home_top1 > 0.8


def test_scrambled_axes_are_named(model, pixels_and_labels):
    """An app that fills the input pixel by pixel where the model wants plane by plane."""
    pictures, labels = pixels_and_labels
    fed = replace(CLAIMED, layout="NHWC values in an NCHW tensor")
    found = diagnose(model, pictures[300:], labels[300:], replace(CONTRACT, layout="NHWC"), as_fed=fed)
    assert found.mismatches == ("layout NCHW instead of NHWC values in an NCHW tensor",)


def test_a_difference_without_consequence_is_no_verdict(model, pixels_and_labels):
    """Another resize filter than trained with: a fact, but these pictures do not show that it matters."""
    pictures, labels = pixels_and_labels
    claimed = replace(CONTRACT, interpolation="bilinear")
    found = diagnose(model, pictures[300:], labels[300:], claimed, trained=CONTRACT)
    assert found.mismatches == ()
    assert found.verdict == "cannot tell"
    assert found.home.resize == "area"


def test_a_closer_look_that_helps_is_no_mismatch(pixels_and_labels):
    """Many models are a little better without the margins, however trained: measured, but nothing named."""
    pictures, labels = pixels_and_labels

    def known(crop):
        pipeline = replace(CLAIMED, crop=crop)
        return {pipeline.apply(p).tobytes(): label for p, label in zip(pictures, labels, strict=True)}

    closely, whole = known(CLOSER_CROP), known(CLAIMED.crop)

    def predict(tensor):
        label = closely.get(tensor.tobytes(), whole.get(tensor.tobytes(), 0))
        right = tensor.tobytes() in closely or label == 1
        return np.eye(3, dtype=np.float32)[label] * (4 if right else -1)

    found = diagnose(predict, pictures[300:], labels[300:], CONTRACT)
    trial = next(trial for trial in found.trials if trial.choice == CLOSER_CROP)
    assert trial.t > 3.5
    assert trial.change.low > 0
    assert found.mismatches == ()
    assert found.home == found.claimed


def test_without_labels_nothing_is_a_mismatch(model, pixels_and_labels):
    """Confidence is no witness: pixels of 0..255 make this model surer. What changes is still counted."""
    loud = replace(CONTRACT, mean=(0.0, 0.0, 0.0), std=(1 / 255,) * 3)
    found = diagnose(model, pixels_and_labels[0][300:360], None, loud, trained=CONTRACT)
    assert found.verdict == "cannot tell"
    assert found.mismatches == ()
    assert found.claimed_top1 is None
    assert found.home == CLAIMED
    assert found.change.points < 0
    assert "labels" in found.doubt


def test_too_few_pictures_decide_nothing(model, pixels_and_labels):
    """Ten pictures are not enough, even against a wrong card."""
    pictures, labels = pixels_and_labels
    found = diagnose(model, pictures[300:310], labels[300:310], BGR, trained=CONTRACT)
    assert set(verdicts(found).values()) == {"cannot tell"}
    assert found.verdict == "cannot tell"
    assert "10 of the pictures needed" in found.doubt


def test_a_model_that_knows_other_classes_decides_nothing(model, pixels_and_labels):
    """Labels that have nothing to do with the pictures: no way to prepare them is better than guessing."""
    pictures, labels = pixels_and_labels
    found = diagnose(model, pictures[300:], np.random.default_rng(0).permutation(labels[300:]), BGR)
    assert found.verdict == "cannot tell"
    assert "guessing" in found.doubt


def test_a_model_that_has_learnt_nothing_decides_nothing(pixels_and_labels):
    """Equal logits for everything: no alternative is better, and none is confirmed."""
    pictures, labels = pixels_and_labels
    found = diagnose(lambda tensor: np.zeros(3, np.float32), pictures[:40], labels[:40], CONTRACT)
    assert set(verdicts(found).values()) == {"cannot tell"}
    assert {trial.t for trial in found.trials} == {0.0}


def test_pictures_and_labels_must_match(pixels_and_labels):
    """One label a picture, or none at all."""
    pictures, labels = pixels_and_labels
    with pytest.raises(UserError, match="3 pictures and 2 labels"):
        diagnose(lambda tensor: np.zeros(3, np.float32), pictures[:3], labels[:2], CONTRACT)
    with pytest.raises(UserError, match="0 pictures"):
        diagnose(lambda tensor: np.zeros(3, np.float32), [], None, CONTRACT)


def test_the_interval_of_a_change_is_that_of_paired_proportions():
    """59 + 16 of 161 right before and 59 + 6 after, the published table and its interval, turned around."""
    one = np.array([True] * 59 + [False] * 6 + [True] * 16 + [False] * 80)
    two = np.array([True] * 59 + [True] * 6 + [False] * 16 + [False] * 80)
    change = change_between(one, two)
    assert change.points == pytest.approx(100 * (6 - 16) / 161)
    assert (change.low, change.high) == pytest.approx((-11.86, -0.46), abs=0.0051)
    still = change_between(one, one)
    assert still.points == 0
    assert still.low == pytest.approx(-still.high)
    assert still.low < -1
