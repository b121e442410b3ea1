"""Every kind of odd or broken image file is turned into the right pixels or refused by name."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tasks.data.decode import Decoded, Unusable, decode


def _decoded(data: bytes) -> Decoded:
    result = decode(data)
    assert isinstance(result, Decoded), result
    assert result.image.dtype == np.uint8
    assert result.image.ndim == 3
    return result


def _refused(data: bytes, **options) -> Unusable:
    result = decode(data, **options)
    assert isinstance(result, Unusable)
    assert result.reason
    return result


def test_rgb_comes_back_unchanged(pixels, image_file):
    """A lossless RGB file is its own pixels, red first."""
    red = np.zeros((4, 5, 3), np.uint8)
    red[..., 0] = 255
    assert np.array_equal(_decoded(image_file(red)).image, red)
    picture = pixels(1)
    result = _decoded(image_file(picture))
    assert np.array_equal(result.image, picture)
    assert result.handled == ()


def test_greyscale_becomes_three_equal_channels(image_file):
    """Grey levels are kept, not stretched."""
    grey = np.arange(0, 240, 10, dtype=np.uint8).reshape(4, 6)
    result = _decoded(image_file(Image.fromarray(grey)))
    assert np.array_equal(result.image, np.dstack([grey] * 3))
    assert result.handled == ("greyscale",)


def test_one_bit_is_black_and_white(image_file):
    """Bilevel scans become 0 and 255."""
    bits = np.array([[True, False], [False, True]])
    assert np.array_equal(_decoded(image_file(Image.fromarray(bits))).image[..., 1], bits * np.uint8(255))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bit_is_scaled_not_clipped(image_file, kind):
    """65,535 is white and the middle stays the middle; Pillow's own conversion would clip both to 255."""
    deep = np.array([[0, 257, 32768, 65535]], np.uint16)
    result = _decoded(image_file(Image.fromarray(deep), kind))
    assert result.image[0, :, 0].tolist() == [0, 1, 128, 255]
    assert result.handled == ("sixteen_bit", "greyscale")


def test_cmyk_jpeg_has_the_colours_of_the_print(image_file):
    """Cyan ink without others is cyan light, also in the inverted form Adobe writes."""
    inks = np.zeros((16, 16, 4), np.uint8)
    inks[..., 0] = 255
    result = _decoded(image_file(Image.fromarray(inks, "CMYK"), "JPEG", quality=95))
    assert np.abs(result.image.astype(int) - [0, 255, 255]).max() <= 3
    assert result.handled == ("cmyk",)


def test_palette_is_looked_up(image_file):
    """Palette indices are not taken for grey levels."""
    picture = Image.new("P", (3, 2), 1)
    picture.putpalette([9, 9, 9, 200, 30, 40])
    result = _decoded(image_file(picture))
    assert result.image[0, 0].tolist() == [200, 30, 40]
    assert result.handled == ("palette",)


@pytest.mark.parametrize(
    ("mode", "colour", "expected"),
    [
        ("RGBA", (255, 0, 0, 0), [255, 255, 255]),
        ("RGBA", (255, 0, 0, 255), [255, 0, 0]),
        ("RGBA", (0, 0, 0, 51), [204, 204, 204]),
        ("LA", (0, 0), [255, 255, 255]),
    ],
)
def test_transparency_lies_over_white(image_file, mode, colour, expected):
    """Colours hidden under full transparency never reach a model."""
    result = _decoded(image_file(Image.new(mode, (4, 4), colour)))
    assert result.image[0, 0].tolist() == expected
    assert result.handled[-1] == "alpha"


def test_transparent_palette_entry_lies_over_white(image_file):
    """A palette entry marked transparent is white, not its hidden colour."""
    picture = Image.new("P", (4, 4), 0)
    picture.putpalette([10, 200, 10, 0, 0, 0])
    result = _decoded(image_file(picture, "PNG", transparency=0))
    assert result.image[0, 0].tolist() == [255, 255, 255]
    assert result.handled == ("palette", "alpha")


@pytest.mark.parametrize(
    ("orientation", "turn"),
    [
        (1, lambda a: a),
        (3, lambda a: a[::-1, ::-1]),
        (6, lambda a: np.rot90(a, -1)),
        (8, lambda a: np.rot90(a, 1)),
    ],
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_exif_orientation_is_applied(pixels, image_file, orientation, turn, kind):
    """A phone's sideways photo is upright, with width and height exchanged."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = pixels(2, 40, 24)
    result = _decoded(image_file(stored, kind, exif=exif, quality=100))
    assert result.image.shape == turn(stored).shape
    assert np.abs(result.image.astype(int) - turn(stored)).mean() < 6
    assert result.handled == (("exif_rotated",) if orientation > 1 else ())


def test_multi_picture_jpeg_is_its_first_picture(pixels, image_file):
    """A phone's JPEG with a second picture (MPO) is the photograph, not refused as animated."""
    first, second = Image.fromarray(pixels(3)), Image.fromarray(pixels(4))
    data = image_file(first, "MPO", save_all=True, append_images=[second], quality=95)
    result = _decoded(data)
    assert np.abs(result.image.astype(int) - pixels(3)).mean() < 6
    assert result.handled == ("multi_picture",)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animation_is_refused(pixels, image_file, kind):
    """Several frames or pages: nothing says which one is the picture."""
    frames = [Image.fromarray(pixels(seed)) for seed in range(3)]
    data = image_file(frames[0], kind, save_all=True, append_images=frames[1:])
    assert _refused(data).kind == "animated"


def test_single_frame_gif_is_accepted(pixels, image_file):
    """A GIF is not refused for being one."""
    assert _decoded(image_file(pixels(5), "GIF")).image.shape == (30, 40, 3)


def test_empty_file_is_refused():
    """No bytes, no picture."""
    assert _refused(b"").kind == "empty"


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "AVIF"])
@pytest.mark.parametrize("share", [0.5, 0.9])
def test_truncated_file_is_refused(pixels, image_file, kind, share):
    """A picture cut off in transfer is never completed with grey."""
    data = image_file(pixels(6, 200, 150), kind)
    assert _refused(data[: int(len(data) * share)]).kind in {"corrupt", "not_an_image"}


def test_damaged_png_is_refused(pixels, image_file):
    """A flipped bit fails the checksum of its chunk."""
    data = bytearray(image_file(pixels(7)))
    data[len(data) // 2] ^= 0xFF
    assert _refused(bytes(data)).kind == "corrupt"


@pytest.mark.parametrize("data", [b"<html>404</html>", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"\x00" * 100])
def test_what_is_no_picture_is_refused(data):
    """A web page under a .jpg name, and PostScript, whose reading would start another program."""
    assert _refused(data).kind == "not_an_image"


def test_heic_is_refused_with_the_way_out():
    """iPhone photos are the likeliest refusal of all: the reason says what to do."""
    assert "export it as JPEG" in _refused(b"\x00\x00\x00\x18ftypheic" + b"\x00" * 40).reason


def test_tiny_image_is_refused_by_its_shorter_side(image_file):
    """1 x 1 tracking pixels and slivers are no pictures."""
    assert _refused(image_file(Image.new("RGB", (1, 1))), min_side_px=8).kind == "too_small"
    assert _refused(image_file(Image.new("RGB", (500, 7))), min_side_px=8).kind == "too_small"
    assert isinstance(decode(image_file(Image.new("RGB", (8, 8))), min_side_px=8), Decoded)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 60_000])
def test_decompression_bomb_is_refused_unread(side):
    """Kilobytes that claim to be hundreds of megapixels, under and over Pillow's own error limit."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    body = b"".join(
        struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in chunks
    )
    assert _refused(b"\x89PNG\r\n\x1a\n" + body).kind == "too_large"


def test_float_tiff_is_refused():
    """32 bits a pixel have no agreed white: a guess would be silently wrong."""
    stream = io.BytesIO()
    Image.fromarray(np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)).save(stream, "TIFF")
    assert _refused(stream.getvalue()).kind == "unsupported_mode"


@pytest.mark.filterwarnings("ignore")
def test_random_damage_never_escapes(pixels, image_file):
    """Whatever is broken in a file, the answer is a picture or a reason."""
    rng = np.random.default_rng(8)
    exif = Image.Exif()
    exif[0x0112] = 6
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "AVIF"):
        whole = np.frombuffer(image_file(pixels(9), kind, exif=exif), np.uint8)
        for _ in range(60):
            data = whole[: rng.integers(1, len(whole) + 1)].copy()
            data[rng.integers(0, len(data), 6)] = rng.integers(0, 256, 6)
            assert isinstance(decode(data.tobytes()), Decoded | Unusable)
