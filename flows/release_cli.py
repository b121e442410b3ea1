"""`edgeloop release`: what waits for review, and the decisions on it. Imports nothing heavy until called."""

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from fleet.device.errors import UserError
from flows.review import print_found, quiet_mlflow
from tasks import champion_files
from tasks.terminal import plain, plain_lines
from tasks.workspace import repository, workspaces

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tasks.review.acts import Row, Sheet

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
    quiet_mlflow()
    from tasks.review.acts import rows

    done = rows(repository())
    print_found(done.found)
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
    """Show a version's gate table (in Markdown, as MLflow has it), origin, artifacts and history.

    Args:
        name: The registered model, or its workspace.
        version: Its number.
        as_json: Print it as JSON.
    """
    quiet_mlflow()
    from tasks.review.acts import sheet

    found, done = sheet(repository(), name, version)
    print_found(done.found)
    print(json.dumps(found.to_dict(), indent=1) if as_json else _sheet_text(found))
    return 0


@release.command
def approve(name: str, version: int, *, why: str | None = None, by: str | None = None) -> int:
    """Verify a version's artifacts and make it the champion.

    Args:
        name: The registered model, or its workspace.
        version: Its number.
        why: The reason, in words; required.
        by: Who decides. Default: git's user, else the system's.
    """
    return _decide("approved", name, version, why, by)


@release.command
def reject(name: str, version: int, *, why: str | None = None, by: str | None = None) -> int:
    """Reject a version; an approved one loses its place, a champion to the one before.

    Args:
        name: The registered model, or its workspace.
        version: Its number.
        why: The reason, in words; required.
        by: Who decides. Default: git's user, else the system's.
    """
    return _decide("rejected", name, version, why, by)


def _decide(
    decision: Literal["approved", "rejected"], name: str, version: int, why: str | None, by: str | None
) -> int:
    if why is None:
        raise UserError(
            "no --why: --why TEXT is required",
            allowed="the reason, in words",
            next_step=f'say it: --why "..."; version {version} of {name} stays as it is',
        )
    quiet_mlflow()
    from tasks.review.author import author, checked_text

    who, reason = author(repository(), by), checked_text("--why", why)
    from tasks.review.acts import act

    done = act(repository(), decision, name, version, who=who, why=reason)
    print_found(done.found)
    row = done.rows[0]
    print(f"{row.name} version {row.version}: {row.state} by {plain(who.name)} ({who.source})")
    print(f"aliases: {', '.join(row.aliases) or 'none'}")
    if decision == "approved":
        print(f"next: commit {_champion_folder(row.name)}; the next build is judged once more, against it")
    return 0


def _champion_folder(name: str) -> str:
    from tasks.mlflow_file import workspace_of

    folder = workspaces(repository())[workspace_of(name)].path / champion_files.FOLDER
    return plain(os.path.relpath(folder))


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
    aliases = f" ({', '.join(row.aliases)})" if row.aliases else ""
    head = (
        f"{row.name} version {row.version}: {row.state}{aliases}",
        f"  built      {row.build_id}, commit {row.git_commit}",
        f"  evidence   {row.evidence_sha256}",
        f"  release    {row.release_sha256}",
        f"  artifacts  {found.artifacts}",
        f"  page       {found.page} of `edgeloop ui`",
    )
    history = (
        f"  {e.sequence}  {e.time}  {e.action}{' ' + e.alias if e.alias else ''}, {e.by}"
        f" ({e.by_source}): {e.why}"
        for e in found.history
    )
    text = plain_lines(found.description.strip())  # of several lines; of the rest each is one
    return "\n".join([*map(plain, head), "", text, "", "history:", *map(plain, history)])
