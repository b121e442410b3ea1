"""What the stages tell MLflow: params, metrics with live curves, artifacts, and where the result came from.

MLflow takes seconds to import and may be locked or down; a result must not wait for it or be lost with it. So
a stage appends to a file in a spool folder and goes on, and one child a build (`tasks/tracking_writer.py`)
carries the lines to MLflow while the stages work. What it could not deliver stays in the spool for the next
build's writer, with copies of the files to attach and with where the result came from, taken when the stage
began: a delivery days later tells of that moment, not of its own. The one thing checked before the work
starts is that the store answers at all.

Where it goes: MLFLOW_TRACKING_URI when set, else SQLite and files under `.edgeloop` of the repository. The
relative path of a file counts from where `edgeloop` was called, which hands it on to the stages. Which build
a run belongs to: EDGELOOP_BUILD_ID, which `edgeloop build` sets; else the `dvc repro` that started the stage;
else the stage is a build of its own.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import psutil

from fleet.device.errors import EdgeloopError, UserError
from tasks import provenance
from tasks.workspace import CODE, find_repository, python_path

BUILD_ID = "EDGELOOP_BUILD_ID"
BUILD_OWNER = "EDGELOOP_BUILD_OWNER"
"""Process id of what runs the build; its writer lives as long."""
INPUTS = "EDGELOOP_STAGE_INPUTS"
"""Tags over all that the stage reads, as JSON, where what started DVC had them at hand."""
# What the tools this project uses would otherwise send to their makers, or print on stdout among results.
QUIET_TOOLS = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "GX_ANALYTICS_ENABLED": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}

_ANSWER_TIMEOUT_S = 5.0
_DATABASES = ("postgresql", "mysql", "mssql")
_DEFAULT_PORTS = {"postgresql": 5432, "mysql": 3306}
_INPUTS_LIMIT_S = 60.0
_LOG = "writer.log"
_SQLITE = "sqlite:///"
_BUILD_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Run:
    """One stage's run. Its methods return at once and never wait for MLflow."""

    def __init__(self, spool: TextIO | None, copies: Path | None = None) -> None:
        """A run that writes to the file `spool` and copies artifacts into the folder `copies`, or nowhere."""
        self._spool, self._copies = spool, copies

    def metrics(self, values: Mapping[str, float], *, step: int | None = None) -> None:
        """Log numbers, at `step` for curves."""
        numbers = {key: float(value) for key, value in values.items()}
        self.tell(metrics=numbers, step=step or 0, time_ms=_now_ms())

    def artifact(self, path: Path) -> None:
        """Attach a file as it is now; told again, the later one counts."""
        if self._copies is None:
            return
        self._copies.mkdir(exist_ok=True)
        copy = Path(tempfile.mkdtemp(dir=self._copies)) / path.name
        shutil.copyfile(path, copy)
        self.tell(artifact=str(copy))

    def tags(self, values: Mapping[str, str]) -> None:
        """Set tags."""
        self.tell(tags=dict(values))

    def tell(self, **message: Any) -> None:
        """Append one message; `tasks/tracking_writer.py` lists the kinds there are."""
        if self._spool is not None:
            self._spool.write(json.dumps(message) + "\n")
            self._spool.flush()


@contextlib.contextmanager
def stage_run(name: str, params: Mapping[str, Any]) -> Iterator[Run]:
    """The nested run of one stage under its build's parent run.

    Raises:
        UserError: the tracking store does not answer; nothing has been computed yet.
    """
    if os.environ.get("RANK", "0") != "0":  # torchrun starts the stage once a process; the first one speaks
        yield Run(None)
        return
    uri, (build, owner) = tracking_uri(Path.cwd()), current_build()
    check_store(uri)
    folder = spool_folder(Path.cwd(), build)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.absolute() / f"{name}-{os.getpid()}.jsonl"
    address = os.environ.get("DVC_STAGE", "")  # set by DVC for the commands it runs
    with file.open("w", encoding="utf-8") as spool:
        run = Run(spool, copies_of(file))
        run.tell(
            stage=name,
            params=_flat(params),
            build_id=build,
            workspace=str(Path.cwd()),
            address=address,
            origin=provenance.origin(Path.cwd()),
            process=identity(psutil.Process()),
            time_ms=_now_ms(),
        )
        start_writer(folder, owner, uri)
        status = "FAILED"
        try:
            with _inputs(file, address):  # they are there before the writer reads of the end
                yield run
            status = "FINISHED"
        except EdgeloopError as error:
            run.tags({"error": str(error)})
            raise
        finally:
            run.tell(status=status, time_ms=_now_ms())


def copies_of(file: Path) -> Path:
    """Where the artifacts told of in a spool file are kept."""
    return file.with_suffix(".files")


def inputs_of(file: Path) -> Path:
    """Where the tags over all that a spool file's stage reads are kept."""
    return file.with_suffix(".inputs")


def stage_name(address: str) -> str:
    """A stage's name in its dvc.yaml, from how DVC addresses it: `presets/tiny/dvc.yaml:train`."""
    return address.rpartition("dvc.yaml:")[2]


@contextlib.contextmanager
def _inputs(file: Path, address: str) -> Iterator[None]:
    """Keep the tags over what the stage reads: known, or from a child that hashes while the stage begins."""
    if not address:
        yield
        return
    if known := os.environ.get(INPUTS):
        inputs_of(file).write_text(known, encoding="utf-8")
        yield
        return
    command = [sys.executable, "-m", "tasks.provenance", str(Path.cwd()), stage_name(address)]
    with inputs_of(file).open("wb") as out, (file.parent / _LOG).open("a", encoding="utf-8") as log:
        child = subprocess.Popen(command, env=_child_environment(), stdout=out, stderr=log)
        try:
            yield
        finally:
            try:
                code = child.wait(_INPUTS_LIMIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                code = child.wait()
            if code:
                print(f"{file.name}: hashing what it reads ended with {code}", file=log, flush=True)


def _child_environment() -> dict[str, str]:
    return dict(os.environ) | QUIET_TOOLS | {"PYTHONPATH": python_path(CODE)}


def shown(uri: str) -> str:
    """A store's URI as it may be printed: without user, password and query."""
    scheme, mark, rest = uri.partition("://")
    if scheme == "sqlite":  # a file's path, where an `@` is a letter
        return uri.partition("?")[0]
    if not mark:
        scheme, rest = "", uri
    # As text: parsed, a password with `#`, `/` or `?` in it would end up in other parts of the URI.
    user, at, place = rest.rpartition("@")
    if "=" in user.partition("?")[2]:  # the `@` is not before the host but in the query
        return f"{scheme}{mark}***"
    return scheme + mark + ("***@" if at else "") + place.partition("?")[0]


def tracking_uri(folder: Path) -> str:
    """Where runs of workspaces around `folder` are stored; a file's path is absolute."""
    given = os.environ.get("MLFLOW_TRACKING_URI")
    if not given:
        return _sqlite_uri(state_folder(folder) / "mlflow.db")
    file = sqlite_file(given)
    if file is None or file.is_absolute():
        return given
    return f"{_sqlite_uri(Path.cwd())}/{given.removeprefix(_SQLITE)}"


def sqlite_file(uri: str) -> Path | None:
    """The file that MLflow keeps a store in; None when the store is of another kind."""
    if not uri.startswith(_SQLITE):
        return None
    return Path(urllib.parse.unquote(uri.removeprefix(_SQLITE).partition("?")[0]))


def _sqlite_uri(file: Path) -> str:
    """A file as MLflow reads it: `%` begins an escape, `?` the options."""
    return _SQLITE + str(file).replace("%", "%25").replace("?", "%3F")


@contextlib.contextmanager
def reading(database: Path) -> Iterator[sqlite3.Connection]:
    """A store's file, opened for the block and not to be written.

    With a journal beside it, left by a writer that was killed, SQLite must roll back before anybody can read.
    """
    journal = database.with_name(f"{database.name}-journal")
    address = f"{database.absolute().as_uri()}?mode={'rw' if journal.exists() else 'ro'}"
    with contextlib.closing(sqlite3.connect(address, uri=True)) as connection:
        yield connection


def state_folder(folder: Path) -> Path:
    """`.edgeloop` of the repository around `folder`, or of `folder` itself where there is none."""
    return (find_repository(folder.absolute()) or folder.absolute()) / ".edgeloop"


def spool_folder(folder: Path, build: str) -> Path:
    """Where a build's messages wait for their writer; gone when all are delivered."""
    return state_folder(folder) / "spool" / build


def is_server(uri: str) -> bool:
    """Whether MLflow is asked through a server of its own, which has pages of its own."""
    return uri.startswith(("http://", "https://"))


def check_store(uri: str) -> None:
    """See that the tracking store can be reached, within seconds.

    Raises:
        UserError: its server does not answer, its driver is not installed, or its file cannot be written.
    """
    database, trouble = sqlite_file(uri), ""
    if is_server(uri):
        trouble = _server_trouble(uri)
    elif database is not None:
        trouble = _file_trouble(database)
    elif uri.startswith(_DATABASES):
        trouble = _database_trouble(uri)
    else:
        trouble = "this kind of store is not known"
    if trouble:
        raise UserError(
            f"MLflow at {shown(uri)}: {trouble}",
            allowed="a store that answers: sqlite:///FILE, http(s)://HOST, postgresql, mysql or mssql",
            next_step="start that server, install its driver, or unset MLFLOW_TRACKING_URI; bring a damaged "
            ".edgeloop/mlflow.db back from a copy. Without one move it and .edgeloop/ledger.jsonl away: "
            "builds go on with new ones, models and reports are not in them",
        )


def _server_trouble(uri: str) -> str:
    """Why a server cannot be used, without the user and password of its URI; empty when it answers."""
    from tasks.http_probe import ask  # 40 ms that stages with the embedded store need not spend

    asked = ask(uri, "/health", timeout_s=_ANSWER_TIMEOUT_S)
    return "" if asked.answer == "answers" else f"{asked.answer}: {asked.detail}"


def _database_trouble(uri: str) -> str:
    """Why a database server cannot be used, without what its URI says; empty when it listens."""
    from sqlalchemy.engine import make_url  # MLflow's; 150 ms that the embedded store need not spend
    from sqlalchemy.exc import SQLAlchemyError

    try:
        url = make_url(uri)
        url.get_dialect().import_dbapi()
        port = url.port or _DEFAULT_PORTS.get(url.get_backend_name())
        if url.host and port and not url.query:  # a query may name another way: a socket file, several hosts
            socket.create_connection((url.host, port), _ANSWER_TIMEOUT_S).close()
    except ImportError as error:
        return f"its Python driver `{error.name}` is not installed in {sys.prefix}"
    except (SQLAlchemyError, ValueError):  # these quote what they could not read
        return "this address cannot be read, or SQLAlchemy knows no such database and driver"
    except OSError as error:
        return str(error)
    return ""


def _file_trouble(database: Path) -> str:
    """Why a file cannot be used as a store; empty when it can. Made when it is missing."""
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        database.open("ab").close()
        if database.stat().st_size:
            with reading(database) as connection:
                connection.execute("select count(*) from sqlite_master").fetchone()
    except (OSError, ValueError, sqlite3.Error) as error:
        return str(error)
    return ""


def current_build() -> tuple[str, psutil.Process]:
    """The id of the build this process works for, the same for all its stages, and the process that runs it.

    Raises:
        UserError: EDGELOOP_BUILD_ID cannot be a file name.
    """
    me = psutil.Process()
    dvc = [p for p in me.parents() if "DVC_ROOT" in os.environ and _is_dvc(p)]
    kind, owner = ("repro", dvc[0]) if dvc else ("stage", me)
    if given := os.environ.get(BUILD_ID):
        if not _BUILD_ID_PATTERN.fullmatch(given):
            raise UserError(
                f"{BUILD_ID}={given!r}",
                allowed="letters, digits, `.`, `_` and `-`, at most 100",
                next_step=f"choose another id, or unset {BUILD_ID}",
            )
        pid = int(os.environ.get(BUILD_OWNER, "0"))
        return given, psutil.Process(pid) if psutil.pid_exists(pid) and pid else owner
    started = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(owner.create_time()))
    return f"{kind}-{started}-{owner.pid}", owner


def _is_dvc(process: psutil.Process) -> bool:
    try:
        return any(Path(word).name == "dvc" for word in process.cmdline())
    except psutil.Error:  # gone, or another user's
        return False


def identity(process: psutil.Process) -> list[float]:
    """Process id and start time; the id alone is given again to others."""
    return [process.pid, process.create_time()]


def is_alive(who: list[float]) -> bool:
    """Whether the process of that identity still runs."""
    try:
        process = psutil.Process(int(who[0]))
        return process.create_time() == who[1] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def sole_writer(folder: Path) -> Iterator[bool]:
    """Hold a spool folder's lock for the block; False when a writer has it already."""
    with (folder / "writer.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def start_writer(folder: Path, owner: psutil.Process, uri: str) -> None:
    """See that a writer works on the spool folder as long as `owner` lives."""
    with sole_writer(folder) as free:
        if not free:
            return
    # By the environment, which only this user can read: a store's URI may hold a password.
    env = _child_environment() | {"MLFLOW_LOGGING_LEVEL": "WARNING", "MLFLOW_TRACKING_URI": uri}
    command = [sys.executable, "-m", "tasks.tracking_writer", str(folder), json.dumps(identity(owner))]
    with (folder / _LOG).open("ab") as log:
        # A session of its own: Ctrl-C ends the stage, and the writer lives on to say so.
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
        )


def wait_until_written(folder: Path, timeout_s: float) -> bool:
    """Wait until MLflow has all of a build whose stages have ended; False when the limit is reached."""
    deadline = time.monotonic() + timeout_s
    while any(folder.glob("*.jsonl")):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = str(value)
    return flat
