"""The private keys that sign releases: one Ed25519 key a role, in files that only their owner may read."""

from pathlib import Path

from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import (  # type: ignore[attr-defined]  # it does not list what it passes on
    CryptoSigner,
    Key,
)

from fleet.device.durable import make_once
from fleet.device.errors import UserError


class Keys:
    """Private keys in a folder."""

    def __init__(self, folder: Path) -> None:
        """Keys lie, or will lie, in `folder`."""
        self._folder = folder

    def make(self, name: str) -> Key:
        """A new key that only its owner may read.

        Raises:
            UserError: there is one already.
        """
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        signer = CryptoSigner.generate_ed25519()
        if not make_once(self._path(name), signer.private_bytes):
            raise UserError(
                f"{self._path(name)} exists",
                allowed="a folder without keys for a new repository",
                next_step="give another folder, or go on with the repository of these keys",
            )
        return signer.public_key

    def signer(self, name: str) -> CryptoSigner:
        """The key of a role, to sign with.

        Raises:
            UserError: it is not here, no key, or others may read it.
        """
        path = self._path(name)
        try:
            if path.stat().st_mode & 0o077:
                raise _no_key(path, f"mode {path.stat().st_mode & 0o777:o}")
            return CryptoSigner(load_pem_private_key(path.read_bytes(), None))
        except (OSError, ValueError) as error:
            raise _no_key(path, str(error)) from error

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.pem"


def _no_key(path: Path, why: str) -> UserError:
    return UserError(
        f"key {path}: {why}",
        allowed="an Ed25519 key in PEM that only its owner may read (mode 600)",
        next_step="bring the key here, chmod 600",
    )
