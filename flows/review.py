"""The review of releases as the command line and a build share it. Imports nothing heavy until called."""

import os
import sys
from typing import TYPE_CHECKING

from tasks.terminal import plain
from tasks.tracking import QUIET_TOOLS
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tasks.review.ledger import Entry


def catch_up(workspace: Workspace) -> None:
    """Take over what was decided in MLflow's pages, before a build is held against the champion.

    Takes milliseconds when there is nothing, with the embedded store.

    Raises:
        UserError: MLflow does not answer, or the ledger was tampered with.
    """
    from tasks.review.reconcile import reconcile, unreconciled

    if unreconciled(workspace):
        quiet_mlflow()
        print_found(reconcile(workspace))


def quiet_mlflow() -> None:
    """MLflow says nothing beside our results, and gives a server that went away up within seconds."""
    os.environ.update(QUIET_TOOLS)
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")


def print_found(found: "Iterable[Entry]") -> None:
    """What the ledger took over from MLflow, or finished, goes to stderr."""
    for entry in found:
        what = f"{entry.name} version {entry.version}" if entry.version is not None else entry.name
        alias = f" {entry.alias}" if entry.alias else ""
        said = f"{entry.action}{alias} by {entry.by}: {entry.why}"
        print(plain(f"ledger {entry.sequence}: {what}: {said}"), file=sys.stderr)
