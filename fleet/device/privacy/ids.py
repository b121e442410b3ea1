"""Ids that say nothing to anybody else: HMAC-SHA256 under a random salt that never leaves the device."""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from fleet.device.durable import make_once
from fleet.device.errors import UserError
from fleet.device.privacy.own_file import read_own

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
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            make_once(path, secrets.token_bytes(_SALT_BYTES))
        return cls(_read(path))

    def hashed(self, kind: str, raw: str | bytes) -> str:
        """32 hex digits for a raw id of this kind."""
        data = raw.encode("utf-8", "surrogatepass") if isinstance(raw, str) else raw
        name = kind.encode("utf-8", "surrogatepass")
        # The length before the kind: "ab" + "c" is not "a" + "bc".
        message = b"edgeloop-id-1" + len(name).to_bytes(8) + name + data
        return hmac.new(self._salt, message, hashlib.sha256).hexdigest()[:_ID_DIGITS]


def _read(path: Path) -> bytes:
    try:
        salt = read_own(path, most_bytes=_SALT_BYTES, others_may=0)
        if len(salt) != _SALT_BYTES:
            raise ValueError(f"{len(salt)} bytes")  # noqa: TRY301 - one error for all of these
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: {error}",
            allowed=f"{_SALT_BYTES} random bytes in a file that only this user may read (mode 600)",
            next_step=f"remove {path}: ids are then other ones, and nobody can link them to those before",
        ) from error
    return salt
