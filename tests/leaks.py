"""What must not leave a device, looked for in every byte that did.

    with RecordingGateway() as gateway:
        ...                                     # whatever sends, to gateway.url
    assert_no_leak(gateway.everything(), forbidden(user="alice", serial="R58M123"), images=[image])

Text is looked for as such and in the disguises that a program puts on it without meaning to: other cases,
UTF-16, hex, base64 at any offset, percent-encoding, compressed bodies, JSON escapes, and unsalted hashes.
"""

import base64
import binascii
import contextlib
import getpass
import hashlib
import json
import re
import socket
import zlib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

import cv2
import numpy as np

_SHORTEST = 4
"""Characters of a text that is looked for: shorter ones occur by chance."""
_BASE64 = re.compile(rb"[A-Za-z0-9+/_-]{24,}")
_BY_CHANCE = 10
"""Shorter ones are looked for in text alone."""
_RUN_BYTES = 24
"""Of neighbouring pixels in a row, that cannot occur by chance."""


def forbidden(**named: str) -> dict[str, str]:
    """Texts that name this machine or its user, and the given ones."""
    texts = {"host name": socket.gethostname(), "home": str(Path.home()), "folder": str(Path.cwd()), **named}
    with contextlib.suppress(KeyError, OSError):
        texts["user name"] = getpass.getuser()
    return {name: text for name, text in texts.items() if len(text) >= _SHORTEST}


def leaks(captured: bytes, texts: dict[str, str], images: Iterable[np.ndarray] = ()) -> list[str]:
    """What of these is in the bytes, each with how it was found."""
    views = list(_views(captured))
    found = [
        f"{name}, {how}, in {view}"
        for name, text in texts.items()
        for how, needle in _disguises(text)
        for view, data in views
        if _contains(data, needle, exactly=how == "base64", in_text=len(needle) < _BY_CHANCE)
    ]
    for number, image in enumerate(images):
        needles = _pixels(image)
        found += [
            f"pixels of image {number}, in {view}" for view, data in views if any(n in data for n in needles)
        ]
    return found


def _contains(data: bytes, needle: bytes, *, exactly: bool, in_text: bool) -> bool:
    if in_text:  # so short that random bytes, or what encodes them, may hold it
        data = b"" if b"\0" in data else _BASE64.sub(b" ", data)
    return needle in data if exactly else needle.lower() in data.lower()


def assert_no_leak(captured: bytes, texts: dict[str, str], images: Iterable[np.ndarray] = ()) -> None:
    """Fails with everything that was found; bytes must have been captured."""
    assert captured, "nothing was captured: nothing was tested"
    assert leaks(captured, texts, images) == []


def _views(captured: bytes):
    """The bytes as they are, and what they decode to."""
    yield "the bytes", captured
    yield from ((f"deflate at {at}", data) for at, data in _inflated(captured))
    text = captured.decode("latin-1")
    if "\\" in text:
        yield (
            "JSON escapes",
            re.sub(r"\\u([0-9a-fA-F]{4})", lambda m: chr(int(m[1], 16)), text.replace("\\/", "/")).encode(
                "utf-8", "replace"
            ),
        )
    for match in _BASE64.finditer(captured):
        run = match[0].replace(b"-", b"+").replace(b"_", b"/")
        for skip in range(4):
            part = run[skip:]
            try:
                whole = part[:-1] if len(part) % 4 == 1 else part
                decoded = base64.b64decode(whole + b"=" * (-len(whole) % 4))
            except binascii.Error:
                continue
            yield f"base64 at {match.start()}", decoded
            yield from ((f"deflate in base64 at {match.start()}", data) for _, data in _inflated(decoded))
            if skip == 0 and (image := _decoded(decoded)) is not None:
                yield f"image in base64 at {match.start()}", image.tobytes()


def _inflated(data: bytes):
    """gzip and zlib streams anywhere."""
    starts = {m.start() for m in re.finditer(rb"\x1f\x8b\x08|\x78[\x01\x5e\x9c\xda]", data)}
    for at in sorted(starts):
        try:
            yield at, zlib.decompressobj(wbits=47).decompress(data[at:], 1 << 24)
        except zlib.error:
            continue


def _decoded(data: bytes):
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) if data else None
    return None if image is None else np.ascontiguousarray(image[..., ::-1])


def _disguises(text: str):
    raw = text.encode()
    yield "as it is", raw
    yield "UTF-16", text.encode("utf-16-le")
    yield "percent-encoded", quote(text, safe="").encode()
    yield "hex", raw.hex().encode()
    yield "reversed", raw[::-1]
    for skip in range(3):
        inner = raw[skip : skip + (len(raw) - skip) // 3 * 3]
        if len(inner) >= 6:
            yield "base64", base64.b64encode(inner)
    for algorithm in ("md5", "sha1", "sha256", "blake2b"):
        digest = hashlib.new(algorithm, raw).hexdigest()
        yield f"unsalted {algorithm}", digest[:16].encode()


def _pixels(image: np.ndarray) -> list[bytes]:
    """Runs of neighbouring pixels that are not flat, in RGB and in BGR."""
    found = []
    for ordered in (image, image[..., ::-1]):
        for row in ordered[:: max(1, len(ordered) // 8)]:
            run = np.ascontiguousarray(row).tobytes()[:_RUN_BYTES]
            if len(set(run)) > 4:
                found.append(run)
    assert found, "the image is flat: its pixels cannot be told from others"
    return found


def json_keys(body: bytes) -> set[str]:
    """Every key in a JSON body, as a path."""

    def walk(value, at):
        if isinstance(value, dict):
            for key, inner in value.items():
                yield f"{at}{key}"
                yield from walk(inner, f"{at}{key}.")

    return set(walk(json.loads(body), ""))
