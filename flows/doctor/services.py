"""What edgeloop talks to: MLflow's store and Prefect's server, embedded or somebody's own."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from fleet.device.errors import UserError
from flows.doctor.finding import REINSTALL, Finding
from flows.servers import prefect_server
from tasks.http_probe import Answer, Asked, ask
from tasks.tracking import check_store, is_server, reading, shown, sqlite_file, tracking_uri

_AWAY = "and .edgeloop/ledger.jsonl away: builds go on with new ones; models and reports are not in them"
_LEAST_FREE_GB = 0.5
_REVISION = re.compile(r"^(down_)?revision(?::[^=]*)?\s*=\s*(.+)$", re.MULTILINE)
_QUIET_S = 0.2


def check_mlflow(root: Path) -> Iterator[Finding]:
    """Whether MLflow's store can be used: opens, whole, of this MLflow's schema, and nobody holds it."""
    uri = tracking_uri(root)
    database = sqlite_file(uri)
    if database is not None and not database.exists():
        yield Finding(check="mlflow", status="ok", found=f"no runs yet; the first build makes {database}")
    elif database is not None:
        yield from _database(database)
    elif is_server(uri):
        yield _mlflow_server(uri)
    else:
        try:
            check_store(uri)
        except UserError as error:
            yield Finding.of_error("mlflow", error)
            return
        yield Finding(
            check="mlflow",
            status="warning",
            found=f"{shown(uri)}: a database server, which only MLflow can ask",
            next_step="`edgeloop ui` shows whether it answers",
        )


def _database(database: Path) -> Iterator[Finding]:
    trouble, step = _database_trouble(database)
    yield Finding(
        check="mlflow",
        status="problem" if trouble else "ok",
        found=f"{database}: {trouble or 'opens, whole'}",
        next_step=step,
    )
    if trouble:
        return
    yield _schema(database)
    free_gb = shutil.disk_usage(database.parent).free / 1e9
    if free_gb < _LEAST_FREE_GB:
        yield Finding(
            check="mlflow disk",
            status="problem",
            found=f"{free_gb:.2f} GB free at {database.parent}",
            next_step="free some space: runs and artifacts are written there",
        )
    yield _write_lock(database)


def _database_trouble(database: Path) -> tuple[str, str]:
    """What is wrong with a store's file and how to go on; empty when nothing is."""
    if not os.access(database, os.R_OK | os.W_OK):
        return "cannot be read and written", "give yourself access to it"
    if not database.stat().st_size:
        return "", ""
    try:
        with reading(database) as connection:
            (verdict,) = connection.execute("pragma quick_check").fetchone()
    except sqlite3.OperationalError as problem:
        if "locked" in str(problem):
            return "", ""  # by a writer, of whom is spoken apart
        verdict = str(problem)
    except (sqlite3.Error, UnicodeDecodeError) as problem:  # a damaged file may hold any bytes as text
        verdict = f"damaged: {problem}"
    return ("", "") if verdict == "ok" else (verdict, f"move {database} {_AWAY}")


def _schema(database: Path) -> Finding:
    """The revision of the tables against those that the installed MLflow knows."""
    try:
        with reading(database) as connection:
            rows = connection.execute("select version_num from alembic_version").fetchall()
    except (sqlite3.Error, UnicodeDecodeError):
        return Finding(check="mlflow schema", status="ok", found="not made yet, or being made")
    have = rows[0][0] if rows else ""
    revisions, heads = _revisions()
    if not heads:
        return Finding(
            check="mlflow schema",
            status="problem",
            found="the installed MLflow lacks its migrations",
            next_step=REINSTALL,
        )
    if have in heads:
        return Finding(check="mlflow schema", status="ok", found=f"{have}, as the installed MLflow has it")
    if have in revisions:
        return Finding(
            check="mlflow schema",
            status="warning",
            found=f"{have}, older than the installed MLflow's {', '.join(sorted(heads))}",
            next_step=f"copy {database} away, then `mlflow db upgrade sqlite:///{database}`",
        )
    return Finding(
        check="mlflow schema",
        status="problem",
        found=f"{have}, which the installed MLflow does not know: a newer one made it",
        next_step=f"install the MLflow of requirements.lock that made it, or move {database} {_AWAY}",
    )


def _revisions() -> tuple[set[str], set[str]]:
    """All revisions of the installed MLflow's schema and the newest; read, as importing it takes seconds."""
    spec = importlib.util.find_spec("mlflow")
    places = (spec.submodule_search_locations if spec else None) or [""]
    folder = Path(places[0]) / "store" / "db_migrations" / "versions"
    revisions: set[str] = set()
    earlier: set[str] = set()
    for file in folder.glob("*.py"):
        for down, value in _REVISION.findall(file.read_text(encoding="utf-8")):
            (earlier if down else revisions).update(re.findall(r"[\"'](\w+)[\"']", value))
    return revisions, revisions - earlier


def _write_lock(database: Path) -> Finding:
    """Whether somebody writes for longer than a moment; nothing is written."""
    uri = f"{database.absolute().as_uri()}?mode=rw"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_QUIET_S)) as connection:
            connection.execute("begin immediate")
            connection.rollback()
    except sqlite3.OperationalError as problem:
        return Finding(
            check="mlflow lock",
            status="warning",
            found=f"{database}: {problem}",
            next_step="a build or `edgeloop ui` writes now; if none runs, end what holds it: "
            f"`fuser {database}`",
        )
    return Finding(check="mlflow lock", status="ok", found="nobody holds it")


def _mlflow_server(uri: str) -> Finding:
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD"))
    basic = f"{user}:{password}" if user else None
    path = "/api/2.0/mlflow/experiments/search?max_results=1"
    asked = _asked_for_json(uri, path, basic, token)
    return _server("mlflow", f"MLflow at {shown(uri)}", asked, _MLFLOW_STEPS)


_MLFLOW_STEPS: dict[Answer, str] = {
    "refuses us": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    "is absent": "start that server, or unset MLFLOW_TRACKING_URI for the embedded store",
    "answers otherwise": "see that MLFLOW_TRACKING_URI names an MLflow server, with its prefix if it has one",
    "cannot be read": "correct MLFLOW_TRACKING_URI: http(s)://HOST[:PORT]",
}


def check_prefect(root: Path) -> Iterator[Finding]:
    """Whether Prefect's server answers, where builds are told to use one."""
    uri = os.environ.get("PREFECT_API_URL")
    if not uri:
        url, home = prefect_server.running(root), prefect_server.home(root)
        found = (
            f"{url}, in use now" if url else f"no server runs; what needs one starts it, its state in {home}"
        )
        yield Finding(check="prefect", status="ok", found=found)
        return
    key, basic = os.environ.get("PREFECT_API_KEY"), os.environ.get("PREFECT_API_AUTH_STRING")
    asked = _asked_for_json(uri, "/admin/version", basic, key)
    yield _server("prefect", f"Prefect at {shown(uri)}", asked, _PREFECT_STEPS)


_PREFECT_STEPS: dict[Answer, str] = {
    "refuses us": "set PREFECT_API_AUTH_STRING (USER:PASSWORD) or PREFECT_API_KEY",
    "is absent": "start that server, or unset PREFECT_API_URL",
    "answers otherwise": "see that PREFECT_API_URL ends in /api and names a Prefect server",
    "cannot be read": "correct PREFECT_API_URL: http(s)://HOST[:PORT]/api",
}


def _server(check: str, name: str, asked: Asked, steps: dict[Answer, str]) -> Finding:
    good = asked.answer == "answers"
    return Finding(
        check=check,
        status="ok" if good else "problem",
        found=f"{name} {asked.answer}" + (f": {asked.detail}" if asked.detail else ""),
        next_step="" if good else steps[asked.answer],
    )


def _asked_for_json(uri: str, path: str, basic: str | None, bearer: str | None) -> Asked:
    """What becomes of a request that wants permission, unlike one for /health, which answers whoever asks."""
    asked = ask(uri, path, basic=basic, bearer=bearer)
    try:
        if asked.answer == "answers":
            json.loads(asked.body)
    except ValueError:
        return Asked(answer="answers otherwise", detail="no JSON")
    return asked
