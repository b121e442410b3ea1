"""Signed records that prove themselves from disk: what an update verified is verified again at every load.

A file on the device can be edited by whoever gets at it. So a record is kept with the metadata that signs it,
and checked against the root of trust that the app carries. Expiry is not looked at here: it tells whether a
repository is fresh, and a device that hears of no news goes on with what it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import (  # type: ignore[attr-defined]  # it does not list what it passes on
    Metadata,
    Root,
    Targets,
)
from tuf.api.serialization import DeserializationError

from fleet.device.errors import UserError
from fleet.device.release import POLICY_TARGET
from fleet.device.runtime.refusal import UpdateRefusedError
from fleet.device.strict_json import json_bytes, read_json

_MOST_BYTES = 16 << 20
_MOST_ROOTS = 1024
SCHEMA = 1
_UNUSABLE = (RepositoryError, DeserializationError, ValueError, KeyError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signer:
    """A TUF role and its signed metadata as it came."""

    role: str
    metadata: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """A target with what proves it."""

    schema: int
    target: str
    content: str
    signers: tuple[Signer, ...]
    """From `targets` down to the role that lists the target."""

    def to_bytes(self) -> bytes:
        """One JSON file."""
        return json_bytes(self)

    @classmethod
    def read(cls, path: Path) -> "Sealed":
        """The record in a file, not yet verified.

        Raises:
            UpdateRefusedError: reason `signature`: missing or not readable.
        """
        try:
            if path.is_symlink() or path.stat().st_size > _MOST_BYTES:
                raise UpdateRefusedError("signature", f"{path} is a link, or larger than {_MOST_BYTES} bytes")
            return read_json(cls, path.read_bytes(), what=path.name, schema=SCHEMA, most_bytes=_MOST_BYTES)
        except (OSError, UserError) as error:
            said = error.got if isinstance(error, UserError) else f"{path}: {error.strerror}"
            raise UpdateRefusedError("signature", said) from error

    def verified(self, target: str, roots: Sequence[Root]) -> bytes:
        """The content, signed by who must sign it according to one of these roots.

        Args:
            target: What it must be; a policy is no release, whoever signed it.
            roots: Oldest first.

        Raises:
            UpdateRefusedError: reason `signature`.
        """
        chain = ("targets", "policy") if target == POLICY_TARGET else ("targets",)
        if self.target != target or tuple(signer.role for signer in self.signers) != chain:
            raise UpdateRefusedError("signature", f"{target} on this device: sealed as {self.target}")
        said: object = "no root of trust"
        for root in reversed(roots):
            try:
                return self._verified_by(root)
            except _UNUSABLE as error:
                said = error
        raise UpdateRefusedError("signature", f"{self.target} on this device: {said}")

    def _verified_by(self, root: Root) -> bytes:
        delegator: Root | Targets = root
        for signer in self.signers:
            if isinstance(delegator, Targets):
                roles = delegator.delegations.roles if delegator.delegations else None
                if roles is None or not roles[signer.role].is_delegated_path(self.target):
                    raise RepositoryError(f"role {signer.role} may not sign {self.target}")
            metadata = Metadata[Targets].from_bytes(signer.metadata.encode())
            if not isinstance(metadata.signed, Targets):
                raise RepositoryError(f"role {signer.role} signs no targets")
            delegator.verify_delegate(signer.role, metadata.signed_bytes, metadata.signatures)
            delegator = metadata.signed
        if isinstance(delegator, Root):
            raise RepositoryError("nobody signs it")
        content = self.content.encode()
        delegator.targets[self.target].verify_length_and_hashes(content)
        return content


def trusted_roots(bootstrap: bytes, metadata_folder: Path) -> list[Root]:
    """The root of trust that the app carries and those it led to, oldest first.

    Raises:
        UpdateRefusedError: reason `signature`: the app's own root is none.
    """
    try:
        first = Metadata[Root].from_bytes(bootstrap)
        first.signed.verify_delegate(Root.type, first.signed_bytes, first.signatures)
    except (*_UNUSABLE, AttributeError) as error:
        raise UpdateRefusedError("signature", f"the root of trust of this app: {error}") from error
    roots = [first.signed]
    for version in range(first.signed.version + 1, first.signed.version + _MOST_ROOTS):
        try:
            data = (metadata_folder / "root_history" / f"{version}.root.json").read_bytes()
            following = Metadata[Root].from_bytes(data)
            for root in (roots[-1], following.signed):
                root.verify_delegate(Root.type, following.signed_bytes, following.signatures)
        except (OSError, *_UNUSABLE):
            break  # the chain ends here; what newer roots signed is then refused
        if following.signed.version != version:
            break
        roots.append(following.signed)
    return roots
