"""The TUF repository that devices update from: created once, then a release, a policy or a day's signature.

    FOLDER/metadata/    N.root.json, N.targets.json, N.policy.json, N.snapshot.json, timestamp.json
    FOLDER/targets/     SHA256.release.json, SHA256.policy.json, files/SHA256.SHA256
    KEYS/ROLE.pem       one Ed25519 key a role, mode 0600; `root.pem` belongs offline after `create`

Everything is served as it lies. `timestamp.json` is written last and names all the rest by version and hash,
whose file names carry version or hash too: a publisher that is killed leaves the repository that was there.
"""

import datetime as dt
import fcntl
import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securesystemslib.exceptions import StorageError
from tuf.api.exceptions import RepositoryError
from tuf.api.metadata import (  # type: ignore[attr-defined]  # it does not list what it passes on
    DelegatedRole,
    Delegations,
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)
from tuf.api.serialization import DeserializationError

from fleet.device.durable import replacing, write_durably
from fleet.device.errors import UserError
from fleet.device.release import (
    BEFORE_TARGET,
    FILES,
    POLICY_TARGET,
    RELEASE_TARGET,
    FileOf,
    Policy,
    Release,
)
from tasks.release_keys import Keys

TIMESTAMP_DAYS, OTHERS_DAYS = 7, 365
_SERVED = 0o644
"""Everything in the repository is public, and a web server of another user has to read it."""
_TOP = ("root", "targets", "snapshot", "timestamp")
_SECOND = "reviewer"
"""Signs releases too, where two must."""
_POLICY = "policy"


@dataclass
class _Current:
    """What the repository says now; to be changed, then signed."""

    timestamp: Metadata[Timestamp]
    snapshot: Metadata[Snapshot]
    targets: Metadata[Targets]
    policy: Metadata[Targets]


class ReleaseRepository:
    """A repository on disk; one publisher at a time."""

    def __init__(self, folder: Path, keys: Path, *, reviewer_keys: Path | None = None) -> None:
        """Work on the repository in `folder`.

        Args:
            folder: As `create` made it.
            keys: Folder of the keys of the roles that are to be signed.
            reviewer_keys: Folder of `reviewer.pem`, where it is not `keys`.
        """
        self.folder = folder
        self._metadata, self._targets = folder / "metadata", folder / "targets"
        self._keys, self._reviewer = Keys(keys), Keys(reviewer_keys or keys)

    @classmethod
    def create(
        cls,
        folder: Path,
        keys: Path,
        *,
        demo: bool = False,
        threshold: int = 1,
        reviewer_keys: Path | None = None,
    ) -> "ReleaseRepository":
        """A repository without a release, and its keys.

        Args:
            folder: New or empty.
            keys: Where the keys are made.
            demo: Say in the root that nobody may rely on it.
            threshold: How many must sign a release: 1 the pipeline, 2 a reviewer too.
            reviewer_keys: Where the reviewer's key is made, if not in `keys`.

        Raises:
            UserError: a repository or keys are there already, or another threshold.
        """
        repository = cls(folder, keys, reviewer_keys=reviewer_keys)
        if threshold not in (1, 2) or (folder / "metadata" / "timestamp.json").exists():
            raise UserError(
                f"repository {folder} with threshold {threshold}",
                allowed="a new folder, threshold 1 or 2",
                next_step="give another folder, or publish to the repository that is there",
            )
        for path in (repository._metadata, repository._targets / FILES):
            path.mkdir(parents=True, exist_ok=True)
        repository._begin(demo=demo, threshold=threshold)
        return repository

    @property
    def root(self) -> bytes:
        """The first root, which an app carries; later ones are reached from it."""
        return (self._metadata / "1.root.json").read_bytes()

    def publish_release(self, release: Release, files: Mapping[str, Path] | Iterable[Path]) -> None:
        """Offer a release to devices; which of them take it is the policy's.

        The release that is offered now becomes the one for new devices outside the rollout, if it was out
        for everybody; else the one before it stays that.

        Args:
            release: With a counter above every one before.
            files: What its tiers name, by path, or by SHA-256 to path. What is in the repository already may
                be left out.

        Raises:
            UserError: an older counter, a file that is missing or is not what the release says, no key.
        """
        content = release.to_bytes()
        given = dict(files) if isinstance(files, Mapping) else {_sha256(path): path for path in files}
        with self._locked():
            current = self._read()
            self._require_newer(RELEASE_TARGET, release.counter)
            targets = current.targets.signed.targets
            before = self._before(current)
            kept = {RELEASE_TARGET: self._put(RELEASE_TARGET, content)}
            if before is not None:
                kept[BEFORE_TARGET] = self._put(BEFORE_TARGET, before.to_bytes())
                for file in _files(before):
                    kept[FILES + file.sha256] = targets[FILES + file.sha256]
            for file in _files(release):
                kept[FILES + file.sha256] = self._put_file(file, given.get(file.sha256))
            current.targets.signed.targets = kept
            self._sign(current, "targets")

    def publish_policy(self, policy: Policy) -> None:
        """Let devices obey a policy; no release is touched.

        Raises:
            UserError: an older version, or no key.
        """
        content = policy.to_bytes()
        with self._locked():
            current = self._read()
            self._require_newer(POLICY_TARGET, policy.version)
            current.policy.signed.targets = {POLICY_TARGET: self._put(POLICY_TARGET, content)}
            self._sign(current, _POLICY)

    def sign_timestamp(self, days: float = TIMESTAMP_DAYS) -> None:
        """Say that nothing newer is out; due well before the last one expires.

        Raises:
            UserError: no key.
        """
        with self._locked():
            self._sign(self._read(), timestamp_days=days)

    def release(self) -> Release | None:
        """The release that is offered."""
        found = self._content(self._read().targets, RELEASE_TARGET)
        return Release.parse(found) if found else None

    def policy(self) -> Policy | None:
        """The policy that devices are told."""
        found = self._content(self._read().policy, POLICY_TARGET)
        return Policy.parse(found) if found else None

    def _begin(self, *, demo: bool, threshold: int) -> None:
        public = {name: self._keys.make(name) for name in (*_TOP, _POLICY)}
        root = Root(expires=_in_days(OTHERS_DAYS), consistent_snapshot=True)
        for role in _TOP:
            root.add_key(public[role], role)
        if threshold == 2:
            root.add_key(self._reviewer.make(_SECOND), "targets")
            root.roles["targets"].threshold = 2
        if demo:
            root.unrecognized_fields["demo"] = True
        signed_root = Metadata(root)
        signed_root.sign(self._keys.signer("root"))
        write_durably(self._metadata / "1.root.json", signed_root.to_bytes(), mode=_SERVED)
        delegated = DelegatedRole(
            _POLICY, [public[_POLICY].keyid], 1, terminating=True, paths=[POLICY_TARGET]
        )
        targets = Targets(expires=_in_days(OTHERS_DAYS))
        targets.delegations = Delegations({public[_POLICY].keyid: public[_POLICY]}, {_POLICY: delegated})
        current = _Current(
            timestamp=Metadata(Timestamp(expires=_in_days(TIMESTAMP_DAYS))),
            snapshot=Metadata(Snapshot(expires=_in_days(OTHERS_DAYS))),
            targets=Metadata(targets),
            policy=Metadata(Targets(expires=_in_days(OTHERS_DAYS))),
        )
        for metadata in (current.timestamp, current.snapshot, current.targets, current.policy):
            metadata.signed.version = 0  # `_sign` makes it the first
        self._sign(current, "targets", _POLICY)

    def _sign(self, current: _Current, *roles: str, timestamp_days: float = TIMESTAMP_DAYS) -> None:
        """Sign the roles that changed and all that names them, and write it, the timestamp last."""
        root = self._root_now()
        for role in roles:
            metadata = current.policy if role == _POLICY else current.targets
            delegator = current.targets.signed if role == _POLICY else root
            data = self._signed(metadata, role, delegator, OTHERS_DAYS)
            write_durably(self._metadata / f"{metadata.signed.version}.{role}.json", data, mode=_SERVED)
            current.snapshot.signed.meta[f"{role}.json"] = _meta(metadata.signed.version, data)
        if roles:
            data = self._signed(current.snapshot, "snapshot", root, OTHERS_DAYS)
            version = current.snapshot.signed.version
            write_durably(self._metadata / f"{version}.snapshot.json", data, mode=_SERVED)
            current.timestamp.signed.snapshot_meta = _meta(version, data)
        data = self._signed(current.timestamp, "timestamp", root, timestamp_days)
        write_durably(self._metadata / "timestamp.json", data, mode=_SERVED)

    def _signed(self, metadata: Metadata[Any], role: str, delegator: Root | Targets, days: float) -> bytes:
        """The next version of a role's metadata, signed by as many as must."""
        metadata.signed.version += 1
        metadata.signed.expires = _in_days(days)
        metadata.signatures.clear()
        metadata.sign(self._keys.signer(role))
        if isinstance(delegator, Root) and delegator.roles[role].threshold == 2:
            metadata.sign(self._reviewer.signer(_SECOND), append=True)
        try:
            delegator.verify_delegate(role, metadata.signed_bytes, metadata.signatures)
        except RepositoryError as error:
            raise UserError(
                f"the keys here do not sign for role {role}: {error}",
                allowed="the keys that this repository was created with",
                next_step="give the folder of its keys",
            ) from error
        return metadata.to_bytes()

    def _read(self) -> _Current:
        """What the timestamp names; files of a publisher that was killed are not looked at."""
        try:
            timestamp = Metadata[Timestamp].from_file(str(self._metadata / "timestamp.json"))
            snapshot = self._named("snapshot", timestamp.signed.snapshot_meta)
            targets, policy = (
                self._named(role, snapshot.signed.meta[f"{role}.json"]) for role in ("targets", _POLICY)
            )
        except (StorageError, DeserializationError, KeyError) as error:
            raise UserError(
                f"{self.folder} is no repository: {error}",
                allowed="a folder made by ReleaseRepository.create",
                next_step="create one, or bring back its backup",
            ) from error
        return _Current(timestamp=timestamp, snapshot=snapshot, targets=targets, policy=policy)

    def _named(self, role: str, meta: MetaFile) -> Metadata[Any]:
        return Metadata[Any].from_file(str(self._metadata / f"{meta.version}.{role}.json"))

    def _root_now(self) -> Root:
        versions = (int(path.name.split(".")[0]) for path in self._metadata.glob("*.root.json"))
        return Metadata[Root].from_file(str(self._metadata / f"{max(versions)}.root.json")).signed

    def _require_newer(self, target: str, number: int) -> None:
        """Devices refuse what does not grow; better here."""
        here: Release | Policy | None
        if target == RELEASE_TARGET:
            here = self.release()
            known = here.counter if here else 0
        else:
            here = self.policy()
            known = here.version if here else 0
        if number <= known:
            raise UserError(
                f"{target} number {number}",
                allowed=f"above {known}, which is published",
                next_step=f"give it {known + 1}; a rollback is a new number with old content",
            )

    def _before(self, current: _Current) -> Release | None:
        """The last release that every device was offered."""
        offered = self._content(current.targets, RELEASE_TARGET)
        older = self._content(current.targets, BEFORE_TARGET)
        if offered is None:
            return None
        release, policy = Release.parse(offered), self.policy()
        rollout = policy.rollout if policy else None
        out = (
            rollout is None
            or release.counter < rollout.counter
            or (release.counter == rollout.counter and rollout.complete)
        )
        return release if out else Release.parse(older) if older else None

    def _content(self, metadata: Metadata[Targets], target: str) -> bytes | None:
        info = metadata.signed.targets.get(target)
        return self._path(target, info.hashes["sha256"]).read_bytes() if info else None

    def _path(self, target: str, sha256: str) -> Path:
        folder, slash, name = target.rpartition("/")
        return self._targets / f"{folder}{slash}{sha256}.{name}"

    def _put(self, target: str, content: bytes) -> TargetFile:
        write_durably(self._path(target, hashlib.sha256(content).hexdigest()), content, mode=_SERVED)
        return TargetFile.from_data(target, content, ["sha256"])

    def _put_file(self, file: FileOf, source: Path | None) -> TargetFile:
        """Bring a file of a release here, whole or not at all."""
        target = FILES + file.sha256
        path = self._path(target, file.sha256)
        if not _is(path, file):
            if source is None or not _is(source, file):
                raise UserError(
                    f"{source or 'no file'} for {file.sha256[:12]}… with {file.length} bytes",
                    allowed="the file that the release names by hash and length",
                    next_step="give its path, or build the release from the files anew",
                )
            with source.open("rb") as given, replacing(path, mode=_SERVED) as copied:
                shutil.copyfileobj(given, copied)
        return TargetFile(file.length, {"sha256": file.sha256}, target)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One publisher at a time; a second one waits."""
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def file_of(path: Path) -> FileOf:
    """How a release names a file."""
    return FileOf(sha256=_sha256(path), length=path.stat().st_size)


def _files(release: Release) -> list[FileOf]:
    return [file for tier in release.tiers for file in release.files_of(tier)]


def _is(path: Path, file: FileOf) -> bool:
    return path.is_file() and file_of(path) == file


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _meta(version: int, data: bytes) -> MetaFile:
    return MetaFile(version, len(data), {"sha256": hashlib.sha256(data).hexdigest()})


def _in_days(days: float) -> dt.datetime:
    return (dt.datetime.now(dt.UTC) + dt.timedelta(days=days)).replace(microsecond=0)
