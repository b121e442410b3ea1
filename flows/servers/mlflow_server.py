"""MLflow's server over the embedded store."""

import os
from pathlib import Path

from flows.servers import process
from tasks.tracking import QUIET_TOOLS

LOG = "ui.log"
START_LIMIT_S = 90.0


def start(state: Path, uri: str, port: int) -> process.Process:
    """Start it with one worker and without the processes that would run jobs.

    Args:
        state: The repository's `.edgeloop`.
        uri: Of the store; by the environment, for it may hold a password.
        port: To listen on.
    """
    arguments = ["server", "--serve-artifacts", "--artifacts-destination", (state / "mlartifacts").as_uri()]
    arguments += ["--host", process.HOST, "--port", str(port), "--workers", "1"]
    arguments += ["--uvicorn-opts", "--timeout-graceful-shutdown 5"]
    env = dict(os.environ) | QUIET_TOOLS
    env |= {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_BACKEND_STORE_URI": uri}
    return process.start("mlflow", arguments, env, state / LOG)


def wait_until_up(server: process.Process, state: Path, port: int) -> None:
    """Wait until it answers.

    Raises:
        EngineError: it ended, or did not answer within the limit.
    """
    health = f"http://{process.HOST}:{port}/health"
    process.wait_until_up(server, "MLflow", health, START_LIMIT_S, state / LOG)
