"""Prefect's server for whoever needs one: the one that PREFECT_API_URL names, else one kept for its users.

No other module decides where Prefect's state lies and who serves it (`flows/servers/keeper.py` says how).
"""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet.device.errors import EngineError, UserError
from flows.servers import keeper, process
from tasks.tracking import QUIET_TOOLS, shown, state_folder
from tasks.workspace import CODE, disk_full, python_path

_ANSWER_LIMIT_S = 5.0
_POLL_S = 0.1
_SPAWNS = 3
"""How often a keeper that ends as it starts is tried again: its port may just have been taken."""


@dataclass(frozen=True, kw_only=True)
class PrefectServer:
    """A server that answers."""

    url: str
    """Of its pages; the API lies below it."""
    own: bool
    """Kept for its users on this machine, not given by PREFECT_API_URL."""

    @property
    def api_url(self) -> str:
        """What PREFECT_API_URL is to be."""
        return f"{self.url}/api"


def home(folder: Path) -> Path:
    """Where Prefect keeps its state: PREFECT_HOME, else beside ours."""
    given = os.environ.get("PREFECT_HOME")
    return Path(given).absolute() if given else state_folder(folder) / "prefect"


@contextlib.contextmanager
def in_use(
    folder: Path, meanwhile: Callable[[], object] = tuple, avoid: Collection[int] = ()
) -> Iterator[PrefectServer]:
    """Use Prefect's server for the block; one is started when none runs, and ends after its last user.

    Args:
        folder: A workspace; its repository's state is served.
        meanwhile: Called while a server that had to be started comes up.
        avoid: Ports that are promised to other servers.

    Raises:
        UserError: PREFECT_API_URL names a server that does not answer.
        EngineError: none could be started.
    """
    if given := os.environ.get("PREFECT_API_URL"):
        if not process.answers(f"{given.rstrip('/')}/health", _ANSWER_LIMIT_S):
            raise UserError(
                f"Prefect at PREFECT_API_URL={shown(given)} does not answer",
                allowed="the address of a running Prefect server, http(s)://HOST:PORT/api",
                next_step="start that server, or unset PREFECT_API_URL: then edgeloop starts one of its own",
            )
        yield PrefectServer(url=given.rstrip("/").removesuffix("/api"), own=False)
        return
    state = home(folder)
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (state / keeper.USERS).open("a") as users:
        fcntl.flock(users, fcntl.LOCK_SH)  # waits while the last keeper puts things away
        yield PrefectServer(url=ensure(folder, meanwhile, avoid), own=True)


def running(folder: Path) -> str | None:
    """The address of the server that is kept for `folder` right now; None when none is."""
    record = _record(home(folder))
    return str(record["url"]) if record else None


def ensure(folder: Path, meanwhile: Callable[[], object] = tuple, avoid: Collection[int] = ()) -> str:
    """The address of the kept server, for who has it in use; started when nobody has, or when it has ended.

    Raises:
        EngineError: it could not be started.
    """
    state = home(folder)
    deadline = time.monotonic() + keeper.START_LIMIT_S
    spawned: subprocess.Popen[bytes] | None = None
    spawns = 0
    while time.monotonic() < deadline:
        record = _record(state)
        if record and process.answers(f"{record['url']}/api/health"):
            return str(record["url"])
        if not _is_kept(state) and (spawned is None or spawned.poll() is not None):
            if spawns == _SPAWNS:
                break
            spawned, spawns = _spawn(state, avoid), spawns + 1
            if spawns == 1:
                meanwhile()
        time.sleep(_POLL_S)
    failure = EngineError(f"Prefect's server could not be started; {state / keeper.LOG} says why")
    raise disk_full(failure, state) or failure


def _spawn(state: Path, avoid: Collection[int]) -> "subprocess.Popen[bytes]":
    with (state / "keeper.log").open("wb") as log:
        # A session of its own: Ctrl-C here must not take the server from the others who use it.
        return subprocess.Popen(
            [sys.executable, "-m", keeper.__name__, str(state), *map(str, avoid)],
            env=dict(os.environ) | QUIET_TOOLS | {"PYTHONPATH": python_path(CODE)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _is_kept(state: Path) -> bool:
    try:
        with (state / keeper.LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _record(state: Path) -> dict[str, Any] | None:
    """Where the kept server answers; None while it starts, or when what was written is a dead keeper's."""
    if not (state / keeper.LOCK).is_file() or not _is_kept(state):
        return None
    try:
        record = json.loads((state / keeper.LOCK).read_text(encoding="utf-8"))
        os.kill(int(record["pid"]), 0)  # a keeper that has just begun may not have wiped the last one's words
        return {"url": str(record["url"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None
