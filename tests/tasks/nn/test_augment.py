"""Augmentation changes what it says, nothing else, and validation pixels are what remains without it."""

import numpy as np
import pytest

from fleet.device.preprocess import Preprocess
from tasks.nn.augment import AugmentConfig, augment

SIZE = 24
PREPROCESS = Preprocess(size_px=SIZE)


@pytest.fixture
def image() -> np.ndarray:
    rng = np.random.default_rng(5)
    coarse = rng.integers(30, 220, (6, 6, 3), np.uint8)
    return np.kron(coarse, np.ones((8, 8, 1), np.uint8))  # 48 x 48, flat blocks


def results(image: np.ndarray, config: AugmentConfig, count: int = 200) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.stack([augment(image, config, PREPROCESS, rng) for _ in range(count)])


def test_nothing_asked_nothing_changed(image: np.ndarray) -> None:
    """The default is the contract's own resize, bit for bit."""
    assert (results(image, AugmentConfig(), 3) == PREPROCESS.resize(image)).all()


def test_flip_mirrors_half_of_the_time(image: np.ndarray) -> None:
    """Every result is the image or its mirror image, about equally often."""
    plain = PREPROCESS.resize(image)
    found = results(image, AugmentConfig(flip=True))
    mirrored = (found == plain[:, ::-1]).all(axis=(1, 2, 3))
    assert (mirrored | (found == plain).all(axis=(1, 2, 3))).all()
    assert 0.35 < mirrored.mean() < 0.65


@pytest.mark.parametrize(
    "config",
    [AugmentConfig(shift=0.2), AugmentConfig(rotation_deg=20), AugmentConfig(crop_scale_min=0.3)],
)
def test_no_mirror_images_unless_asked(config: AugmentConfig) -> None:
    """A left half brighter than the right stays so: digits and text survive every other augmentation."""
    image = np.zeros((48, 48, 3), np.uint8)
    image[:, :24] = 200
    found = results(image, config).astype(int)
    assert (found[:, :, : SIZE // 2].sum((1, 2, 3)) >= found[:, :, SIZE // 2 :].sum((1, 2, 3))).all()


def test_shift_stays_within_its_bound() -> None:
    """A dot in the middle moves at most by the share asked for, in both directions of both axes."""
    image = np.zeros((48, 48, 3), np.uint8)
    image[22:26, 22:26] = 255
    found = results(image, AugmentConfig(shift=0.25))[..., 0].astype(float)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    total = found.sum((1, 2))
    for axis in (rows, columns):
        centre = (found * axis).sum((1, 2)) / total - (SIZE - 1) / 2
        assert np.abs(centre).max() <= 0.25 * SIZE + 0.5
        assert centre.min() < -0.15 * SIZE
        assert centre.max() > 0.15 * SIZE


def test_crop_keeps_at_least_its_share() -> None:
    """On a horizontal ramp, the range of grey values that is left is the width of the crop."""
    ramp = np.repeat(np.linspace(0, 255, 48).astype(np.uint8)[None, :, None], 48, 0).repeat(3, 2)
    config = AugmentConfig(crop_scale_min=0.5, crop_aspect_max=1.0)
    found = results(ramp, config).astype(int)
    kept = (found.max((1, 2, 3)) - found.min((1, 2, 3))) / 255
    assert kept.min() > np.sqrt(0.5) - 0.1
    assert kept.min() < np.sqrt(0.5) + 0.1
    assert kept.max() > 0.9


@pytest.mark.parametrize(
    ("name", "moves"), [("brightness", "mean"), ("contrast", "spread"), ("saturation", "colour")]
)
def test_jitter_moves_its_own_quantity(image: np.ndarray, name: str, moves: str) -> None:
    """Each factor changes the quantity it is named after by up to its amount; the mean luma stays."""
    found = results(image, AugmentConfig(**{name: 0.2})).astype(float)
    plain = PREPROCESS.resize(image).astype(float)
    luma = np.array([0.299, 0.587, 0.114])

    def measure(pixels: np.ndarray) -> dict[str, float]:
        grey = pixels @ luma
        return {"mean": grey.mean(), "spread": grey.std(), "colour": (pixels - grey[..., None]).std()}

    before = measure(plain)
    ratios = np.array([measure(pixels)[moves] / before[moves] for pixels in found])
    assert ratios.min() < 0.85
    assert ratios.max() > 1.1
    assert ratios.min() > 0.78
    assert ratios.max() < 1.22
    if name != "brightness":
        means = np.array([measure(pixels)["mean"] / before["mean"] for pixels in found])
        assert np.abs(means - 1).max() < 0.03


def test_jitter_clips_instead_of_wrapping() -> None:
    """White cannot become dark by overflow."""
    white = np.full((48, 48, 3), 250, np.uint8)
    assert results(white, AugmentConfig(brightness=0.5)).min() >= 120
