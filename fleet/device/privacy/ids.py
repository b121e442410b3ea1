"""Ids that say nothing to anybody else: HMAC-SHA256 under a random salt that never leaves the device."""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from fleet.device.errors import UserError

SALT = "salt"
_SALT_BYTES, _ID_DIGITS = 32, 32


class HashedIds:
    """Raw ids to hashed ones: the same on this device as long as its salt lies there, another elsewhere.

    Kinds are kept apart: the same text as a user and as a session gives two ids that nobody can link.
    """

    def __init__(self, salt: bytes) -> None:
        """From 32 random bytes."""
        self._salt = salt

    @classmethod
    def load(cls, folder: Path) -> "HashedIds":
        """With the salt in a folder, made when there is none; two that make it at once get the same.

        Raises:
            UserError: the file is no salt of this user's alone.
        """
        path = folder / SALT
        if not os.path.lexists(path):
            _make(path)
        return cls(_read(path))

    def hashed(self, kind: str, raw: str | bytes) -> str:
        """32 hex digits for a raw id of this kind."""
        data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
        name = kind.encode("utf-8", "surrogatepass")
        # The length before the kind: "ab" + "c" is not "a" + "bc".
        message = b"edgeloop-id-1" + len(name).to_bytes(8) + name + data
        return hmac.new(self._salt, message, hashlib.sha256).hexdigest()[:_ID_DIGITS]


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=".salt-")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_SALT_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)  # there whole or not at all
    finally:
        Path(beside).unlink()


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise _no_salt(path, error.strerror or str(error)) from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        salt = file.read(_SALT_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    if len(salt) != _SALT_BYTES or status.st_mode & 0o077 or status.st_uid != os.geteuid():
        raise _no_salt(path, f"{status.st_size} bytes, mode {status.st_mode & 0o777:o}, user {status.st_uid}")
    return salt


def _no_salt(path: Path, got: str) -> UserError:
    return UserError(
        f"{path}: {got}",
        allowed=f"{_SALT_BYTES} random bytes in a file that only this user may read (mode 600)",
        next_step=f"remove {path}: ids are then other ones, and nobody can link them to those before",
    )
