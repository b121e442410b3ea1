"""Images that make bad int8 scales or a flattering proof: noise, and those trained or tested on."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from fleet.device.preprocess import Preprocess

Image = npt.NDArray[np.uint8]

_LOOK_PX = 32
_LARGEST_PX = 512
_LEAST_CORRELATION = 0.25
"""Of neighbouring pixels. Noise has 0.00 to 0.07, as JPEG and enlarged, too; of 6,500 training images of the
presets one is below, at 32 pixels, none at its own size."""
_MOST_NOISE = 0.1  # share of the images: a few of grass or fabric are no reason to warn
_NOT_FOR_CALIBRATION = {"train": "training", "val": "validation", "test": "test", "field_test": "test"}


def is_noise(image: Image) -> bool:
    """Whether neighbouring pixels have nothing to do with each other, uint8 RGB [H, W, 3].

    Looked at as it is and at 32 pixels, where enlarged noise is noise again.
    """
    height, width = image.shape[:2]
    top, left = max(0, height - _LARGEST_PX) // 2, max(0, width - _LARGEST_PX) // 2
    middle = image[top : top + _LARGEST_PX, left : left + _LARGEST_PX]
    small = cv2.resize(image, (_LOOK_PX, _LOOK_PX), interpolation=cv2.INTER_AREA)
    return min(_correlation(middle), _correlation(small)) < _LEAST_CORRELATION


def noise_warning(noisy: int, count: int) -> str:
    """What to say of `noisy` among `count` images; empty when there is nothing to say."""
    if noisy <= _MOST_NOISE * count:
        return ""
    return (
        f"{noisy} of {count} calibration images look like noise: scales measured on them are not those of the"
        " scene; use photos"
    )


@dataclass(frozen=True, kw_only=True)
class KnownImages:
    """Which images a dataset keeps for what, by their stored pixels."""

    name: str
    """Of the dataset, in messages."""
    splits: dict[str, str]
    """SHA-256 of the stored pixels to split."""
    stored: Preprocess
    """How a picture becomes what is stored."""

    @classmethod
    def of(cls, prepared: Path, name: str) -> "KnownImages":
        """Read a prepared dataset; UserError where it is none."""
        from tasks.data.dataset import Dataset  # with pandas, which most conversions do without

        dataset = Dataset.open(prepared)
        manifest = dataset.manifest
        splits = dict(zip(manifest["sha256"], manifest["split"], strict=True))
        return cls(name=name, splits=splits, stored=Preprocess(size_px=dataset.stored_size))

    def split_of(self, image: Image) -> str | None:
        """The split that a picture, uint8 RGB [H, W, 3], belongs to; None for a new one."""
        from tasks.data.shards import pixels_sha256

        return self.splits.get(pixels_sha256(self.stored.resize(image)))


def overlap_warning(name: str, splits: Iterable[str | None]) -> str:
    """What to say of calibration images that a dataset uses otherwise; empty when there is nothing to say.

    Args:
        name: Of the dataset.
        splits: Of each calibration image, None for new ones.
    """
    every = list(splits)
    found = Counter(_NOT_FOR_CALIBRATION[split] for split in every if split in _NOT_FOR_CALIBRATION)
    if not found:
        return ""
    parts = " and ".join(f"{count} in the {what} set" for what, count in sorted(found.items()))
    return (
        f"of {len(every)} calibration images {parts} of {name}: scales should be measured on images that"
        " the model was neither fitted to nor is tested on"
    )


def _correlation(image: Image) -> float:
    """Of each pixel's brightness with the next one's, right and below; 1 for a flat picture."""
    grey = image.astype(np.float32).mean(axis=2)
    grey -= grey.mean()
    power = float((grey * grey).mean())
    if power < 1 or min(grey.shape) < 2:
        return 1.0
    right, below = grey[:, 1:] * grey[:, :-1], grey[1:] * grey[:-1]
    return float(right.mean() + below.mean()) / (2 * power)
