"""Files by their content: what two releases share is downloaded and kept once."""

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fleet.device.durable import sync
from fleet.device.release import FileOf
from fleet.device.runtime.folder import disk_errors
from fleet.device.runtime.refusal import UpdateRefusedError

_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 1 << 20
_PART = ".part"

Source = Callable[[int], tuple[int, Iterator[bytes]]]
"""From an offset on: where the bytes begin (the offset, or 0), and the bytes."""


class Store:
    """`files/SHA256` below a folder."""

    def __init__(self, folder: Path) -> None:
        """Work in `folder`, made when missing."""
        self._folder = folder
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def path(self, file: FileOf) -> Path:
        """Where a file lies, or would."""
        return self._folder / file.sha256

    def check(self, file: FileOf) -> None:
        """Read the whole file and compare.

        Raises:
            UpdateRefusedError: reason `length` or `hash`: missing, no plain file, cut, changed.
        """
        path = self.path(file)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise UpdateRefusedError("hash", f"{path}: {error.strerror}") from error
        try:
            digest = self._digest(descriptor, path, file)
        except OSError as error:
            raise UpdateRefusedError("hash", f"{path}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        if digest != file.sha256:
            raise UpdateRefusedError("hash", f"{path} has SHA-256 {digest}")

    def has(self, file: FileOf) -> bool:
        """Whether the file is here and whole."""
        try:
            self.check(file)
        except UpdateRefusedError:
            return False
        return True

    def add(self, file: FileOf, source: Source) -> None:
        """Bring a file here, going on where a cut download ended; what is here and broken is replaced.

        Raises:
            UpdateRefusedError: reason `disk`, `length` or `hash`.
            DownloadError: from `source`; what came so far stays for the next time.
        """
        part = self.path(file).with_suffix(_PART)
        have = self._usable(part, file)
        with disk_errors(part):
            free = shutil.disk_usage(self._folder).free
        if free < file.length - have + _SPARE_BYTES:
            raise UpdateRefusedError(
                "disk", f"{self._folder}: {file.length - have} bytes to come, {free} bytes free"
            )
        start, chunks = source(have)
        try:
            self._write(part, file, start, chunks)
            self._take_over(part, file)
        except UpdateRefusedError:
            with contextlib.suppress(OSError):  # wrong bytes, or no room: neither is worth keeping
                part.unlink(missing_ok=True)
            raise

    def keep_only(self, wanted: Iterable[FileOf]) -> None:
        """Remove every file but these, and what is left of downloads of others.

        Raises:
            UpdateRefusedError: reason `disk`.
        """
        names = {file.sha256 for file in wanted}
        with disk_errors(self._folder):
            for path in self._folder.iterdir():
                if path.name.removesuffix(_PART) not in names:
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _digest(self, descriptor: int, path: Path, file: FileOf) -> str:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UpdateRefusedError("hash", f"{path} is no plain file")
        if found.st_size != file.length:
            raise UpdateRefusedError("length", f"{path}: {found.st_size} bytes, signed are {file.length}")
        with open(descriptor, "rb", closefd=False) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    def _usable(self, part: Path, file: FileOf) -> int:
        """Bytes of an earlier download; anything but a plain, shorter file is removed."""
        try:
            found = part.lstat()
        except OSError:
            return 0
        if stat.S_ISREG(found.st_mode) and found.st_size < file.length:
            return found.st_size
        with disk_errors(part):
            shutil.rmtree(part) if stat.S_ISDIR(found.st_mode) else part.unlink()
        return 0

    def _write(self, part: Path, file: FileOf, start: int, chunks: Iterator[bytes]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (0 if start else os.O_TRUNC)
        with disk_errors(part):
            descriptor = os.open(part, flags, 0o600)
            with contextlib.closing(_Writer(descriptor, start)) as out:
                for chunk in chunks:
                    if out.position + len(chunk) > file.length:
                        raise UpdateRefusedError(
                            "length", f"files/{file.sha256}: more than the {file.length} bytes signed"
                        )
                    out.write(chunk)
                os.fsync(descriptor)

    def _take_over(self, part: Path, file: FileOf) -> None:
        """Check what was downloaded, and let it have its name."""
        with part.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        if size != file.length:
            raise UpdateRefusedError("length", f"files/{file.sha256}: {size} bytes, signed are {file.length}")
        if digest != file.sha256:
            raise UpdateRefusedError("hash", f"files/{file.sha256}: what came has SHA-256 {digest}")
        path = self.path(file)
        with disk_errors(path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            part.replace(path)
            sync(self._folder)


class _Writer:
    """Writes all of each chunk at the end of what a descriptor has."""

    def __init__(self, descriptor: int, position: int) -> None:
        self._descriptor, self.position = descriptor, position
        os.lseek(descriptor, position, os.SEEK_SET)

    def write(self, chunk: bytes) -> None:
        left = memoryview(chunk)
        while left:
            written = os.write(self._descriptor, left)
            left, self.position = left[written:], self.position + written

    def close(self) -> None:
        os.close(self._descriptor)
