"""The check for leaks finds each disguise, and nothing where there is nothing."""

import base64
import gzip
import hashlib
import json
import zlib
from urllib.parse import quote

import cv2
import numpy as np
import pytest
from leaks import assert_no_leak, forbidden, leaks

SECRET = "alice@phone-7"
TEXTS = {"user": SECRET}
IMAGE = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)


def png(image):
    return cv2.imencode(".png", image[..., ::-1])[1].tobytes()


@pytest.mark.parametrize(
    "wrapped",
    [
        SECRET.encode(),
        b"GET /?u=" + quote(SECRET, safe="").encode(),
        SECRET.upper().encode(),
        SECRET.encode("utf-16-le"),
        SECRET.encode().hex().encode(),
        gzip.compress(json.dumps({"u": SECRET}).encode()),
        b"head\r\n\r\n" + zlib.compress(SECRET.encode() * 3),
        base64.b64encode(b"x" + SECRET.encode() + b"yz"),
        base64.b64encode(b"xy" + SECRET.encode()),
        base64.b64encode(gzip.compress(SECRET.encode() * 9)),
        json.dumps({"u": "".join(f"\\u{ord(c):04x}" for c in SECRET)}).replace("\\\\", "\\").encode(),
        hashlib.sha256(SECRET.encode()).hexdigest().encode(),
        hashlib.md5(SECRET.encode()).hexdigest().upper().encode(),
    ],
)
def test_a_text_is_found(wrapped):
    """In whatever a program makes of it."""
    assert leaks(b"before " + wrapped + b" after", TEXTS)


@pytest.mark.parametrize(
    "wrapped",
    [
        IMAGE.tobytes(),
        IMAGE[..., ::-1].tobytes(),
        gzip.compress(IMAGE.tobytes()),
        base64.b64encode(IMAGE.tobytes()),
        b'{"image_png":"' + base64.b64encode(png(IMAGE)) + b'"}',
    ],
)
def test_pixels_are_found(wrapped):
    """Raw, compressed, and in an encoded picture."""
    assert leaks(wrapped, {}, [IMAGE])


def test_nothing_is_found_in_what_is_clean():
    """Another text and another picture are no leak."""
    other = np.random.default_rng(1).integers(0, 256, (32, 32, 3), np.uint8)
    clean = b"bob@phone-8 " + base64.b64encode(png(other)) + gzip.compress(b"carol" * 99)
    assert_no_leak(clean, TEXTS, [IMAGE])


def test_a_short_name_in_text_is_found_and_by_chance_in_base64_is_not():
    """Four letters are somewhere in every picture."""
    assert leaks(b'{"u":"Root"}', {"user": "root"})
    assert leaks(gzip.compress(b'{"u":"root"}'), {"user": "root"})
    assert not leaks(b'{"image_png":"' + b"A" * 30 + b"root" + b"A" * 30 + b'"}', {"user": "root"})


def test_an_empty_capture_proves_nothing():
    """It fails."""
    with pytest.raises(AssertionError, match="nothing was captured"):
        assert_no_leak(b"", TEXTS)


def test_what_is_forbidden_by_itself():
    """The host's name, the home and the folder; the given ones beside."""
    texts = forbidden(serial="R58M123")
    assert texts["serial"] == "R58M123"
    assert "folder" in texts
