"""Ledger and MLflow brought together: decisions made in MLflow are taken over, other edits put back."""

import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fleet.device.errors import UserError
from tasks.mlflow_file import Snapshot, artifact_uri, registered_name, snapshot
from tasks.review.author import THROUGH_MLFLOW, Author, through_mlflow
from tasks.review.champion_folder import is_crowned
from tasks.review.ledger import Action, Draft, Entry, Ledger
from tasks.review.registry import Difference, differences, is_shown, require_known
from tasks.review.release import ARTIFACTS, ReleaseRefusedError
from tasks.review.standing import CANDIDATE, CHAMPION, PREVIOUS, Standing, standing
from tasks.tracking import sqlite_file, state_folder, tracking_uri
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from tasks.review.desk import Desk

_NO_REASON = "no reason given: the tag review_reason is empty"


def reconcile(workspace: Workspace) -> list[Entry]:
    """Take over what happened in MLflow since the last time; imports MLflow, which takes seconds.

    Returns:
        What was added to the ledger.

    Raises:
        UserError: MLflow does not answer, the ledger was tampered with, or champion/ cannot be made the
            ledger's champion.
    """
    from tasks.review.desk import open_desk

    if not has_store(tracking_uri(workspace.path)):
        require_none_known(workspace)
        return []
    with open_desk(workspace) as desk:
        reconcile_desk(desk)
        desk.require_crowned()
        return desk.written


def unreconciled(workspace: Workspace) -> bool:
    """Whether `reconcile` would find something, asked in milliseconds.

    Only the embedded store's file can be read without MLflow; for any other the answer is yes.
    """
    uri = tracking_uri(workspace.path)
    database, name = sqlite_file(uri), registered_name(workspace.name)
    if database is None:
        return True
    try:
        reading = Ledger(state_folder(workspace.path)).read()
        if not has_store(uri):
            return bool(standing(reading.entries, name).versions)
        now, shown = standing(reading.entries, name), snapshot(database, name)
        misled = _misled(database, now, shown)
    except (UserError, sqlite3.Error):  # what is wrong `reconcile` says
        return True
    begun = bool(now.asked or now.unpromoted) or not is_shown(now, shown, reading)
    return (
        begun
        or misled
        or not is_crowned(workspace.path, name, now)
        or bool(differences(now, shown, reading))
        or bool(reading.unfinished)
    )


def _misled(database: Path, now: Standing, shown: Snapshot) -> bool:
    """Whether who resolves the champion, or the one before, finds other files than its run's."""
    bearers = [now.aliases[alias] for alias in (CHAMPION, PREVIOUS) if alias in now.aliases]
    found = [shown.versions[version] for version in bearers if version in shown.versions]
    return any(v.source != f"{artifact_uri(database, v.run_id)}/{ARTIFACTS}" for v in found)


def has_store(uri: str) -> bool:
    """Whether there is something to reconcile with: asking MLflow for an embedded store would make one."""
    database = sqlite_file(uri)
    return database is None or (database.is_file() and database.stat().st_size > 0)


def require_none_known(workspace: Workspace) -> None:
    """Where there is no store at all, there must be no version in the ledger either.

    Raises:
        UserError: there is one, or the ledger was tampered with.
    """
    reading, name = Ledger(state_folder(workspace.path)).read(), registered_name(workspace.name)
    uri = tracking_uri(workspace.path)
    require_known(uri, name, standing(reading.entries, name), Snapshot(), reading)


def reconcile_desk(desk: "Desk") -> None:
    """`reconcile` at a desk that is open."""
    reading, now, shown = desk.look()
    found = differences(now, shown, reading)
    approved_now = {d.version for d in found if d.kind == "decision" and d.found == "approved"}
    for difference in found:
        if difference.kind == "deleted":
            _deleted(desk, difference)
    for difference in found:
        if difference.kind == "alias" and difference.version not in approved_now:
            _moved(desk, difference)
    desk.write([_edited(desk, d) for d in found if d.kind == "edited"])
    for difference in found:
        if difference.kind == "decision":
            _decided(desk, difference, shown)
    for entry in now.asked:
        _carry_out(
            desk, entry.decision, entry.version, Author(name=entry.by, source=entry.by_source), entry.why
        )
    desk.settle()


def _deleted(desk: "Desk", difference: Difference) -> None:
    assert difference.version is not None
    why = "the version is no longer in MLflow"
    gone = desk.draft("deleted", difference.version, THROUGH_MLFLOW, why)
    # The heir first: should the last line be lost, the version is found deleted again.
    desk.write([*desk.dethrone(difference.version, gone), gone])


def _moved(desk: "Desk", difference: Difference) -> None:
    """An alias moved by hand: champion to an approved version is a promotion, anything else is put back."""
    _, now, _ = desk.look()
    alias, version = difference.key, difference.version
    if alias == CANDIDATE:
        desk.write([_about_alias(desk, "alias", alias, version, "moved in MLflow")])
        return
    if alias == CHAMPION and version is not None and now.review(version).state == "approved":
        try:
            with desk.fetched(version):
                reason = desk.draft("alias", version, THROUGH_MLFLOW, "alias champion was moved in MLflow")
                desk.promote(version, reason)
                return
        except ReleaseRefusedError as error:
            desk.write([desk.draft("refused", version, THROUGH_MLFLOW, error.got)])
    back = int(difference.expected) if difference.expected else None
    found = f"version {difference.found}" if difference.found else "gone"
    why = f"alias {alias} was {found} in MLflow; put back to {difference.expected or 'no version'}"
    desk.write([_about_alias(desk, "tag_changed", alias, back, why)])


def _about_alias(desk: "Desk", action: Action, alias: str, version: int | None, why: str) -> Draft:
    who = THROUGH_MLFLOW
    if version is not None:
        return replace(desk.draft(action, version, who, why), alias=alias)
    return Draft(action=action, name=desk.name, alias=alias, by=who.name, by_source=who.source, why=why)


def _edited(desk: "Desk", difference: Difference) -> Draft:
    assert difference.version is not None
    why = f"tag {difference.key} was {difference.found!r} in MLflow; put back to {difference.expected!r}"
    return desk.draft("tag_changed", difference.version, THROUGH_MLFLOW, why)


def _decided(desk: "Desk", difference: Difference, shown: Snapshot) -> None:
    assert difference.version is not None
    tags = shown.versions[difference.version].tags
    why = tags.get("review_reason", "").strip() or _NO_REASON
    _carry_out(desk, difference.found, difference.version, through_mlflow(tags.get("reviewed_by")), why)


def _carry_out(desk: "Desk", decision: str | None, version: int | None, who: Author, why: str) -> None:
    """A decision nobody waits for: refused, it is in the ledger and in the version's tags."""
    from tasks.review.decisions import decide

    assert version is not None
    try:
        decide(desk, "approved" if decision == "approved" else "rejected", version, who, why)
    except ReleaseRefusedError:
        return
