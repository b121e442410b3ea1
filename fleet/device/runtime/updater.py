"""The device's side of the TUF repository: verified metadata, releases and policies, changed files only.

python-tuf does the client workflow (https://theupdateframework.github.io/specification/latest/#detailed-client-workflow);
here is what it leaves to its user: which URL, how long, what an error means to a device, and the store.
"""

import contextlib
import datetime as dt
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

from tuf.api import exceptions
from tuf.api.metadata import (  # type: ignore[attr-defined]  # it does not list what it passes on
    Metadata,
    Root,
    TargetFile,
    Timestamp,
)
from tuf.api.serialization import DeserializationError
from tuf.ngclient.config import UpdaterConfig
from tuf.ngclient.updater import Updater as TufUpdater

from fleet.device.release import FILES, POLICY_TARGET, FileOf
from fleet.device.runtime.fetch import Fetcher, Patience
from fleet.device.runtime.folder import disk_errors
from fleet.device.runtime.refusal import Reason, UpdateRefusedError
from fleet.device.runtime.store import Store
from fleet.device.runtime.trust import SCHEMA, Sealed, Signer
from fleet.device.strict_json import MOST_BYTES

_LONGEST_FRESH = dt.timedelta(days=90)
"""A timestamp is signed for days; one that is good for longer than this means that the clock is wrong."""
_REASONS: tuple[tuple[type[Exception], Reason], ...] = (
    (exceptions.ExpiredMetadataError, "expired"),
    (exceptions.BadVersionNumberError, "rollback"),
    (exceptions.UnsignedMetadataError, "signature"),
    (exceptions.LengthOrHashMismatchError, "hash"),
    (exceptions.RepositoryError, "metadata"),
    (exceptions.DownloadLengthMismatchError, "length"),
    (exceptions.DownloadError, "network"),
)


class Updater:
    """One look at a repository: `refresh` first, then ask.

    Every method raises UpdateRefusedError; its reasons are those of `_REASONS`, `url`, `clock`, `content` and
    `disk`. What was trusted before stays trusted.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        root: bytes,
        *,
        patience: Patience | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Look at the repository below `url`, which has `metadata/` and `targets/`.

        Args:
            folder: Metadata seen before; what protects from older metadata.
            url: https, or http on loopback.
            root: The root of trust that the app carries.
            patience: How long the repository may take.
            tls: Where not the system's certificates decide.
        """
        self._folder = folder
        self._fetcher = Fetcher(url, patience=patience, tls=tls)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._targets_url = self._fetcher.url + "targets/"
        with _as_refusals():
            self._tuf = TufUpdater(
                str(folder),
                self._fetcher.url + "metadata/",
                target_base_url=self._targets_url,
                fetcher=self._fetcher,
                config=UpdaterConfig(),
                bootstrap=root,
            )

    @property
    def bytes_received(self) -> int:
        """Of bodies, metadata included."""
        return self._fetcher.bytes_received

    def refresh(self) -> None:
        """Verify the newest metadata."""
        with _as_refusals():
            self._tuf.refresh()
            timestamp = Metadata[Timestamp].from_file(str(self._folder / "timestamp.json")).signed
        now = dt.datetime.now(dt.UTC)
        if timestamp.expires - now > _LONGEST_FRESH:
            raise UpdateRefusedError(
                "clock",
                f"the clock says {now:%Y-%m-%d}, the repository is signed up to {timestamp.expires:%Y-%m-%d}:"
                f" at most {_LONGEST_FRESH.days} days apart tell that it is fresh",
            )

    def is_demo(self) -> bool:
        """Whether the root of trust says that this repository is for demonstration only."""
        with _as_refusals():
            root = Metadata[Root].from_file(str(self._folder / "root.json")).signed
        return root.unrecognized_fields.get("demo") is True

    def sealed(self, target: str) -> Sealed | None:
        """A release or policy with what proves it; None when the repository has none."""
        with _as_refusals():
            info = self._tuf.get_targetinfo(target)
            if info is None:
                return None
            if info.length > MOST_BYTES:
                raise UpdateRefusedError("length", f"{target}: {info.length} bytes, allowed {MOST_BYTES}")
            content = self._fetcher.download_bytes(self._url_of(info), info.length)
            info.verify_length_and_hashes(content)
            chain = ("targets", "policy") if target == POLICY_TARGET else ("targets",)
            signers = tuple(
                Signer(role=role, metadata=(self._folder / f"{role}.json").read_text("utf-8"))
                for role in chain
            )
            text = content.decode()
        return Sealed(schema=SCHEMA, target=target, content=text, signers=signers)

    def fetch(self, file: FileOf, store: Store) -> None:
        """Bring a file of a release into the store, unless it is there."""
        if store.has(file):
            return
        with _as_refusals():
            info = self._tuf.get_targetinfo(FILES + file.sha256)
            if info is None or info.length != file.length or info.hashes.get("sha256") != file.sha256:
                raise UpdateRefusedError(
                    "metadata", f"{FILES}{file.sha256} with {file.length} bytes is not in the repository"
                )
            url = self._url_of(info)
            store.add(file, lambda offset: self._fetcher.fetch_file(url, offset, file.length))

    def _url_of(self, info: TargetFile) -> str:
        """Where a target lies in a repository with consistent snapshots: its hash stands before its name."""
        folder, slash, name = info.path.rpartition("/")
        return f"{self._targets_url}{folder}{slash}{info.hashes['sha256']}.{name}"


@contextlib.contextmanager
def _as_refusals() -> Iterator[None]:
    try:
        yield
    except (exceptions.RepositoryError, exceptions.DownloadError) as error:
        reason = next(reason for kind, reason in _REASONS if isinstance(error, kind))
        raise UpdateRefusedError(reason, str(error)) from error
    except (DeserializationError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise UpdateRefusedError("metadata", f"{type(error).__name__}: {error}") from error
    except OSError as error:
        raise UpdateRefusedError("disk", str(error)) from error
