"""Training-time augmentation of stored images: uint8 in, uint8 of the model's size out.

The geometry runs in the stored resolution and ends in the contract's own resize, so that a training image has
the same anti-aliasing as a validation image. Everything is OpenCV on uint8: it releases the interpreter lock,
so loader threads run beside the training step.
"""

from typing import cast

import cv2
import numpy as np
import numpy.typing as npt
from pydantic import Field

from fleet.device.preprocess import Preprocess
from tasks.stage import Params

Image = npt.NDArray[np.uint8]

_CV2_INTERPOLATION = {"area": cv2.INTER_AREA, "bilinear": cv2.INTER_LINEAR}

# Luma weights of ITU-R BT.601, the ones torchvision and Pillow use for grey.
_LUMA = np.array([0.299, 0.587, 0.114])


class AugmentConfig(Params):
    """What may change in a training image; each default changes nothing."""

    crop_scale_min: float = Field(default=1.0, gt=0, le=1)
    """Smallest share of the image's area that a random crop keeps; 1 keeps all of it."""
    crop_aspect_max: float = Field(default=4 / 3, ge=1)
    """Largest ratio of a crop's sides before it is stretched to a square; used when crop_scale_min < 1."""
    shift: float = Field(default=0.0, ge=0, lt=1)
    """Largest translation, as a share of the side; the border is mirrored."""
    rotation_deg: float = Field(default=0.0, ge=0, le=180)
    """Largest rotation to either side in degrees; the border is mirrored."""
    flip: bool = False
    """Mirror left and right half of the time. Not for digits, text, or anything with a handedness."""
    brightness: float = Field(default=0.0, ge=0, lt=1)
    """Brightness is multiplied by a factor in 1 ± this."""
    contrast: float = Field(default=0.0, ge=0, lt=1)
    """Contrast about the image's mean is multiplied by a factor in 1 ± this."""
    saturation: float = Field(default=0.0, ge=0, le=1)
    """The distance from grey is multiplied by a factor in 1 ± this."""


def augment(
    image_SSC: Image, config: AugmentConfig, preprocess: Preprocess, rng: np.random.Generator
) -> Image:
    """One stored uint8 RGB image [S, S, 3] -> uint8 RGB [size_px, size_px, 3]."""
    moved = _move(image_SSC, config, rng)
    resized = (
        preprocess.resize(moved) if config.crop_scale_min == 1 else _crop(moved, config, preprocess, rng)
    )
    if config.flip and rng.random() < 0.5:
        resized = resized[:, ::-1]
    return _jitter(resized, config, rng)


def _move(image_SSC: Image, config: AugmentConfig, rng: np.random.Generator) -> Image:
    """Rotate about the centre and translate."""
    if config.rotation_deg == 0 and config.shift == 0:
        return image_SSC
    side = image_SSC.shape[0]
    matrix = cv2.getRotationMatrix2D(
        ((side - 1) / 2, (side - 1) / 2), rng.uniform(-config.rotation_deg, config.rotation_deg), 1.0
    )
    matrix[:, 2] += rng.uniform(-config.shift, config.shift, 2) * side
    moved = cv2.warpAffine(
        image_SSC, matrix, (side, side), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT_101
    )
    return cast("Image", moved)


def _crop(image_SSC: Image, config: AugmentConfig, preprocess: Preprocess, rng: np.random.Generator) -> Image:
    """Random resized crop (Szegedy et al. 2015): a window of random area and aspect becomes the input."""
    side = image_SSC.shape[0]
    root_area = side * np.sqrt(rng.uniform(config.crop_scale_min, 1))
    root_aspect = np.exp(rng.uniform(-1, 1) * np.log(config.crop_aspect_max) / 2)
    height, width = (
        int(np.clip(round(root_area * factor), 1, side)) for factor in (1 / root_aspect, root_aspect)
    )
    top, left = rng.integers(side - height + 1), rng.integers(side - width + 1)
    window = image_SSC[top : top + height, left : left + width]
    size = (preprocess.size_px, preprocess.size_px)
    return cast("Image", cv2.resize(window, size, interpolation=_CV2_INTERPOLATION[preprocess.interpolation]))


def _jitter(image_HWC: Image, config: AugmentConfig, rng: np.random.Generator) -> Image:
    """Saturation, contrast and brightness as one linear map of the colour, rounded and clipped once."""
    if config.brightness == config.contrast == config.saturation == 0:
        return image_HWC
    saturation, contrast, brightness = (
        1 + amount * rng.uniform(-1, 1) for amount in (config.saturation, config.contrast, config.brightness)
    )
    mean_luma = float(np.dot(cv2.mean(np.ascontiguousarray(image_HWC))[:3], _LUMA))
    matrix = np.empty((3, 4))
    matrix[:, :3] = brightness * contrast * (saturation * np.eye(3) + (1 - saturation) * _LUMA)
    matrix[:, 3] = brightness * (1 - contrast) * mean_luma
    return cast("Image", cv2.transform(np.ascontiguousarray(image_HWC), matrix))
