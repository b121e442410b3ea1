"""The preprocess contract: one record, one implementation, for training, calibration, parity and the field.

Shape letters: N batch, H height, W width, C channels.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

import cv2
import numpy as np
import numpy.typing as npt

from fleet.device.errors import UserError

Interpolation = Literal["area", "bilinear"]
ColorOrder = Literal["RGB", "BGR"]
Layout = Literal["NCHW", "NHWC"]

# Area averages when shrinking; OpenCV falls back to bilinear weights when it enlarges.
_CV2_INTERPOLATION = {"area": cv2.INTER_AREA, "bilinear": cv2.INTER_LINEAR}


@dataclass(frozen=True, kw_only=True)
class Preprocess:
    """How an image becomes a model input; every variant carries its `digest()`.

    The steps, in order: centre square crop, resize to `size_px`, colour order, scale to 0..1,
    subtract `mean`, divide by `std` (both in `color_order`), layout.
    """

    size_px: int
    """Side of the square model input in pixels."""
    interpolation: Interpolation = "area"
    """Resize filter: area (anti-aliased when shrinking) or bilinear."""
    color_order: ColorOrder = "RGB"
    """Channel order the model expects."""
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Per-channel mean on the 0..1 scale, in `color_order`; the default is ImageNet's."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    """Per-channel standard deviation on the 0..1 scale, in `color_order`."""
    layout: Layout = "NCHW"
    """Axis order of the model input."""
    dtype: Literal["float32"] = "float32"
    """Element type of the model input."""

    def __post_init__(self) -> None:
        for field, value, allowed in (
            ("interpolation", self.interpolation, get_args(Interpolation)),
            ("color_order", self.color_order, get_args(ColorOrder)),
            ("layout", self.layout, get_args(Layout)),
            ("dtype", self.dtype, ("float32",)),
        ):
            if value not in allowed:
                raise UserError(
                    f"preprocess.{field} = {value!r}",
                    allowed=", ".join(allowed),
                    next_step=f"set {field} to one of these",
                )
        numbers = (*self.mean, *self.std)
        if (
            not 1 <= self.size_px <= 4096
            or len(self.mean) != 3
            or len(self.std) != 3
            or not all(np.isfinite(numbers))
            or min(self.std) <= 0
        ):
            raise UserError(
                f"preprocess size_px={self.size_px} mean={self.mean} std={self.std}",
                allowed="size_px 1..4096, three finite means, three positive finite stds",
                next_step="correct the preprocess record",
            )

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able record with sorted, complete fields."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in sorted(asdict(self).items())}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Preprocess":
        """Rebuild from `to_dict()`; unknown or missing fields raise UserError."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
        try:
            return cls(**fields)
        except TypeError as error:
            raise UserError(
                f"preprocess record {sorted(record)}: {error}",
                allowed=f"exactly {sorted(cls.__dataclass_fields__)}",
                next_step="rebuild the model card with this version of edgeloop",
            ) from error

    def digest(self) -> str:
        """SHA-256 of the canonical JSON: equal digests mean equal pixels."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        """Shape of one input: (1, 3, H, W) or (1, H, W, 3)."""
        s = self.size_px
        return (1, 3, s, s) if self.layout == "NCHW" else (1, s, s, 3)

    def resize(self, image_HWC: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Centre square crop and resize: uint8 RGB [H, W, 3] -> uint8 RGB [size_px, size_px, 3]."""
        height, width = image_HWC.shape[:2]
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        square = image_HWC[top : top + side, left : left + side]
        if side == self.size_px:
            return square
        resized = cv2.resize(
            np.ascontiguousarray(square),
            (self.size_px, self.size_px),
            interpolation=_CV2_INTERPOLATION[self.interpolation],
        )
        return cast("npt.NDArray[np.uint8]", resized)

    def normalize(self, images_NHWC: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Colour order, scale, mean/std and layout: uint8 RGB [N, H, W, 3] -> float32 in `layout`."""
        ordered = images_NHWC if self.color_order == "RGB" else images_NHWC[..., ::-1]
        # One fused multiply-add in float32: scale and offset are rounded once, here, for every user.
        std = np.asarray(self.std, np.float64)
        scale = (1 / (255 * std)).astype(np.float32)
        offset = (-np.asarray(self.mean, np.float64) / std).astype(np.float32)
        out = ordered.astype(np.float32) * scale + offset
        return np.ascontiguousarray(out.transpose(0, 3, 1, 2)) if self.layout == "NCHW" else out

    def apply(self, image_HWC: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """One uint8 RGB image [H, W, 3] of any size -> one model input, shape `input_shape`."""
        if (
            image_HWC.dtype != np.uint8
            or image_HWC.ndim != 3
            or image_HWC.shape[2] != 3
            or 0 in image_HWC.shape
        ):
            raise UserError(
                f"image with shape {image_HWC.shape} and dtype {image_HWC.dtype}",
                allowed="uint8 RGB, shape [H, W, 3], H and W at least 1",
                next_step="decode the image to 8-bit RGB first",
            )
        return self.normalize(self.resize(image_HWC)[None])

    def batch(self, images_HWC: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.float32]:
        """Several uint8 RGB images of any sizes -> one batch in `layout`."""
        return self.normalize(np.stack([self.resize(image) for image in images_HWC]))
