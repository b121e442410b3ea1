"""How other programs turn an image into a model input: the steps that commonly differ, each variant by name.

A `Pipeline` is one choice for each step. The contract in `fleet.device.preprocess` is one of them; what a
training script or an app does is another, and the steps in which the two differ are the mismatch.
"""

import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from PIL import Image

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.data.decode import Unusable, decode

Pixels = npt.NDArray[np.uint8]
"""uint8 RGB [H, W, 3]."""
Tensor = npt.NDArray[Any]
Picture = Pixels | bytes
"""Decoded pixels, or the bytes of an image file, of which the decoder is one more step."""
_Resize = Callable[[Pixels, tuple[int, int]], Pixels]  # (image, (width, height))
_ORIENTATION = 0x0112  # EXIF tag; 1: as stored


@dataclass(frozen=True, kw_only=True)
class Normalization:
    """Pixel values 0..255 times `scale` plus `offset`, per channel in the model's colour order."""

    name: str
    scale: tuple[float, ...]
    offset: tuple[float, ...]

    @property
    def formula(self) -> str:
        """How to compute it."""
        std = 1 / (255 * np.asarray(self.scale))
        mean = -np.asarray(self.offset) * std
        return f"(pixel / 255 - {_numbers(mean)}) / {_numbers(std)}"

    def apply(self, pixels_HWC: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        """[H, W, 3] -> float64 [H, W, 3]."""
        out: npt.NDArray[np.float64] = pixels_HWC * np.asarray(self.scale) + np.asarray(self.offset)
        return out


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """One named choice for each step from image file to model input."""

    size_px: int
    decoder: str
    crop: str
    resize: str
    color_order: str
    normalization: Normalization
    layout: str

    def pixels(self, picture: Picture) -> Pixels:
        """The geometric part: uint8 RGB [size_px, size_px, 3]."""
        image = DECODERS[self.decoder](picture) if isinstance(picture, bytes) else picture
        return CROPS[self.crop](image, self.size_px, RESIZERS[self.resize])

    def apply(self, picture: Picture) -> npt.NDArray[np.float32]:
        """The model input; the shape is that of the layout."""
        return self.pack(self.pixels(picture))

    def pack(self, pixels: Pixels) -> npt.NDArray[np.float32]:
        """The model input from the geometric part's pixels."""
        ordered = pixels if self.color_order == "RGB" else pixels[..., ::-1]
        return LAYOUTS[self.layout].pack(self.normalization.apply(ordered).astype(np.float32))

    def differences(self, claimed: "Pipeline") -> tuple[str, ...]:
        """The steps that are not as claimed, named: `colour order BGR instead of RGB`."""
        return tuple(
            f"{STEPS[field.name]} {label(mine)} instead of {label(theirs)}"
            for field in fields(self)
            if (mine := getattr(self, field.name)) != (theirs := getattr(claimed, field.name))
        )


STEPS = {
    "size_px": "input size",
    "decoder": "decoder",
    "crop": "crop",
    "resize": "resize filter",
    "color_order": "colour order",
    "normalization": "normalisation",
    "layout": "layout",
}
"""The fields of `Pipeline` in the words of messages."""
GEOMETRY = ("decoder", "crop", "resize")
"""Steps that change pixels, and accuracy by little; the others change what the numbers mean."""


def claimed_pipeline(preprocess: Preprocess) -> Pipeline:
    """The pipeline that the contract describes; image files are decoded as the prepare stage does."""
    return Pipeline(
        size_px=preprocess.size_px,
        decoder="Pillow",
        crop="centre square",
        resize=preprocess.interpolation,
        color_order=preprocess.color_order,
        normalization=_normalization(preprocess.mean, preprocess.std),
        layout=preprocess.layout,
    )


def alternatives(claimed: Pipeline, *records: Preprocess, encoded: bool) -> Iterator[tuple[str, Pipeline]]:
    """(field, pipeline) for every pipeline that differs from the claimed one in a single step.

    Args:
        claimed: From `claimed_pipeline`, or one that differs from it.
        records: Whose mean and std are tried too, of the first also the usual mistakes with them.
        encoded: Whether pictures are image files, so that decoders can differ.
    """
    shape = LAYOUTS[claimed.layout].same_shape_as
    choices: dict[str, list[Any]] = {
        "decoder": list(DECODERS) if encoded else [],
        "crop": list(CROPS),
        "resize": list(RESIZERS),
        "color_order": ["RGB", "BGR"],
        "normalization": normalizations(*records),
        "layout": [name for name in LAYOUTS if LAYOUTS[name].same_shape_as == shape],
    }
    for step, values in choices.items():
        for value in values:
            if value != getattr(claimed, step):
                yield step, replace(claimed, **{step: value})


_NONE, _ONE, _PER_255 = (0.0,) * 3, (1.0,) * 3, (1 / 255,) * 3
_USUAL = {
    "0..1 without mean and std": (_NONE, _ONE),
    "0..255 without scaling": (_NONE, _PER_255),
    "-1..1 (mean and std 0.5)": ((0.5,) * 3, (0.5,) * 3),
    "ImageNet's mean and std": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CIFAR-10's mean and std": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}
"""Mean and std on the 0..1 scale that many training scripts and apps use."""


def normalizations(*records: Preprocess) -> list[Normalization]:
    """The usual normalisations, those of the records, and the usual mistakes with the first of these."""
    found = [_normalization(mean, std) for mean, std in _USUAL.values()]
    found += [_normalization(record.mean, record.std) for record in records]
    found += _mistakes(records[0].mean, records[0].std)
    distinct: list[Normalization] = []
    for entry in found:
        if not any(_same(entry, other) for other in distinct):
            distinct.append(entry)
    return distinct


def _mistakes(mean: tuple[float, ...], std: tuple[float, ...]) -> Iterator[Normalization]:
    scaled = np.asarray(mean) * 255
    yield _mean_std("mean without std", mean, _ONE)
    yield _mean_std("std without mean", _NONE, std)
    yield _mean_std("mean and std in the other colour order", mean[::-1], std[::-1])
    yield _mean_std("mean subtracted on 0..255, no std", mean, _PER_255)
    yield Normalization(
        name="mean and std of 0..1 on pixels of 0..255",
        scale=tuple(1 / s for s in std),
        offset=tuple(-m / s for m, s in zip(mean, std, strict=True)),
    )
    yield Normalization(
        name="divided by 255 twice",
        scale=tuple(1 / (255 * 255 * s) for s in std),
        offset=tuple(-m / (255 * 255 * s) for m, s in zip(scaled, std, strict=True)),
    )


def _normalization(mean: tuple[float, ...], std: tuple[float, ...]) -> Normalization:
    """A mean and std, by the name that people know them by where there is one."""
    plain = _mean_std(f"mean {_numbers(mean)} and std {_numbers(std)}", mean, std)
    usual = (_mean_std(name, *values) for name, values in _USUAL.items())
    return next((known for known in usual if _same(known, plain)), plain)


def _same(one: Normalization, two: Normalization) -> bool:
    return np.allclose((one.scale, one.offset), (two.scale, two.offset), rtol=1e-6, atol=1e-12)


@dataclass(frozen=True)
class LayoutRule:
    """How [H, W, 3] becomes a tensor and back."""

    same_shape_as: str
    """NCHW or NHWC: the layout whose shape the tensor has."""
    pack: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
    unpack: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


def _nchw(x_HWC: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(x_HWC.transpose(2, 0, 1)[None])


LAYOUTS = {
    "NCHW": LayoutRule("NCHW", _nchw, lambda t: t[0].transpose(1, 2, 0)),
    "NHWC": LayoutRule("NHWC", lambda x: x[None], lambda t: t[0]),
    "NHWC values in an NCHW tensor": LayoutRule(
        "NCHW",
        lambda x: np.ascontiguousarray(x).reshape(1, 3, *x.shape[:2]),
        lambda t: np.ascontiguousarray(t).reshape(*t.shape[2:], 3),
    ),
    "NCHW values in an NHWC tensor": LayoutRule(
        "NHWC",
        lambda x: _nchw(x).reshape(1, *x.shape),
        lambda t: np.ascontiguousarray(t).reshape(3, *t.shape[1:3]).transpose(1, 2, 0),
    ),
    "NCWH (rows and columns swapped)": LayoutRule(
        "NCHW", lambda x: _nchw(x.transpose(1, 0, 2)), lambda t: t[0].transpose(2, 1, 0)
    ),
}


def _decode_as_prepare(data: bytes) -> Pixels:
    decoded = decode(data)
    if isinstance(decoded, Unusable):
        raise UserError(
            f"an image file that is {decoded.kind}: {decoded.reason}",
            allowed="images that open",
            next_step="leave the file out",
        )
    return decoded.image


def _decode_unrotated(data: bytes) -> Pixels:
    with Image.open(io.BytesIO(data)) as image:
        if image.getexif().get(_ORIENTATION, 1) == 1:
            return _decode_as_prepare(data)
        return np.asarray(image.convert("RGB"))


def _decode_opencv(data: bytes) -> Pixels:
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise UserError(
            "an image file that OpenCV cannot decode",
            allowed="JPEG, PNG and the like",
            next_step="pass decoded pixels instead",
        )
    return np.ascontiguousarray(image[..., ::-1]).astype(np.uint8, copy=False)


DECODERS: dict[str, Callable[[bytes], Pixels]] = {
    "Pillow": _decode_as_prepare,
    "OpenCV": _decode_opencv,
    "Pillow without EXIF rotation": _decode_unrotated,
}


def _cv2_resize(interpolation: int) -> _Resize:
    def resize(image: Pixels, size: tuple[int, int]) -> Pixels:
        return np.asarray(
            cv2.resize(np.ascontiguousarray(image), size, interpolation=interpolation), np.uint8
        )

    return resize


def _pillow_resize(resample: Image.Resampling) -> _Resize:
    def resize(image: Pixels, size: tuple[int, int]) -> Pixels:
        return np.asarray(Image.fromarray(image).resize(size, resample))

    return resize


RESIZERS: dict[str, _Resize] = {
    "area": _cv2_resize(cv2.INTER_AREA),
    "bilinear": _cv2_resize(cv2.INTER_LINEAR),
    "nearest": _cv2_resize(cv2.INTER_NEAREST),
    "bicubic": _cv2_resize(cv2.INTER_CUBIC),
    "antialiased bilinear (Pillow, torchvision)": _pillow_resize(Image.Resampling.BILINEAR),
    "antialiased bicubic (Pillow, torchvision)": _pillow_resize(Image.Resampling.BICUBIC),
}


def _centre(image: Pixels, side: int) -> Pixels:
    top, left = (image.shape[0] - side) // 2, (image.shape[1] - side) // 2
    return image[top : top + side, left : left + side]


def _crop_square(image: Pixels, size: int, resize: _Resize) -> Pixels:
    return resize(_centre(image, min(image.shape[:2])), (size, size))


def _crop_squash(image: Pixels, size: int, resize: _Resize) -> Pixels:
    return resize(image, (size, size))


def _crop_inner(image: Pixels, size: int, resize: _Resize) -> Pixels:
    """As torchvision evaluates: short side to size * 256 / 224, then the central square."""
    height, width = image.shape[:2]
    factor = round(size * 256 / 224) / min(height, width)
    return _centre(resize(image, (max(size, int(width * factor)), max(size, int(height * factor)))), size)


def _crop_letterbox(image: Pixels, size: int, resize: _Resize) -> Pixels:
    height, width = image.shape[:2]
    factor = size / max(height, width)
    inner = resize(image, (max(1, round(width * factor)), max(1, round(height * factor))))
    out = np.zeros((size, size, 3), np.uint8)
    top, left = (size - inner.shape[0]) // 2, (size - inner.shape[1]) // 2
    out[top : top + inner.shape[0], left : left + inner.shape[1]] = inner
    return out


CLOSER_CROP = "central 224/256 (torchvision)"
CROPS: dict[str, Callable[[Pixels, int, _Resize], Pixels]] = {
    "centre square": _crop_square,
    "none, stretched to a square": _crop_squash,
    CLOSER_CROP: _crop_inner,
    "none, letterboxed": _crop_letterbox,
}


def _mean_std(name: str, mean: tuple[float, ...], std: tuple[float, ...]) -> Normalization:
    return Normalization(
        name=name,
        scale=tuple(1 / (255 * s) for s in std),
        offset=tuple(-m / s for m, s in zip(mean, std, strict=True)),
    )


def _numbers(values: Iterable[float]) -> str:
    return "(" + ", ".join(f"{value:.4g}" for value in values) + ")"


def label(value: object) -> str:
    """One choice for a step, in words."""
    return value.name if isinstance(value, Normalization) else str(value)
