"""`edgeloop ui`: MLflow's pages over the embedded store, on this machine only, until Ctrl-C."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

from fleet.device.errors import EngineError, UserError
from tasks.tracking import QUIET_TOOLS, check_store, shown, state_folder, tracking_uri
from tasks.workspace import Workspace

_HOST = "127.0.0.1"
_USUAL_PORT = 5000
_START_LIMIT_S = 90.0
_LOG = "ui.log"
_STOP_LIMIT_S = 10.0


def serve(workspace: Workspace, port: int | None) -> int:
    """Serve until interrupted or terminated; no process is left behind.

    Args:
        workspace: Its repository's store is shown.
        port: To listen on; None takes the usual one, or a free one when that is taken.

    Raises:
        UserError: MLFLOW_TRACKING_URI names a server, which has pages of its own; or the port is taken.
        EngineError: the server ended by itself.
    """
    uri = tracking_uri(workspace.path)
    if uri.startswith(("http://", "https://")):
        raise UserError(
            f"MLFLOW_TRACKING_URI is {shown(uri)}",
            allowed="a store without a server of its own",
            next_step=f"open {shown(uri)}, or unset MLFLOW_TRACKING_URI to see the embedded store",
        )
    check_store(uri)
    chosen = _port(port)
    server = _start(workspace, uri, chosen)
    try:
        _wait_until_up(server, chosen)
        print(f"runs      http://{_HOST}:{chosen}/#/experiments")
        print(f"models    http://{_HOST}:{chosen}/#/models")
        print("Ctrl-C stops it.", flush=True)
        server.wait()
        raise EngineError(
            f"the MLflow server ended by itself; {state_folder(workspace.path) / _LOG} says why"
        )
    except KeyboardInterrupt:
        return 0
    finally:
        _stop(server)


def _port(wanted: int | None) -> int:
    for port in (wanted,) if wanted is not None else (_USUAL_PORT, 0):
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError, OverflowError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((_HOST, port))
            return int(probe.getsockname()[1])
    raise UserError(
        f"port {wanted} cannot be used",
        allowed="a free port of this machine, 1024 to 65535",
        next_step="leave --port away to get a free one",
    )


def _start(workspace: Workspace, uri: str, port: int) -> "subprocess.Popen[bytes]":
    artifacts = (state_folder(workspace.path) / "mlartifacts").as_uri()
    store = ["--serve-artifacts", "--artifacts-destination", artifacts]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        *store,
        "--host",
        _HOST,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    env = dict(os.environ) | QUIET_TOOLS
    env |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_BACKEND_STORE_URI": uri}
    # A process group of its own: we decide when it stops, and stop all of it.
    with (state_folder(workspace.path) / _LOG).open("wb") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def _wait_until_up(server: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + _START_LIMIT_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://{_HOST}:{port}/health", timeout=1).close()
            return
        time.sleep(0.2)
    raise EngineError(f"the MLflow server did not answer on port {port} within {_START_LIMIT_S:.0f} s")


def _stop(server: "subprocess.Popen[bytes]") -> None:
    """End the server and its workers: asked first, then killed."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_STOP_LIMIT_S)
            break
    with contextlib.suppress(ProcessLookupError):  # a worker that outlived its server
        os.killpg(server.pid, signal.SIGKILL)
