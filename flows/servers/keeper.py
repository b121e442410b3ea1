"""The process that keeps Prefect's server as long as anybody uses it.

    python -m flows.servers.keeper FOLDER [PORT ...]

Each PORT is promised to another server. FOLDER is Prefect's home. Two locks in it, which the kernel gives
free however their holders end:

    server.lock   held by the keeper alone, so there is one server on the folder's database; the record of
                  where it answers is written into it, and counts only while the lock is held
    users.lock    shared by all who use the server: builds and `edgeloop ui`

A server that dies is started again, on its port if that is free. A build thus needs no server that somebody
has to run, two builds share one, and none is left when the last of them was killed.
"""

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TextIO

from fleet.device.errors import EdgeloopError
from flows.servers import process
from tasks.tracking import QUIET_TOOLS

LOCK = "server.lock"
USERS = "users.lock"
LOG = "server.log"
START_LIMIT_S = 300.0
"""A first start makes the database; on a busy machine that takes its time."""

_USUAL_PORT = 4200
_POLL_S = 0.3
_LOCK_LIMIT_S = 3.0
_PORT_LIMIT_S = 6.0
_RESTARTS = 5
"""How often a server that dies is started again."""
# Nobody schedules, deploys or pauses flows here; what is left records runs and gives up expired leases.
_IDLE_SERVICES = (
    "SCHEDULER",
    "LATE_RUNS",
    "FOREMAN",
    "CANCELLATION_CLEANUP",
    "PAUSE_EXPIRATIONS",
    "TRIGGERS",
)


def environment(folder: Path, port: int) -> dict[str, str]:
    """The environment of the server; what is set already stays, but for what the port decides."""
    ours = QUIET_TOOLS | {
        "PREFECT_LOGGING_LEVEL": "WARNING",
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(folder / "pages"),  # else into the installed package
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        "PREFECT_SERVER_UI_V2_ENABLED": "false",  # as what is shown first: it reaches for the network
        # On disk: kept in memory, a slot whose holder ended with the server would stay taken for ever.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_SERVER_CONCURRENCY_MAXIMUM_CONCURRENCY_SLOT_WAIT_SECONDS": "2",
    }
    ours |= {f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in _IDLE_SERVICES}
    fixed = {
        "PREFECT_HOME": str(folder),
        "PREFECT_SERVER_UI_API_URL": f"http://{process.HOST}:{port}/api",
        "PREFECT__SERVER_FINAL": "1",  # one server in this process; gives memory back
    }
    given = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
    return ours | given | QUIET_TOOLS | fixed


def keep(folder: Path, avoid: Collection[int] = ()) -> None:
    """Keep the server until nobody uses it; returns at once when another keeper does.

    Args:
        folder: Prefect's home.
        avoid: Ports that are promised to other servers.
    """
    with _server_lock(folder) as record, (folder / USERS).open("a") as users:
        if record is None:
            return
        port = _port_before(record)
        for _ in range(_RESTARTS):
            _write(record, {"port": port})
            port = process.free_port(port, _USUAL_PORT, 0, avoid=avoid) or 0
            server = _start(folder, port)
            try:
                url = f"http://{process.HOST}:{port}"
                process.wait_until_up(server, "Prefect", f"{url}/api/health", START_LIMIT_S, folder / LOG)
                _write(record, {"pid": os.getpid(), "port": port, "url": url})
                while server.poll() is None:
                    if _unused(users):
                        _write(record, {"port": port})
                        return
                    time.sleep(_POLL_S)
            finally:
                process.stop(server)
        print(f"Prefect's server died {_RESTARTS} times; {folder / LOG} says why", file=sys.stderr)


def _start(folder: Path, port: int) -> process.Process:
    arguments = ["--factory", "flows.servers.prefect_app:create_app", "--lifespan", "on"]
    arguments += ["--host", process.HOST, "--port", str(port), "--log-level", "warning"]
    arguments += ["--timeout-graceful-shutdown", "5"]
    return process.start("uvicorn", arguments, environment(folder, port), folder / LOG)


@contextlib.contextmanager
def _server_lock(folder: Path) -> Iterator[TextIO | None]:
    """Hold the server's lock; None when another keeper has it."""
    with (folder / LOCK).open("a+", encoding="utf-8") as record:
        deadline = time.monotonic() + _LOCK_LIMIT_S  # who looks for a keeper holds it for a moment
        while True:
            try:
                fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    yield None
                    return
                time.sleep(0.05)
        yield record


def _unused(users: TextIO) -> bool:
    """Whether nobody uses the server; then who comes waits until this process has ended."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _port_before(record: TextIO) -> int:
    """The port of the server before this one: links to it stay good; the usual one when there was none."""
    record.seek(0)
    try:
        known = json.loads(record.read())
        port, killed = int(known["port"]), "url" in known
    except (ValueError, KeyError, TypeError):
        return _USUAL_PORT
    deadline = time.monotonic() + (_PORT_LIMIT_S if killed else 0)
    while process.free_port(port) is None and time.monotonic() < deadline:  # its server is still ending
        time.sleep(0.1)
    return port


def _write(record: TextIO, values: dict[str, object]) -> None:
    record.seek(0)
    record.truncate()
    record.write(json.dumps(values))
    record.flush()


def main() -> None:
    """Keep the server of the folder given; signals end it as the last user's end does."""
    for ending in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(ending, lambda *_: sys.exit(0))
    try:
        keep(Path(sys.argv[1]), [int(port) for port in sys.argv[2:]])
    except EdgeloopError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
