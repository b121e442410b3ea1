"""Noise is told from photos, and images of the training or the test set are found again."""

import numpy as np
import pytest
from nn.digit_set import write_digits
from PIL import Image

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.data.dataset import Dataset
from tasks.mnn.calibration import Calibration
from tasks.mnn.calibration_checks import KnownImages, is_noise, noise_warning, overlap_warning


def _jpeg(pixels, folder):
    Image.fromarray(pixels).save(folder / "x.jpg", quality=80)
    return np.asarray(Image.open(folder / "x.jpg"))


def _uniform(size):
    return np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)


NOISE = {
    "uniform": lambda _: _uniform(96),
    "grey": lambda _: np.repeat(_uniform(64)[..., :1], 3, axis=2),
    "gaussian": lambda _: np.random.default_rng(1).normal(128, 20, (80, 60, 3)).clip(0, 255).astype(np.uint8),
    "as JPEG": lambda folder: _jpeg(_uniform(128), folder),
    "enlarged": lambda _: np.asarray(Image.fromarray(_uniform(128)).resize((512, 512), 2)),
    "salt and pepper": lambda _: np.where(_uniform(64)[..., :1] > 127, 255, 0).astype(np.uint8).repeat(3, 2),
}


@pytest.mark.parametrize("kind", NOISE)
def test_noise_is_noise(kind, tmp_path):
    """Whatever its distribution, its size and its file format."""
    assert is_noise(NOISE[kind](tmp_path))


def test_pictures_are_no_noise(pixels, tmp_path):
    """Smooth pictures with a sensor's noise, the digits, flat ones, and pictures of a pixel or a row."""
    rng = np.random.default_rng(0)
    photos = [pixels(seed, 120, 90) + rng.normal(0, 4, (90, 120, 3)) for seed in range(20)]
    digits = Dataset.open(write_digits(tmp_path / "d", {"train": 200}, size_px=32)).split("train").images
    flat = [np.full(shape, 90, np.uint8) for shape in ((40, 40, 3), (1, 1, 3), (1, 50, 3))]
    every = [*(p.clip(0, 255).astype(np.uint8) for p in photos), *digits(range(200)), *flat]
    assert not [at for at, image in enumerate(every) if is_noise(image)]


def test_a_few_textures_are_no_reason_to_warn():
    """Up to a tenth is silent, more is said with the numbers."""
    assert noise_warning(10, 100) == ""
    assert noise_warning(11, 100).startswith("11 of 100 calibration images look like noise")


def test_images_of_other_splits_are_counted():
    """Train, val and test are named; the calibration split and new images are fine."""
    said = overlap_warning("shoes", ["train", "train", "test", "calibration", None])
    assert said.startswith("of 5 calibration images 1 in the test set and 2 in the training set of shoes")
    assert overlap_warning("shoes", ["calibration", None, "field"]) == ""


def test_files_are_found_by_what_a_model_sees(tmp_path):
    """A file of the training set under another name and format is still that image."""
    prepared = write_digits(tmp_path / "prepared", {"train": 20, "calibration": 5, "test": 5}, size_px=32)
    train = Dataset.open(prepared).split("train")
    (tmp_path / "i").mkdir()
    files = []
    for index in range(12):
        files.append(tmp_path / "i" / f"copy{index}.{'bmp' if index % 2 else 'png'}")
        Image.fromarray(train.image(index)).save(files[-1])
    images = Calibration(files=tuple(files), input_name="x", preprocess=Preprocess(size_px=24))
    (said,) = images.warnings([KnownImages.of(prepared, "digits")])
    assert said.startswith("of 12 calibration images 12 in the training set of digits")
    assert images.warnings([]) == []


def test_a_folder_that_is_no_dataset_is_an_error(tmp_path):
    """The caller decides what to do without it."""
    with pytest.raises(UserError, match="dataset"):
        KnownImages.of(tmp_path, "x")
