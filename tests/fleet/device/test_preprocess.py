"""The preprocess contract: fixed pixels for fixed records, and a digest that tells records apart."""

import json
from dataclasses import replace

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess

PLAIN = Preprocess(size_px=4, mean=(0, 0, 0), std=(1, 1, 1))


def _image(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_crop_is_the_centre_square():
    """The sides of a wide image go, the middle stays; an odd pixel is lost on the right."""
    image = np.zeros((4, 9, 3), np.uint8)
    image[:, 2:6] = 7
    assert np.array_equal(PLAIN.resize(image), np.full((4, 4, 3), 7))
    assert np.array_equal(PLAIN.resize(image.transpose(1, 0, 2)), np.full((4, 4, 3), 7))


def test_area_averages_when_shrinking():
    """Halving means 2 x 2 blocks; bilinear at this factor would agree only by chance."""
    image = np.zeros((16, 16, 3), np.uint8)
    image[::4, ::4] = 160
    expected = image.reshape(4, 4, 4, 4, 3).astype(float).mean(axis=(1, 3))
    assert np.array_equal(PLAIN.resize(image), expected)
    assert not np.array_equal(replace(PLAIN, interpolation="bilinear").resize(image), expected)


def test_same_size_is_untouched():
    """An image of the right size passes bit for bit."""
    image = _image(4, 4)
    assert np.array_equal(PLAIN.resize(image), image)


def test_resizing_leaves_the_input_alone():
    """Inputs may be read-only maps, and stay as they are."""
    image = _image(9, 12)
    before = image.copy()
    image.setflags(write=False)
    PLAIN.apply(image)
    assert np.array_equal(image, before)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("color_order", ["RGB", "BGR"])
def test_normalisation_is_the_textbook_formula(layout, color_order):
    """(x / 255 - mean) / std in the order of the model's colours, to float32 accuracy."""
    contract = Preprocess(
        size_px=4, layout=layout, color_order=color_order, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7)
    )
    image = _image(4, 4, 1)
    x = image[..., ::-1] if color_order == "BGR" else image
    expected = (x / 255.0 - [0.1, 0.2, 0.3]) / [0.5, 0.6, 0.7]
    expected = expected.transpose(2, 0, 1) if layout == "NCHW" else expected
    result = contract.apply(image)
    assert result.shape == contract.input_shape
    assert result.dtype == np.float32
    assert np.abs(result[0] - expected).max() < 1e-6
    assert result.flags.c_contiguous


def test_one_and_many_agree_bit_for_bit():
    """A batch in training is what the device computes one by one."""
    contract = Preprocess(size_px=8)
    images = [_image(h, w, h) for h, w in ((8, 8), (20, 9), (7, 30))]
    assert np.array_equal(contract.batch(images), np.concatenate([contract.apply(i) for i in images]))


def test_threads_do_not_change_pixels():
    """OpenCV's thread count is no part of the contract."""
    contract, image = Preprocess(size_px=64), _image(301, 407)
    threads = cv2.getNumThreads()
    try:
        cv2.setNumThreads(1)
        single = contract.apply(image)
        cv2.setNumThreads(4)
        assert np.array_equal(contract.apply(image), single)
    finally:
        cv2.setNumThreads(threads)


@pytest.mark.parametrize(
    "image",
    [
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((3, 4, 4), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((0, 4, 3), np.uint8),
    ],
)
def test_what_is_no_rgb_image_is_refused(image):
    """Grey, alpha, channels first, floats and nothing: an error that names shape and type."""
    with pytest.raises(UserError, match=r"shape \(.*dtype"):
        PLAIN.apply(image)


@pytest.mark.parametrize(
    "changes",
    [
        {"size_px": 0},
        {"size_px": 5000},
        {"interpolation": "cubic"},
        {"color_order": "GBR"},
        {"layout": "CHW"},
        {"dtype": "float16"},
        {"mean": (0.5, 0.5)},
        {"mean": (0.5, 0.5, float("nan"))},
        {"std": (1.0, 0.0, 1.0)},
    ],
)
def test_impossible_records_are_refused(changes):
    """A record that could not have been meant does not become a model's contract."""
    with pytest.raises(UserError):
        replace(PLAIN, **changes)


sides = st.integers(min_value=1, max_value=4096)
triples = st.tuples(*[st.floats(0.01, 1)] * 3)


@given(
    st.builds(
        Preprocess,
        size_px=sides,
        mean=triples,
        std=triples,
        interpolation=st.sampled_from(["area", "bilinear"]),
        color_order=st.sampled_from(["RGB", "BGR"]),
        layout=st.sampled_from(["NCHW", "NHWC"]),
    )
)
def test_records_survive_json(contract):
    """A model card read back is the same contract with the same digest."""
    again = Preprocess.from_dict(json.loads(json.dumps(contract.to_dict())))
    assert again == contract
    assert again.digest() == contract.digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"size_px": 5},
        {"interpolation": "bilinear"},
        {"color_order": "BGR"},
        {"mean": (0, 0, 1e-9)},
        {"std": (1, 1, 1.0001)},
        {"layout": "NHWC"},
    ],
)
def test_digest_tells_records_apart(changes):
    """Every field that changes pixels changes the digest."""
    assert replace(PLAIN, **changes).digest() != PLAIN.digest()


@pytest.mark.parametrize("change", ["missing", "unknown"])
def test_foreign_records_are_refused(change):
    """A record of another version is named, not guessed at."""
    record = PLAIN.to_dict()
    if change == "missing":
        del record["size_px"]
    else:
        record["crop"] = "none"
    with pytest.raises(UserError, match="preprocess record"):
        Preprocess.from_dict(record)
