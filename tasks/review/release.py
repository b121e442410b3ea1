"""A release as it lies in MLflow: fetched, and held against the hashes that the gate and the ledger name."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from fleet.device.errors import UserError
from tasks.champion_files import PARAMS, PREDICTIONS
from tasks.judge.evidence import evidence_sha256
from tasks.mlflow_file import Snapshot, Version
from tasks.provenance import release_sha256, sha256_of
from tasks.refusal import refusing
from tasks.review.ledger import Entry
from tasks.review.standing import Review
from tasks.stage import read_json
from tasks.tracking import check_store
from tasks.workspace import NO_ROOM

if TYPE_CHECKING:
    from tasks.mlflow_store import Store

ARTIFACTS = "release"
"""Folder of a build's run that holds what is reviewed."""
REPORT = "release.html"
ATTACHED: Mapping[str, str] = {
    "report_sha256": REPORT,
    "predictions_sha256": PREDICTIONS,
    "gate_table_sha256": "gate.md",
    "params_sha256": PARAMS,
    "dvc_lock_sha256": "dvc.lock",
}
"""Tag to artifact: files beside the evidence whose bytes a version vouches for too."""

_ROOM_BYTES = 64 << 20
"""With less free, a download that failed may have failed for want of room."""
_PLACES = (("models/mnn/", "models/"), ("models/parity/", ""), ("reports/", ""))


class ReleaseRefusedError(UserError):
    """What lies in MLflow is not a release that may be approved."""


class MisledError(ReleaseRefusedError):
    """Who resolves the version in MLflow finds other files than those of its run."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """A verified release, on this disk."""

    name: str
    version: int
    folder: Path
    release_sha256: str
    evidence_sha256: str
    git_commit: str

    @property
    def cards(self) -> dict[str, dict[str, Any]]:
        """Variant to model card."""
        return {p.parent.name: read_json(p) for p in sorted((self.folder / "models").glob("*/card.json"))}

    @property
    def predictions(self) -> Path:
        """What its variants answered to the test images."""
        return self.folder / PREDICTIONS

    @property
    def params(self) -> Path:
        """What it was built with."""
        return self.folder / PARAMS


def artifact_of(file: str) -> str:
    """Where a file of the workspace lies below `release/`: `reports/gate.json` is `gate.json` there."""
    for prefix, place in _PLACES:
        if file.startswith(prefix):
            return place + file.removeprefix(prefix)
    return file


def require_version(name: str, version: int, shown: Snapshot) -> None:
    """Refuse a version that MLflow does not have.

    Raises:
        ReleaseRefusedError: it has not.
    """
    if version not in shown.versions:
        there = ", ".join(map(str, sorted(shown.versions))) or "none"
        raise ReleaseRefusedError(
            f"{name} has no version {version}",
            allowed=f"a version that is in MLflow: {there}",
            next_step="`edgeloop release list` shows them",
        )


def fetch(store: "Store", name: str, number: int, *, version: Version, review: Review, into: Path) -> Release:
    """Download a version's artifacts and verify each of them.

    Args:
        store: MLflow.
        name: The registered model.
        number: The version.
        version: As MLflow shows it.
        review: As the ledger has it.
        into: An empty folder.

    Raises:
        ReleaseRefusedError: the run is deleted, an artifact is missing or changed, the gate did not pass, or
            tags, evidence and ledger do not agree.
        UserError: MLflow does not answer.
    """
    what = f"{name} version {number}"
    require_own_source(store, name, number, version)
    folder = _download(store, version.run_id, what, into)
    made = review.registered
    if made is None:
        raise _unregistered(what)
    gate = _gate(folder, what, version)
    for file, sha256 in gate["evidence"].items():
        _require_same(folder, artifact_of(file), sha256, what)
    found = {
        "release_sha256": release_sha256(folder / "models"),
        "evidence_sha256": evidence_sha256(gate),
    }
    if found["evidence_sha256"] != gate["evidence_sha256"]:
        raise _refused(f"{what}: release/gate.json was edited: its hash is another one")
    ledger = _registered_hashes(made)
    needed = {"report_sha256", "predictions_sha256", *made.files}  # the others older ledgers do not have
    for key in (*found, *(key for key in ATTACHED if key in needed)):
        told = {ledger.get(key), version.tags.get(key)} - {None}
        now = found.get(key) or _attached(folder, ATTACHED[key], what)
        if told != {now}:
            raise _refused(
                f"{what}: {key} is {now}, but {' and '.join(map(str, told)) or 'nobody'} was registered"
            )
    _require_whole(folder, gate, what)
    git_commit = made.origin.get("git_commit", version.tags.get("git_commit", ""))
    return Release(name=name, version=number, folder=folder, git_commit=git_commit, **found)


def _require_whole(folder: Path, gate: Mapping[str, Any], what: str) -> None:
    """Every model is there with the card that names its bytes, the gate judged both, and nothing else is."""
    judged = {artifact_of(file) for file in gate["evidence"]}
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    extra = there - judged - {"gate.json", *ATTACHED.values()}
    if extra:
        raise _refused(f"{what}: nobody vouches for artifact release/{min(extra)}")
    models = sorted(path.name for path in (folder / "models").glob("*"))
    if not models or not gate["checks"]:
        raise _refused(f"{what}: release/gate.json judged no {'model' if gate['checks'] else 'check'}")
    for name in models:
        missing = {f"models/{name}/{file}" for file in ("model.mnn", "card.json")} - judged
        if missing:
            raise _refused(f"{what}: the gate did not judge {min(missing)}")
        try:
            named = read_json(folder / "models" / name / "card.json")["mnn_sha256"]
        except (UserError, KeyError, TypeError) as error:
            raise _refused(f"{what}: the card of {name} cannot be read ({type(error).__name__})") from error
        found = sha256_of(folder / "models" / name / "model.mnn")
        if named != found:
            raise _refused(f"{what}: the card of {name} names the model {named}, it is {found}")


def require_own_source(store: "Store", name: str, number: int, version: Version) -> None:
    """Refuse a version that resolves to other files than those of its run, which are the ones verified.

    Raises:
        ReleaseRefusedError: it does.
        UserError: MLflow does not answer.
    """
    from mlflow.exceptions import MlflowException

    what = f"{name} version {number}"
    try:
        run = store.call(lambda: store.client.get_run(version.run_id))
        leads = store.call(lambda: store.client.get_model_version_download_uri(name, str(number)))
    except MlflowException as error:
        check_store(store.uri)
        said = " ".join(str(error).split())
        raise _refused(f"{what}: its run {version.run_id!r} cannot be read: {said[:200]}") from error
    own = f"{run.info.artifact_uri}/{ARTIFACTS}"
    elsewhere = sorted({version.source, str(leads)} - {own})
    if elsewhere:
        raise MisledError(
            f"{what}: it leads to {elsewhere[0]}, its run keeps the release in {own}",
            allowed="a version that leads to the artifacts of its own run",
            next_step="delete this version in MLflow and build: `edgeloop build` then registers a new one",
        )


def _download(store: "Store", run_id: str, what: str, into: Path) -> Path:
    from mlflow.exceptions import MlflowException

    try:
        run = store.call(lambda: store.client.get_run(run_id))
        if run.info.lifecycle_stage == "deleted":
            raise _refused(f"{what}: its run {run_id} was deleted in MLflow")
        return Path(store.call(lambda: store.client.download_artifacts(run_id, ARTIFACTS, str(into))))
    except (MlflowException, OSError) as error:
        said = " ".join(str(error).split())
        check_store(store.uri)  # MLflow itself may be what is missing, or room: that refuses nothing
        _require_room(into, what)
        raise _refused(f"{what}: its artifacts cannot be fetched from run {run_id}: {said[:200]}") from error


def _require_room(into: Path, what: str) -> None:
    """Tell a download that found no room from one that found nothing: MLflow's error does not say which.

    Raises:
        UserError: there is no room.
    """
    with tempfile.TemporaryFile(dir=into) as probe:
        try:
            os.posix_fallocate(probe.fileno(), 0, _ROOM_BYTES)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise UserError(
                f"no room to fetch the artifacts of {what} into {into}",
                allowed="room for a copy of the models",
                next_step="free some space, or set TMPDIR to a folder on a disk that has some",
            ) from error


def _gate(folder: Path, what: str, version: Version) -> dict[str, Any]:
    """The verdict among the artifacts, when it lets the release pass."""
    if not (folder / "gate.json").is_file():
        raise _refused(f"{what}: artifact release/gate.json is missing")
    try:
        gate: dict[str, Any] = read_json(folder / "gate.json")
        failed = [check["name"] for check in refusing(gate)]
        verdict, _ = gate["verdict"], (gate["evidence"].items(), gate["evidence_sha256"])
    except (UserError, KeyError, TypeError, AttributeError) as error:
        raise _refused(f"{what}: release/gate.json cannot be read ({type(error).__name__})") from error
    if verdict != "pass" or failed:
        raise _refused(f"{what}: the gate refused it: {'; '.join(failed) or verdict}")
    if version.tags.get("gate") != "pass":
        raise _refused(f"{what}: its tag gate is {version.tags.get('gate')!r}, its gate report says pass")
    return gate


def _require_same(folder: Path, artifact: str, sha256: str, what: str) -> None:
    if ".." in PurePosixPath(artifact).parts or PurePosixPath(artifact).is_absolute():
        raise _refused(f"{what}: release/gate.json names the file {artifact!r}")
    path = folder / artifact
    found = sha256_of(path) if path.is_file() else "missing"
    if found != sha256:
        raise _refused(f"{what}: artifact release/{artifact} is {found}, the gate judged {sha256}")


def _attached(folder: Path, artifact: str, what: str) -> str:
    path = folder / artifact
    if not path.is_file():
        raise _refused(f"{what}: artifact release/{artifact} is missing")
    return sha256_of(path)


def _registered_hashes(made: Entry) -> dict[str, str]:
    return {"release_sha256": made.release_sha256, "evidence_sha256": made.evidence_sha256, **made.files}


def _unregistered(what: str) -> ReleaseRefusedError:
    return ReleaseRefusedError(
        f"{what} was registered by no build that this ledger knows",
        allowed="a version that `edgeloop build` registered in this repository",
        next_step="check out the commit it was built from and `edgeloop build`: the same files with the same "
        "evidence are registered in this ledger; or reject the version",
    )


def _refused(got: str) -> ReleaseRefusedError:
    return ReleaseRefusedError(
        got,
        allowed="a version that is as it was registered, in MLflow and in the ledger, and passed the gate",
        next_step="delete this version in MLflow and build: `edgeloop build` then registers a new one",
    )
