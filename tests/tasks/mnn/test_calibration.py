"""Real images for int8: what counts as different, what is kept for the proof, and records users write."""

import json

import numpy as np
import pytest
from PIL import Image

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.mnn.calibration import Calibration, open_calibration, read_preprocess
from tasks.mnn.onnx_inputs import GraphInput


def _set(folder, pictures):
    folder.mkdir()
    files = []
    for index, pixels in enumerate(pictures):
        files.append(folder / f"{index:04}.png")
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(files[-1])
    return Calibration(files=tuple(files), input_name="x", preprocess=Preprocess(size_px=32))


def _photos(count, seed=0, size_px=64):
    """Smooth pictures that differ, with a sensor's noise."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        coarse = rng.uniform(0, 255, (4, 4, 3)).astype(np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((size_px, size_px), Image.Resampling.BICUBIC))
        yield smooth + rng.normal(0, 3, smooth.shape)


def _noisy(picture, count, sigma):
    rng = np.random.default_rng(1)
    return (picture + rng.normal(0, sigma, picture.shape) for _ in range(count))


GREY = np.full((64, 64, 3), 128.0)
PHOTO = next(iter(_photos(1)))
DEGENERATE = {
    "copies of one grey picture": lambda: [GREY] * 120,
    "greys of all levels": lambda: (np.full((64, 64, 3), level) for level in range(120)),
    "copies of one photo": lambda: [PHOTO] * 120,
    "one photo with sensor noise": lambda: _noisy(PHOTO, 120, 4),
    "one photo at other exposures": lambda: (0.8 * PHOTO + level for level in range(40)),
    "few photos among copies": lambda: [*_photos(7), *[PHOTO] * 113],
    "few photos": lambda: _photos(7),
}


@pytest.mark.parametrize("kind", DEGENERATE)
def test_images_that_look_alike_count_once(kind, tmp_path):
    """However many files there are, fewer than 8 different pictures are no calibration set."""
    images = _set(tmp_path / "i", DEGENERATE[kind]())
    with pytest.raises(UserError, match=r"of which \d differ from each other") as caught:
        images.split(1)
    assert "at least 8 different pictures" in caught.value.allowed
    assert "scene" in caught.value.next_step


def test_every_fifth_image_is_kept_for_the_proof(tmp_path):
    """Both sides are different images, copies of one on neither side, and the number is that of both."""
    pictures = list(_photos(40))
    images = _set(tmp_path / "i", [*pictures, *pictures[:5]])
    split = images.split(1)
    measured, kept = set(split.measured.files), set(split.kept.files)
    assert (len(measured), len(kept), split.count) == (32, 8, 40)
    assert not measured & kept
    assert measured | kept == set(images.files[:40])
    assert "calibrated on 40 images" in split.warning
    assert images.split(1) == split


@pytest.mark.parametrize(
    ("count", "batch", "enough"), [(8, 1, True), (8, 4, True), (9, 5, False), (12, 6, True)]
)
def test_both_sides_fill_a_batch(count, batch, enough, tmp_path):
    """A model of a fixed batch needs that many images on either side."""
    images = _set(tmp_path / "i", _photos(count))
    if not enough:
        with pytest.raises(UserError, match="at least 10 different"):
            images.split(batch)
        return
    split = images.split(batch)
    assert min(len(split.measured.files), len(split.kept.files)) >= batch


def test_a_hundred_images_need_no_warning(tmp_path):
    """From 100 on, nothing is said."""
    assert _set(tmp_path / "i", _photos(100, size_px=16)).split(1).warning == ""


def _input(*dims, dtype="float32"):
    return (GraphInput(name="x", dtype=dtype, dims=dims),)


def _open(folder, inputs, preprocess=None, asked=None):
    _set(folder, _photos(1))
    return open_calibration(folder, inputs, preprocess, asked or {}).preprocess.input_shape


OPEN = ("n", 3, "h", "w")
UNFIT = {
    "another size": (_input(1, 3, 16, 16), Preprocess(size_px=32), {}),
    "another layout": (_input(1, 3, 16, 16), Preprocess(size_px=16, layout="NHWC"), {}),
    "one fixed side": (_input("n", 3, "h", 16), Preprocess(size_px=32), {}),
    "the default beside --shape": (_input(*OPEN), None, {"x": [(1, 3, 320, 320)]}),
    "none of two --shape": (_input(*OPEN), Preprocess(size_px=64), {"x": [(1, 3, 32, 32), (2, 3, 96, 64)]}),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_images_of_a_shape_that_the_model_is_not_run_at_are_refused(kind, tmp_path):
    """They would be left out without a word, and random inputs prove the model alone."""
    with pytest.raises(UserError, match=r"calibration images as inputs of \[N, ") as caught:
        _open(tmp_path / "i", *UNFIT[kind])
    assert "--preprocess" in caught.value.next_step
    assert str(list((UNFIT[kind][2] or {"x": [UNFIT[kind][0][0].dims]})["x"][0])) in caught.value.allowed


@pytest.mark.parametrize(
    ("inputs", "preprocess", "asked", "size_px"),
    [
        (_input(4, 3, 16, 16), None, {}, 16),
        (_input(*OPEN), None, {}, 224),
        (_input(*OPEN), Preprocess(size_px=32), {"x": [(1, 3, 64, 64), (2, 3, 32, 32)]}, 32),
        (_input("n", "c", "h", "w"), Preprocess(size_px=32), {}, 32),
    ],
)
def test_images_of_a_shape_that_the_model_is_run_at_are_taken(inputs, preprocess, asked, size_px, tmp_path):
    """Any batch; one of the shapes asked for is enough."""
    assert _open(tmp_path / "i", inputs, preprocess, asked) == (1, 3, size_px, size_px)


@pytest.mark.parametrize(
    "inputs",
    [(), (*_input(*OPEN), *_input(*OPEN)), _input(), _input(1, 5), _input(1, 3, 16, 16, dtype="float16")],
    ids=["none", "two", "a number", "a vector", "float16"],
)
@pytest.mark.parametrize("preprocess", [None, Preprocess(size_px=16)], ids=["default", "given"])
def test_a_model_without_one_picture_takes_no_images(inputs, preprocess, tmp_path):
    """Whatever its inputs are, that is a user error about --calibration, which need not be for --int8."""
    with pytest.raises(UserError, match="inputs ") as caught:
        _open(tmp_path / "i", inputs, preprocess)
    assert "for --calibration" in caught.value.allowed
    assert "--calibration" in caught.value.next_step


GOOD = {"size_px": 64, "mean": [0, 0.5, 0.25], "std": [1, 1, 1], "layout": "NHWC"}


def test_a_record_is_read(tmp_path):
    """Fields left out have their defaults; whole numbers are numbers."""
    (tmp_path / "p.json").write_text(json.dumps(GOOD))
    read = read_preprocess(tmp_path / "p.json")
    assert read == Preprocess(size_px=64, mean=(0.0, 0.5, 0.25), std=(1.0, 1.0, 1.0), layout="NHWC")
    (tmp_path / "all.json").write_text(json.dumps(read.to_dict()))
    assert read_preprocess(tmp_path / "all.json") == read
    (tmp_path / "card.json").write_text(json.dumps({"variant": "x", "preprocess": read.to_dict()}))
    assert read_preprocess(tmp_path / "card.json") == read


BAD = {
    "no JSON": "{",
    "a list": "[1, 2, 3]",
    "a number": "64",
    "null": "null",
    "no size": "{}",
    "a field too many": json.dumps({**GOOD, "crop": 3}),
    "a size in words": json.dumps({**GOOD, "size_px": "64"}),
    "a broken size": json.dumps({**GOOD, "size_px": 64.5}),
    "a truth": json.dumps({**GOOD, "size_px": True}),
    "a huge size": json.dumps({**GOOD, "size_px": 10**400}),
    "a number for three": json.dumps({**GOOD, "mean": 0.5}),
    "two numbers": json.dumps({**GOOD, "mean": [0.5, 0.5]}),
    "words for numbers": json.dumps({**GOOD, "mean": ["0.5", "0.5", "0.5"]}),
    "text for numbers": json.dumps({**GOOD, "std": "abc"}),
    "a huge number": json.dumps({**GOOD, "std": [10**400, 1, 1]}),
    "no number": '{"size_px": 64, "std": [NaN, 1, 1]}',
    "zero": json.dumps({**GOOD, "std": [0, 1, 1]}),
    "another layout": json.dumps({**GOOD, "layout": "CHW"}),
    "a layout that is a list": json.dumps({**GOOD, "layout": ["NCHW"]}),
    "too deep": "[" * 100_000,
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("kind", BAD)
def test_any_other_record_is_a_user_error_that_a_user_can_act_on(kind, tmp_path):
    """It names the file, says what a record is, and sends nobody to a build."""
    path = tmp_path / "p.json"
    path.write_bytes(BAD[kind] if isinstance(BAD[kind], bytes) else BAD[kind].encode())
    with pytest.raises(UserError, match=r"preprocess record .*p\.json") as caught:
        read_preprocess(path)
    assert "size_px" in caught.value.allowed
    assert f"correct {path}" in caught.value.next_step  # given as --preprocess, or as --record
    assert len(str(caught.value)) < 1000


def test_a_missing_record_is_a_user_error(tmp_path):
    """So is a folder."""
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UserError, match="preprocess record"):
            read_preprocess(path)
