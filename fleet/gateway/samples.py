"""Raw inputs that users let go, laid out as in an object store; all of a device's can be deleted.

samples/DEVICE/YYYY/MM/DD/SHA256.png    the image as sent
samples/DEVICE/YYYY/MM/DD/SHA256.json   its context
"""

import asyncio
import hashlib
import shutil
import sqlite3
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec

from fleet.device.durable import sync
from fleet.device.wire import SCHEMA, Sample
from fleet.gateway import parts
from fleet.gateway.devices import Device, claim
from fleet.gateway.refusal import Refusal, shown
from fleet.gateway.store import Store

FOLDER = "samples"
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_SIDE_PX = 8_192
_TEXT_CHARACTERS = 256


def read(body: bytes) -> Sample:
    """The sample in a request's body.

    Raises:
        Refusal: 400, it is none or of an unknown schema; 403, without consent; 415, not a PNG.
    """
    try:
        sample = msgspec.json.decode(body, type=Sample)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _bad(shown(str(error))) from error
    if sample.schema != SCHEMA:
        raise _bad(f"schema {sample.schema}")
    if len(sample.reason) > _TEXT_CHARACTERS:
        raise _bad(f"a reason of {len(sample.reason)} characters")
    if not sample.consent:
        raise Refusal(
            403,
            "consent",
            "a sample without its user's consent",
            allowed="consent: true, set by the user",
            next_step="keep the image on the device",
        )
    _check_png(sample.image_png)
    return sample


def _bad(got: str) -> Refusal:
    return Refusal(
        400,
        "sample",
        got,
        allowed=f"a JSON sample of schema {SCHEMA}, its image as base64",
        next_step="mend what serialises it",
    )


def _check_png(image: bytes) -> None:
    """By its header alone: what it says of its size decides how much memory decoding takes."""
    width, height = int.from_bytes(image[16:20]), int.from_bytes(image[20:24])
    is_png = image.startswith(_PNG) and image[12:16] == b"IHDR"
    if not (is_png and 1 <= width <= _MOST_SIDE_PX and 1 <= height <= _MOST_SIDE_PX):
        raise Refusal(
            415,
            "image",
            f"{len(image)} bytes that are no PNG of a usable size",
            allowed=f"a PNG of at most {_MOST_SIDE_PX} px a side",
            next_step="encode the image as PNG",
        )


class Samples:
    """The samples below a state folder."""

    def __init__(self, folder: Path, store: Store, *, most_bytes: int) -> None:
        """Keep at most `most_bytes` of a device."""
        self._folder, self._store, self._most_bytes = folder, store, most_bytes
        self._one_at_a_time = asyncio.Lock()  # a deletion does not overtake an upload

    async def keep(self, device: Device, sample: Sample, *, time_ms: int, nonce: str, now_ms: int) -> str:
        """Store a sample durably; its name. The same image again changes nothing.

        Raises:
            Refusal: 409, a replay; 429, the device has sent too much; 503, the disk does not take it.
        """
        name = hashlib.sha256(sample.image_png).hexdigest()
        day = datetime.fromtimestamp(now_ms / 1000, UTC).strftime("%Y/%m/%d")
        path = f"{FOLDER}/{device.device}/{day}/{name}"
        async with self._one_at_a_time:
            begin = partial(
                _begin, device=device.number, time_ms=time_ms, nonce=nonce, sha256=name, most=self._most_bytes
            )
            if await self._store.run(begin):
                return name
            await asyncio.to_thread(_write, self._folder, path, sample)
            size = len(sample.image_png)
            await self._store.run(
                lambda connection: (
                    connection.execute(
                        "INSERT INTO samples VALUES(?, ?, ?, ?, ?)", (device.number, name, path, now_ms, size)
                    ).rowcount
                )
            )
        return name

    async def delete(self, device: Device, *, time_ms: int, nonce: str, now_ms: int) -> int:
        """Remove all samples of a device and note that it was done; how many there were."""
        async with self._one_at_a_time:
            await self._store.run(lambda connection: claim(connection, device.number, time_ms, nonce))
            await asyncio.to_thread(_remove, self._folder / FOLDER / device.device)
            return await self._store.run(partial(_forget, device=device.number, now_ms=now_ms))


def _begin(
    connection: sqlite3.Connection, *, device: int, time_ms: int, nonce: str, sha256: str, most: int
) -> bool:
    """Use the nonce up; whether the sample is there already."""
    claim(connection, device, time_ms, nonce)
    (there,) = connection.execute(
        "SELECT count(*) FROM samples WHERE device = ? AND sha256 = ?", (device, sha256)
    ).fetchone()
    (size,) = connection.execute(
        "SELECT coalesce(sum(bytes), 0) FROM samples WHERE device = ?", (device,)
    ).fetchone()
    if not there and size >= most:
        raise Refusal(
            429,
            "samples",
            f"{size} bytes of samples of this device",
            allowed=f"{most} bytes",
            next_step="delete them, or send no more",
        )
    return bool(there)


def _write(folder: Path, path: str, sample: Sample) -> None:
    context = {f.name: getattr(sample, f.name) for f in fields(sample) if f.name != "image_png"}
    parts.written(folder, f"{path}.json", partial(_put, content=msgspec.json.encode(context)))
    parts.written(folder, f"{path}.png", partial(_put, content=sample.image_png))


def _put(file: Path, content: bytes) -> None:
    file.write_bytes(content)


def _remove(folder: Path) -> None:
    if folder.is_dir():
        shutil.rmtree(folder)
        sync(folder.parent)


def _forget(connection: sqlite3.Connection, *, device: int, now_ms: int) -> int:
    count = connection.execute("DELETE FROM samples WHERE device = ?", (device,)).rowcount
    connection.execute("INSERT INTO deletions VALUES(?, ?, ?)", (device, now_ms, count))
    return count
