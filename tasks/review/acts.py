"""The acts of `edgeloop release`: list, show, approve, reject. Importing this module imports MLflow."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException

from fleet.device.errors import EngineError, UserError
from tasks.mlflow_file import registered_name, workspace_of
from tasks.mlflow_store import Store
from tasks.review.author import Author
from tasks.review.decisions import Decision, decide
from tasks.review.desk import Desk, open_desk
from tasks.review.ledger import Draft, Entry, Ledger
from tasks.review.reconcile import has_store, reconcile_desk, require_none_known
from tasks.review.release import ReleaseRefusedError, require_version
from tasks.review.standing import State
from tasks.terminal import plain
from tasks.tracking import check_store, shown, state_folder, tracking_uri
from tasks.workspace import Workspace, workspaces


@dataclass(frozen=True, kw_only=True)
class Row:
    """One version, as `edgeloop release list` shows it."""

    name: str
    version: int
    state: State
    aliases: tuple[str, ...]
    gate: str
    release_sha256: str
    evidence_sha256: str
    git_commit: str
    build_id: str
    run_id: str
    reviewed_by: str
    reviewed_at: str
    why: str
    """Of the decision, or of the refusal."""


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """All about one version, as `edgeloop release show` shows it."""

    row: Row
    description: str
    """The gate's table, verified; else why it is not shown. What MLflow shows as description is not read."""
    tags: dict[str, str]
    artifacts: str
    """Where the run keeps the models, reports and predictions: a path with the embedded store, else a URI."""
    page: str
    """Of the version, below the address that `edgeloop ui` prints."""
    history: tuple[Entry, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON of the command line."""
        return asdict(self.row) | {
            "description": self.description,
            "tags": self.tags,
            "artifacts": self.artifacts,
            "page": self.page,
            "history": [asdict(entry) for entry in self.history],
        }


@dataclass(frozen=True, kw_only=True)
class Done:
    """What an act came to."""

    rows: tuple[Row, ...]
    found: tuple[Entry, ...]
    """What had happened in MLflow since the last time, as it went to the ledger."""


def rows(repository: Path) -> Done:
    """Every version of every workspace's model, the newest first.

    Raises:
        UserError: MLflow does not answer, or the ledger was tampered with.
    """
    if not has_store(tracking_uri(repository)):
        for workspace in workspaces(repository).values():
            require_none_known(workspace)
        return Done(rows=(), found=())
    store = _open(repository)
    listed: list[Row] = []
    found: list[Entry] = []
    for workspace in workspaces(repository).values():
        with _mlflow_answers(store.uri), open_desk(workspace, store) as desk:
            reconcile_desk(desk)
            _say_trouble(desk)
            found += desk.written
            listed += _rows(desk)
    return Done(rows=tuple(listed), found=tuple(found))


def sheet(repository: Path, name: str, version: int) -> tuple[Sheet, Done]:
    """One version with its gate table and history.

    Raises:
        UserError: there is no such version, MLflow does not answer, or the ledger was tampered with.
    """
    workspace = _workspace(repository, name)
    store = _open(repository)
    with _mlflow_answers(store.uri), open_desk(workspace, store) as desk:
        reconcile_desk(desk)
        _say_trouble(desk)
        reading, _, seen = desk.look()
        require_version(desk.name, version, seen)
        row = next(row for row in _rows(desk) if row.version == version)
        history = tuple(e for e in reading.entries if e.name == desk.name and e.version == version)
        return Sheet(
            row=row,
            description=_gate_table(desk, version),
            tags=dict(seen.versions[version].tags),
            artifacts=seen.versions[version].source.removeprefix("file://"),
            page=f"#/models/{desk.name}/versions/{version}",
            history=history,
        ), Done(rows=(row,), found=tuple(desk.written))


def act(repository: Path, decision: Decision, name: str, version: int, *, who: Author, why: str) -> Done:
    """Approve or reject a version.

    Raises:
        UserError: it was refused, or MLflow does not answer; the ledger says so in either case.
        EngineError: MLflow failed for another reason.
    """
    state = state_folder(repository)
    asked = Draft(
        action="asked",
        name=name,
        version=version,
        by=who.name,
        by_source=who.source,
        why=why,
        decision=decision,
    )
    try:
        workspace = _workspace(repository, name)
    except UserError as error:
        Ledger(state).append([replace(asked, action="refused", decision="", why=error.got)])
        raise
    asked = replace(asked, name=registered_name(workspace.name))
    try:
        store = _open(repository)
    except UserError as error:
        raise _kept(Ledger(state), asked, error) from error
    with open_desk(workspace, store) as desk:
        try:
            reconcile_desk(desk)
            found = tuple(desk.written)
            decide(desk, decision, version, who, why)
            _say_trouble(desk)
            return Done(rows=tuple(r for r in _rows(desk) if r.version == version), found=found)
        except MlflowException as error:
            raise _gone_meanwhile(desk, asked, error) from error


def _gate_table(desk: Desk, version: int) -> str:
    """What the gate wrote, from the artifacts."""
    try:
        with desk.fetched(version) as release:
            table = release.folder / "gate.md"
            if not table.is_file():  # an older ledger does not have its hash
                return "not shown: artifact release/gate.md is missing\n"
            return table.read_text(encoding="utf-8", errors="replace")
    except ReleaseRefusedError as error:
        return f"not shown, since it cannot be verified: {error.got}\n"


def _say_trouble(desk: Desk) -> None:
    """Name what is wrong with the champion beside the answer, which it does not keep from anybody."""
    if desk.trouble is not None:
        print(plain(f"edgeloop: {desk.trouble.got}; {desk.trouble.next_step}"), file=sys.stderr)


def _open(repository: Path) -> Store:
    """MLflow, asked first whether it answers: its client would try for minutes."""
    uri = tracking_uri(repository)
    check_store(uri)
    with _mlflow_answers(uri):
        return Store(uri, state_folder(repository))


@contextlib.contextmanager
def _mlflow_answers(uri: str) -> Iterator[None]:
    """Make one clear error of what MLflow's client raises when its store goes away."""
    try:
        yield
    except MlflowException as error:
        check_store(uri)
        raise EngineError(
            f"MLflow at {shown(uri)} failed", engine_said=" ".join(str(error).split())
        ) from error


def _kept(ledger: Ledger, asked: Draft, down: UserError) -> UserError:
    """Keep a decision that cannot be verified now; the error says where it is."""
    (entry,) = ledger.append([asked])
    return UserError(
        f"{down.got}. The decision is kept as entry {entry.sequence} of {ledger.path}",
        allowed=down.allowed,
        next_step="when MLflow answers again, `edgeloop release list` verifies it and carries it out",
    )


def _gone_meanwhile(desk: Desk, asked: Draft, error: MlflowException) -> UserError | EngineError:
    """What to raise when MLflow failed under a decision, which the ledger has or is given now."""
    written = [e for e in desk.written if e.action == asked.decision and e.version == asked.version]
    try:
        check_store(desk.store.uri)
    except UserError as down:
        if not written:
            return _kept(desk.ledger, asked, down)
        return UserError(
            f"{down.got}. The decision stands as entry {written[0].sequence} of {desk.ledger.path}",
            allowed=down.allowed,
            next_step="when MLflow answers again, `edgeloop release list` shows the decision there",
        )
    said = " ".join(str(error).split())
    where = f"; entry {written[0].sequence} of the ledger stands" if written else "; nothing was decided"
    return EngineError(f"MLflow at {shown(desk.store.uri)} failed{where}", engine_said=said)


def _workspace(repository: Path, name: str) -> Workspace:
    """The workspace of a registered model, which may be called by either name."""
    known = workspaces(repository)
    found = known.get(workspace_of(name))
    if found is None:
        raise UserError(
            f"model {name!r}",
            allowed=", ".join(map(registered_name, known)),
            next_step="`edgeloop release list` shows what is registered",
        )
    return found


def _rows(desk: Desk) -> list[Row]:
    _, now, seen = desk.look()
    made = []
    for number, version in sorted(seen.versions.items(), reverse=True):
        tags, review = version.tags, now.review(number)
        done = review.decided
        made.append(
            Row(
                name=desk.name,
                version=number,
                state=review.state,
                aliases=tuple(sorted(alias for alias, of in now.aliases.items() if of == number)),
                gate=tags.get("gate", ""),
                release_sha256=tags.get("release_sha256", ""),
                evidence_sha256=tags.get("evidence_sha256", ""),
                git_commit=tags.get("git_commit", ""),
                build_id=tags.get("build_id", ""),
                run_id=version.run_id,
                reviewed_by=done.by if done else "",
                reviewed_at=done.time if done else "",
                why=done.why if done else "",
            )
        )
    return made
