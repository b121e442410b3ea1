"""Image files to uint8 RGB, or a reason why not.

Pillow decodes rather than OpenCV: it applies the EXIF orientation on request, undoes Adobe's inverted CMYK,
keeps alpha and palette apart, and says when a file is truncated or animated. The device decodes its own
camera frames, so the preprocess contract begins after this step. Colour profiles are not applied.

Bit rot inside a JPEG that still decodes cannot be told from a picture: the format has no check sums.
"""

import io
import struct
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

DecodeRefusal = Literal[
    "empty", "not_an_image", "corrupt", "too_small", "too_large", "animated", "unsupported_mode"
]
Handled = Literal["greyscale", "cmyk", "palette", "sixteen_bit", "alpha", "exif_rotated", "multi_picture"]
HANDLED: tuple[Handled, ...] = get_args(Handled)

MAX_PIXELS = 2**30 // 12
"""89 megapixels, Pillow's own limit: a small file that claims more is taken for a decompression bomb."""
MAX_FILE_BYTES = 2**28
"""256 MiB, three bytes for each of MAX_PIXELS: no image that is accepted needs more."""

# Formats cameras and exports produce. EPS and the like are left out: reading them starts other programs.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")
# A JPEG with more pictures behind the first, which is the photograph; they are previews or a gain map.
_SEVERAL_PICTURES = "MPO"
_ORIENTATION = 0x0112  # EXIF tag; 2 to 8 are turns and mirrors
_HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"mif1", b"msf1")
_CONVERTED: dict[str, Handled] = {
    "CMYK": "cmyk",
    "P": "palette",
    "PA": "palette",
    "1": "greyscale",
    "L": "greyscale",
    "LA": "greyscale",
}
# What Pillow's parsers raise on damaged files. The first four came up in 60,000 fuzzed ones; the others are
# what reading a damaged field in Python can raise.
_PARSER_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    SyntaxError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    struct.error,
)


@dataclass(frozen=True)
class Decoded:
    """A picture as the preprocess contract wants it."""

    image: npt.NDArray[np.uint8]
    """uint8 RGB [H, W, 3], upright."""
    handled: tuple[Handled, ...]
    """What had to be converted on the way."""


@dataclass(frozen=True)
class Unusable:
    """Why a file is no usable picture."""

    kind: DecodeRefusal
    reason: str


def decode(data: bytes, *, min_side_px: int = 1) -> Decoded | Unusable:
    """Decode one file's bytes.

    Args:
        data: The whole file.
        min_side_px: The shorter side an image must have, in pixels.

    Returns:
        The upright uint8 RGB picture, or why the file is refused. Grey becomes three equal channels, 16 bits
        are rounded to 8, transparency is laid over white.
    """
    if not data:
        return Unusable("empty", "the file has no bytes")
    try:
        picture: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
        refused = _check(picture, min_side_px)
        if refused:
            return refused
        if (
            picture.format == "PNG"
        ):  # loading does not check the sums of the pixel chunks; verifying closes the file
            picture.verify()
            picture = Image.open(io.BytesIO(data), formats=_FORMATS)
        picture.load()
        upright = ImageOps.exif_transpose(picture)
        rotated = picture.getexif().get(_ORIENTATION, 1) in range(2, 9)
    except Image.DecompressionBombError as error:
        return Unusable("too_large", str(error))
    except UnidentifiedImageError:
        return Unusable("not_an_image", _unknown(data))
    except _PARSER_ERRORS as error:
        return Unusable("corrupt", f"{type(error).__name__}: {error}")
    handled: list[Handled] = ["multi_picture"] if picture.format == _SEVERAL_PICTURES else []
    return _to_rgb(upright, picture.mode, [*handled, "exif_rotated"] if rotated else handled)


def _check(picture: Image.Image, min_side_px: int) -> Unusable | None:
    width, height = picture.size
    if width * height > MAX_PIXELS:
        return Unusable("too_large", f"{width} x {height} px; at most {MAX_PIXELS // 10**6} megapixels")
    if min(width, height) < min_side_px:
        return Unusable("too_small", f"{width} x {height} px; the shorter side must have {min_side_px}")
    if getattr(picture, "is_animated", False) and picture.format != _SEVERAL_PICTURES:
        return Unusable("animated", f"several frames in one {picture.format} file: which one is the picture?")
    return None


def _to_rgb(upright: Image.Image, mode: str, handled: list[Handled]) -> Decoded | Unusable:
    if mode.startswith("I;16"):
        deep = np.asarray(upright).astype(np.uint32)
        grey = ((deep + 128) // 257).astype(np.uint8)  # 65,535 becomes 255, rounded
        return Decoded(np.repeat(grey[..., None], 3, axis=2), (*handled, "sixteen_bit", "greyscale"))
    if mode in {"I", "F"}:
        return Unusable("unsupported_mode", f"{mode}: 32 bits a pixel have no agreed white")
    if mode in _CONVERTED:
        handled.append(_CONVERTED[mode])
    if upright.has_transparency_data:
        handled.append("alpha")
        upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA"))
    return Decoded(np.array(upright.convert("RGB")), tuple(handled))


def _unknown(data: bytes) -> str:
    if data[4:8] == b"ftyp" and data[8:12] in _HEIC_BRANDS:
        return "HEIC, which is not decoded here: export it as JPEG"
    return f"no picture format known here begins with {data[:8]!r}"
