"""The TUF repository over HTTP: its two folders, by strong ETag, with ranges; no link is followed."""

import asyncio
import hashlib
import os
import re
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from fleet.gateway.refusal import Refusal, shown

FOLDERS = ("metadata", "targets")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
_CHUNK = 256 << 10
_MOST_HASHES = 4_096


@dataclass(frozen=True, slots=True)
class _Opened:
    descriptor: int
    size: int
    key: tuple[int, int, int, int]
    """Device, inode, size, time of the last change: other content has another one."""


class Repository:
    """Serves one folder; None serves nothing."""

    def __init__(self, folder: Path | None) -> None:
        """Serve `folder`, which may appear later."""
        self._folder = folder
        self._hashes: dict[tuple[int, int, int, int], str] = {}

    async def answer(self, request: Request, path: str) -> Response:
        """A file of it.

        Raises:
            Refusal: 404 for whatever is not a file of the two folders, 416 for a range that it does not have.
        """
        opened = await asyncio.to_thread(self._open, path)
        try:
            etag = f'"{await asyncio.to_thread(self._sha256, opened)}"'
            headers = {"ETag": etag, "Cache-Control": "no-cache", "Accept-Ranges": "bytes"}
            if _names(request.headers.get("if-none-match", ""), etag):
                os.close(opened.descriptor)
                return Response(status_code=304, headers=headers)
            first, end = _range(request, opened.size, etag)
        except BaseException:  # the response that would close it is not made
            os.close(opened.descriptor)
            raise
        partial = (first, end) != (0, opened.size)
        if partial:
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{opened.size}"
        headers["Content-Length"] = str(end - first)
        if request.method == "HEAD":
            os.close(opened.descriptor)
            return Response(status_code=200, headers=headers, media_type="application/octet-stream")
        return StreamingResponse(
            _chunks(opened.descriptor, first, end),
            206 if partial else 200,
            headers,
            media_type="application/json" if path.endswith(".json") else "application/octet-stream",
        )

    def read(self, name: str) -> bytes | None:
        """The newest content of a target, which lies there as NAME or HASH.NAME; None when there is none."""
        if self._folder is None:
            return None
        found = [
            file
            for file in (self._folder / "targets").glob(f"*{name}")
            if file.is_file() and (file.name == name or file.name.partition(".")[2] == name)
        ]
        newest = max(found, key=lambda file: file.stat().st_mtime_ns, default=None)
        return newest.read_bytes() if newest else None

    def _open(self, path: str) -> _Opened:
        names = path.split("/")
        if self._folder is None or names[0] not in FOLDERS or not all(map(_NAME.fullmatch, names)):
            raise _absent(path)
        try:
            descriptor = _walk(self._folder, names)
        except OSError as error:
            raise _absent(path) from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise _absent(path)
        return _Opened(
            descriptor,
            status.st_size,
            (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns),
        )

    def _sha256(self, opened: _Opened) -> str:
        if (known := self._hashes.get(opened.key)) is not None:
            return known
        digest, place = hashlib.sha256(), 0
        while chunk := os.pread(opened.descriptor, _CHUNK, place):
            digest.update(chunk)
            place += len(chunk)
        if len(self._hashes) >= _MOST_HASHES:
            self._hashes.clear()
        self._hashes[opened.key] = digest.hexdigest()
        return digest.hexdigest()


def _walk(folder: Path, names: list[str]) -> int:
    """A descriptor of the file, each step without following a link."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in names:
        try:
            # NONBLOCK: a pipe is refused, not waited for.
            inner = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
        finally:
            os.close(at)
        at = inner
    return at


def _range(request: Request, size: int, etag: str) -> tuple[int, int]:
    """First byte and end of what is asked for: one range, or everything."""
    header = request.headers.get("range", "")
    asked = _RANGE.fullmatch(header)
    condition = request.headers.get("if-range")
    if request.method == "HEAD" or asked is None or (condition is not None and condition != etag):
        return 0, size  # several ranges, or another unit: RFC 9110 lets a server ignore them
    first, last = asked.groups()
    if not first and not last:
        return 0, size
    start = int(first) if first else max(0, size - int(last))
    end = min(size, int(last) + 1) if first and last else size
    if start >= end:
        raise Refusal(
            416,
            "range",
            f"range {shown(header)}",
            allowed=f"bytes 0 to {size - 1}",
            next_step="ask for the whole file",
        )
    return start, end


async def _chunks(descriptor: int, first: int, end: int) -> AsyncIterator[bytes]:
    try:
        while first < end:
            chunk = await asyncio.to_thread(os.pread, descriptor, min(_CHUNK, end - first), first)
            if not chunk:
                return
            first += len(chunk)
            yield chunk
    finally:
        os.close(descriptor)


def _names(condition: str, etag: str) -> bool:
    tags = [tag.strip().removeprefix("W/") for tag in condition.split(",")]
    return "*" in tags or etag in tags


def _absent(path: str) -> Refusal:
    return Refusal(
        404,
        "not_found",
        f"/repository/{shown(path)}",
        allowed="files below metadata/ and targets/ of the repository",
        next_step="look the name up in the repository's metadata",
    )
