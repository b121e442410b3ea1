"""`edgeloop release`: what waits for review, and the decisions on it. Imports nothing heavy until called."""

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from tasks.tracking import QUIET_TOOLS
from tasks.workspace import Workspace, repository

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tasks.review.acts import Row, Sheet
    from tasks.review.ledger import Entry

AsJson = Annotated[bool, Parameter(name="--json", negative="")]

release = App(
    name="release",
    help="Review what `edgeloop build` registered. Approving a version makes it the champion.",
)


@release.command(name="list")
def list_(
    *,
    state: Literal["pending", "approved", "rejected", "refused"] | None = None,
    as_json: AsJson = False,
) -> int:
    """Show the registered versions and how their review stands.

    Args:
        state: Only versions in this state; `refused` is an approval that did not survive verification.
        as_json: Print the versions as JSON.
    """
    _quiet()
    from tasks.review.acts import rows

    done = rows(repository())
    _print_found(done.found)
    chosen = [row for row in done.rows if state in (None, row.state)]
    if as_json:
        print(json.dumps([asdict(row) for row in chosen], indent=1))
    elif chosen:
        _print_rows(chosen)
    else:
        print(f"no version is {state}" if state else "nothing is registered yet; `edgeloop build` does")
    return 0


@release.command
def show(name: str, version: int, *, as_json: AsJson = False) -> int:
    """Show a version's gate table, origin, artifacts and history.

    Args:
        name: The registered model, or its workspace.
        version: Its number.
        as_json: Print it as JSON.
    """
    _quiet()
    from tasks.review.acts import sheet

    found, done = sheet(repository(), name, version)
    _print_found(done.found)
    print(json.dumps(found.to_dict(), indent=1) if as_json else _sheet_text(found))
    return 0


@release.command
def approve(name: str, version: int, *, why: str, by: str | None = None) -> int:
    """Verify a version's artifacts and make it the champion.

    Args:
        name: The registered model, or its workspace.
        version: Its number.
        why: The reason, in words.
        by: Who decides. Default: git's user, else the system's.
    """
    return _decide("approved", name, version, why, by)


@release.command
def reject(name: str, version: int, *, why: str, by: str | None = None) -> int:
    """Reject a version; an approved one loses its place, a champion to the one before.

    Args:
        name: The registered model, or its workspace.
        version: Its number.
        why: The reason, in words.
        by: Who decides. Default: git's user, else the system's.
    """
    return _decide("rejected", name, version, why, by)


def catch_up(workspace: Workspace) -> None:
    """Take over what was decided in MLflow's pages, before a build is held against the champion.

    Takes milliseconds when there is nothing, with the embedded store.

    Raises:
        UserError: MLflow does not answer, or the ledger was tampered with.
    """
    from tasks.review.reconcile import reconcile, unreconciled

    if unreconciled(workspace):
        _quiet()
        _print_found(reconcile(workspace))


def _decide(
    decision: Literal["approved", "rejected"], name: str, version: int, why: str, by: str | None
) -> int:
    _quiet()
    from tasks.review.author import author, checked_text

    who, reason = author(repository(), by), checked_text("--why", why)
    from tasks.review.acts import act

    done = act(repository(), decision, name, version, who=who, why=reason)
    _print_found(done.found)
    row = done.rows[0]
    print(f"{row.name} version {row.version}: {row.state} by {plain(who.name)} ({who.source})")
    print(_standing(row))
    return 0


def _standing(row: "Row") -> str:
    if row.aliases:
        return f"aliases: {', '.join(row.aliases)}"
    return "aliases: none"


def _quiet() -> None:
    """MLflow says nothing beside our results, and gives a server that went away up within seconds."""
    os.environ.update(QUIET_TOOLS)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")


def _print_found(found: "Iterable[Entry]") -> None:
    """What the ledger took over from MLflow, or finished, goes to stderr."""
    for entry in found:
        what = f"{entry.name} version {entry.version}" if entry.version is not None else entry.name
        alias = f" {entry.alias}" if entry.alias else ""
        said = f"{entry.action}{alias} by {plain(entry.by)}: {plain(entry.why)}"
        print(f"ledger {entry.sequence}: {what}: {said}", file=sys.stderr)


def _print_rows(rows: "Iterable[Row]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("model", "version", "state", "alias", "gate", "evidence", "decided", "by", "why", box=None)
    for row in rows:
        cells = (row.name, str(row.version), row.state, ", ".join(row.aliases), row.gate)
        decided = (row.evidence_sha256[:12], row.reviewed_at, row.reviewed_by, row.why)
        table.add_row(*(Text(plain(cell)) for cell in (*cells, *decided)))
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160).print(table)


def _sheet_text(found: "Sheet") -> str:
    row = found.row
    lines = [
        f"{row.name} version {row.version}: {row.state}"
        + (f" ({', '.join(row.aliases)})" if row.aliases else ""),
        f"  built      {row.build_id}, commit {row.git_commit}",
        f"  evidence   {row.evidence_sha256}",
        f"  release    {row.release_sha256}",
        f"  artifacts  {found.artifacts}",
        f"  page       {found.page} of `edgeloop ui`",
        "",
        found.description.strip(),
        "",
        "history:",
        *(
            f"  {e.sequence}  {e.time}  {e.action}{' ' + e.alias if e.alias else ''}, {plain(e.by)}"
            f" ({e.by_source}): {plain(e.why)}"
            for e in found.history
        ),
    ]
    return "\n".join(lines)


def plain(text: str) -> str:
    """Text that others wrote, on one line and without what would steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
