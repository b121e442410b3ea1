"""Inputs that drift away from what a model was trained on: of real images, and what a simulated device tells.

On images the functions are what cameras and places do. A strength of 0 changes nothing, 1 is the worst:

- **blur**: a Gaussian of `_BLUR_OF_SIDE` of the shorter side;
- **low light**: less light by up to `_DARKEST`, computed on linear light (gamma 2.2), as an exposure would;
- **colour cast**: towards warm light; red stays, green and blue lose up to `_CAST`;
- **new domain**: that share of the images is replaced by images of another set.

On a simulated device, which has no images, `Drift` says how confidences, classes and pixel statistics
change. All of that is an assumption: sound confidences are Beta(12, 1), those of a full drift Beta(2, 3), in
between the parameters go in a straight line; a real model may stay sure of what it gets wrong.
"""

from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
import numpy.typing as npt

from fleet.device.errors import UserError

Images = npt.NDArray[np.uint8]
"""[N, H, W, 3], RGB."""
Values = npt.NDArray[np.float64]
Kind = Literal["none", "blur", "low_light", "colour_cast", "new_domain"]
KINDS: tuple[Kind, ...] = ("blur", "low_light", "colour_cast", "new_domain")
_BLUR_OF_SIDE, _DARKEST, _GAMMA = 0.08, 0.97, 2.2
_CAST = (0.0, 0.35, 0.7)
_SOUND, _DRIFTED = (12.0, 1.0), (2.0, 3.0)
_INPUT_MEAN, _INPUT_STD = (120.0, 15.0), (50.0, 8.0)
"""Mean and spread over images; assumed too."""


def camera_blur(images: Images, strength: float) -> Images:
    """Out of focus."""
    _check(images, strength)
    sigma = strength * _BLUR_OF_SIDE * min(images.shape[1:3])
    if sigma == 0:
        return images.copy()
    blurred = [cv2.GaussianBlur(image, (0, 0), sigma, borderType=cv2.BORDER_REFLECT) for image in images]
    return np.asarray(blurred, np.uint8).reshape(images.shape)


def low_light(images: Images, strength: float) -> Images:
    """A darker place."""
    _check(images, strength)
    levels = np.arange(256) * (1.0 - _DARKEST * strength) ** (1 / _GAMMA)
    return np.asarray(np.rint(levels).astype(np.uint8)[images], np.uint8)


def colour_cast(images: Images, strength: float) -> Images:
    """Warm light that nothing corrects."""
    _check(images, strength)
    gains = 1.0 - strength * np.array(_CAST)
    return np.asarray(np.rint(images * gains).astype(np.uint8), np.uint8)


def new_domain(images: Images, other: Images, strength: float, *, seed: int) -> Images:
    """What was replaced at a strength is replaced at each larger one too.

    Args:
        images: Of the set the model knows.
        other: Of another, of the same height and width; taken in turn.
        strength: Share that is replaced.
        seed: Chooses which.

    Raises:
        UserError: another size, no images, or a strength outside 0..1.
    """
    _check(images, strength)
    _check(other, strength)
    if other.shape[1:] != images.shape[1:] or not len(other):
        raise UserError(
            f"{len(other)} images of {other.shape[1:3]} for images of {images.shape[1:3]}",
            allowed="at least one, of the same height and width",
            next_step="resize them first",
        )
    places = np.random.default_rng(seed).permutation(len(images))[: round(strength * len(images))]
    mixed = images.copy()
    mixed[places] = other[places % len(other)]
    return mixed


def _check(images: Images, strength: float) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not 0 <= strength <= 1:
        raise UserError(
            f"{images.dtype} {images.shape} at strength {strength}",
            allowed="uint8 [N, H, W, 3], and a strength of 0 to 1",
            next_step="give RGB images as they come from the camera",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """What drift does to what a simulated device tells; see the module for what is assumed."""

    kind: Kind = "none"
    strength: float = 0.0
    """0 to 1."""

    def confidences(self, rng: np.random.Generator, size: int) -> Values:
        """`size` of them, 0 to 1."""
        weight = 0.0 if self.kind == "none" else self.strength
        a, b = ((1 - weight) * s + weight * d for s, d in zip(_SOUND, _DRIFTED, strict=True))
        return np.asarray(rng.beta(a, b, size))

    def labels(self, rng: np.random.Generator, size: int, classes: int) -> npt.NDArray[np.int64]:
        """Predicted classes: equally many of each, and in a new domain ever more of the first ones."""
        lean = 2.0 * self.strength if self.kind == "new_domain" else 0.0
        weights = np.exp(-lean * np.arange(classes))
        return np.asarray(rng.choice(classes, size, p=weights / weights.sum()))

    def pixels(self, rng: np.random.Generator, size: int) -> tuple[Values, Values]:
        """Mean and spread of `size` images."""
        dark = 0.8 if self.kind == "low_light" else 0.0
        mean_loss = 0.35 if self.kind == "colour_cast" else dark
        spread_loss = 0.3 if self.kind == "blur" else dark
        mean = rng.normal(*_INPUT_MEAN, size) * (1 - mean_loss * self.strength)
        spread = rng.normal(*_INPUT_STD, size) * (1 - spread_loss * self.strength)
        return np.clip(mean, 0, 255), np.clip(spread, 0, 255)


NO_DRIFT = Drift()
