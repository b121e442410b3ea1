"""What edgeloop talks to: MLflow's store."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

from fleet.device.errors import UserError
from flows.doctor.finding import Finding
from tasks.tracking import check_store, reading, shown, sqlite_file, tracking_uri

_AWAY = "away: builds go on with a new one; models and reports are not in it"


def check_tracking(root: Path) -> Iterator[Finding]:
    """Whether MLflow's store can be used: a build's own check, and of a file SQLite's too."""
    uri = tracking_uri(root)
    database = sqlite_file(uri)
    if database is not None and not database.exists():
        yield Finding(check="mlflow", status="ok", found=f"no runs yet; the first build makes {database}")
        return
    try:
        check_store(uri)
    except UserError as error:
        yield Finding.of_error("mlflow", error)
        return
    if database is not None:
        yield _database(database)
    elif uri.startswith("http"):
        yield Finding(check="mlflow", status="ok", found=f"{shown(uri)} answers")
    else:
        yield Finding(
            check="mlflow",
            status="warning",
            found=f"{shown(uri)}: a database server, which only MLflow can ask",
            next_step="`edgeloop ui` shows whether it answers",
        )


def _database(database: Path) -> Finding:
    try:
        with reading(database) as connection:
            (verdict,) = connection.execute("pragma quick_check").fetchone()
    except sqlite3.Error as problem:
        verdict = str(problem)
    good = verdict == "ok"
    return Finding(
        check="mlflow",
        status="ok" if good else "problem",
        found=f"{database}: {verdict}",
        next_step="" if good else f"move {database} {_AWAY}",
    )
