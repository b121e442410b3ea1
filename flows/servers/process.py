"""A server as a child process: started on a port of the loopback, waited for, stopped with all it started."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil

from fleet.device.errors import EngineError
from flows.servers import tied
from tasks.http_probe import ask

HOST = "127.0.0.1"
_STOP_LIMIT_S = 10.0
_POLL_S = 0.1

Process = subprocess.Popen[bytes]


def free_port(*wanted: int, avoid: Collection[int] = ()) -> int | None:
    """The first of the wanted ports that can be listened on, 0 standing for any; None when none can.

    Args:
        wanted: In this order.
        avoid: Promised to a server that does not listen yet.
    """
    for port in (port for port in wanted if port not in avoid):
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError, OverflowError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    return None


def start(module: str, arguments: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
    """Start `python -m MODULE ARGUMENTS`, which ends when this process does; what it prints goes to `log`."""
    command = [sys.executable, tied.__file__, str(os.getpid()), sys.executable, "-m", module, *arguments]
    with log.open("wb") as out:
        # A process group of its own: we decide when it stops, and stop all of it.
        return subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def answers(url: str, timeout_s: float = 1.0) -> bool:
    """Whether a server says at this address that it is well."""
    return ask(url, "", timeout_s=timeout_s).answer == "answers"


def _listens(server: Process, port: int) -> bool:
    """Whether it is this server that listens there, or one that it has started, and not somebody else's."""
    with contextlib.suppress(psutil.Error):
        me = psutil.Process(server.pid)
        for process in (me, *me.children(recursive=True)):
            for c in process.net_connections("inet"):
                if c.status == psutil.CONN_LISTEN and c.laddr.port == port:
                    return True
    return False


def wait_until_up(server: Process, name: str, health: str, limit_s: float, log: Path) -> None:
    """Wait until a started server answers.

    A port that was free may be taken by the time the server listens, by the same kind of server with another
    state: then the answer of that one must not be taken for this one's.

    Raises:
        EngineError: it ended, or did not answer within the limit.
    """
    deadline = time.monotonic() + limit_s
    port = urllib.parse.urlsplit(health).port or 0
    while not (_listens(server, port) and answers(health)):
        if server.poll() is not None:
            raise EngineError(f"the {name} server ended as it started; {log} says why")
        if time.monotonic() > deadline:
            raise EngineError(
                f"the {name} server did not answer at {health} within {limit_s:.0f} s; see {log}"
            )
        time.sleep(_POLL_S)


def stop(server: Process) -> None:
    """End a server and all it started: asked first, then killed."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_STOP_LIMIT_S)
            break
    with contextlib.suppress(ProcessLookupError):  # a worker that outlived its server
        os.killpg(server.pid, signal.SIGKILL)
