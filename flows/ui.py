"""`edgeloop ui`: MLflow's and Prefect's pages and the reports, on this machine only, until Ctrl-C."""

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from filelock import FileLock, Timeout

from fleet.device.errors import EngineError, UserError
from flows.servers import UI_LOCK, addresses, mlflow_server, prefect_server, process, report_pages
from tasks.tracking import check_store, is_server, state_folder, tracking_uri
from tasks.workspace import Workspace

_WATCH_S = 1.0
_MOST_RESTARTS = 5
"""Of MLflow's server; what dies more often will not get well by itself."""
_PENDING = "/#/models?searchInput=tags.review_state%20%3D%20%27pending%27"
"""MLflow's registered models, those whose version waits for a review."""


def serve(workspace: Workspace, port: int | None) -> int:
    """Serve until interrupted or terminated; no process is left behind, however this one ends.

    Args:
        workspace: Its repository's state is shown.
        port: For MLflow to listen on; None takes the one it had last, or a free one when that is taken.

    Raises:
        UserError: the pages of this repository are served already, the port is taken, or a server that the
            environment names does not answer.
        EngineError: a server cannot be started, or dies again and again.
    """
    check_store(tracking_uri(workspace.path))
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        stack.enter_context(_alone(workspace))
        ports = _ports(workspace, port)
        reports = stack.enter_context(_reports(workspace, ports.reports))
        mlflow = stack.enter_context(_mlflow(workspace, ports.mlflow))
        prefect = stack.enter_context(prefect_server.in_use(workspace.path, avoid=[ports.mlflow]))
        mlflow.wait_until_up()
        _print_links(workspace, prefect, reports)
        _watch(workspace, mlflow, prefect)
    return 0


@contextlib.contextmanager
def _alone(workspace: Workspace) -> Iterator[None]:
    """One at a time for a repository: links in records lead to the ports that the last one took."""
    state = state_folder(workspace.path)
    state.mkdir(parents=True, exist_ok=True)
    lock = FileLock(state / UI_LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"`edgeloop ui` runs already: {addresses.reports_url(workspace.path)} has the reports, "
            f"{addresses.mlflow_url(workspace.path)} MLflow",
            allowed="one for a repository",
            next_step="open these pages, or end it first: Ctrl-C where it runs",
        ) from None
    try:
        yield
    finally:
        lock.release()


@dataclass
class _MlflowPage:
    """MLflow's server, started again when it dies; none of ours when the store has one."""

    workspace: Workspace
    port: int
    server: process.Process | None
    restarts: int = field(default=0)

    def wait_until_up(self) -> None:
        if self.server:
            mlflow_server.wait_until_up(self.server, state_folder(self.workspace.path), self.port)

    def start(self) -> None:
        self.server = mlflow_server.start(
            state_folder(self.workspace.path), tracking_uri(self.workspace.path), self.port
        )

    def stop(self) -> None:
        if self.server:
            process.stop(self.server)

    def revive(self) -> None:
        """Start it again when it has died.

        Raises:
            EngineError: it has died too often.
        """
        if self.server is None or self.server.poll() is None:
            return
        log = state_folder(self.workspace.path) / mlflow_server.LOG
        if self.restarts == _MOST_RESTARTS:
            raise EngineError(f"the MLflow server died {_MOST_RESTARTS + 1} times; {log} says why")
        self.restarts += 1
        _say(f"the MLflow server ended by itself ({log} says why); starting it again")
        self.stop()  # what it had started may live on
        self.start()
        self.wait_until_up()


@contextlib.contextmanager
def _mlflow(workspace: Workspace, port: int) -> Iterator[_MlflowPage]:
    page = _MlflowPage(workspace, port, None)
    if is_server(tracking_uri(workspace.path)):
        yield page
        return
    page.start()
    try:
        yield page
    finally:
        page.stop()


def _ports(workspace: Workspace, wanted: int | None) -> addresses.Ports:
    """The ports of our pages, chosen before any server starts: one that is starting does not listen yet."""
    known = addresses.remembered(workspace.path)
    mlflow = process.free_port(known.mlflow, 0) if wanted is None else process.free_port(wanted)
    if mlflow is None:
        raise _unusable(wanted or known.mlflow)
    reports = process.free_port(known.reports, 0, avoid=[mlflow])
    if reports is None:
        raise _unusable(known.reports)
    ports = addresses.Ports(mlflow=mlflow, reports=reports)
    addresses.remember(workspace.path, ports)
    return ports


def _unusable(port: int) -> UserError:
    return UserError(
        f"port {port} cannot be used",
        allowed="a free port of this machine, 1024 to 65535",
        next_step="leave --port away to get a free one",
    )


@contextlib.contextmanager
def _reports(workspace: Workspace, port: int) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(report_pages.served(workspace.repository, port))
        except OSError as error:  # somebody was faster
            raise _unusable(port) from error
        yield f"http://{process.HOST}:{port}"


def _print_links(workspace: Workspace, prefect: prefect_server.PrefectServer, reports: str) -> None:
    mlflow = addresses.mlflow_url(workspace.path)
    report = report_pages.newest_report(workspace.repository)
    docs = workspace.path / "reports" / report_pages.DATA_DOCS
    print(f"runs       {mlflow}/#/experiments")
    print(f"to review  {mlflow}{_PENDING}")
    print(f"flow runs  {prefect.url}/runs")
    print(f"report     {reports}{report}" if report else "report     none yet: `edgeloop build` writes one")
    if docs.is_file():
        print(f"Data Docs  {reports}{report_pages.page(workspace.name, report_pages.DATA_DOCS)}")
    print(f"all        {reports}/")
    print("Ctrl-C stops it.", flush=True)


def _watch(workspace: Workspace, mlflow: _MlflowPage, prefect: prefect_server.PrefectServer) -> None:
    """See that both servers live, until interrupted."""
    while True:
        time.sleep(_WATCH_S)
        mlflow.revive()
        if prefect.own and prefect_server.running(workspace.path) is None:
            _say("Prefect's server ended by itself; starting it again")
            again = prefect_server.ensure(workspace.path, avoid=[mlflow.port])
            if again != prefect.url:
                _say(f"flow runs  {again}/runs")
                prefect = replace(prefect, url=again)


def _say(text: str) -> None:
    print(f"edgeloop ui: {text}", file=sys.stderr, flush=True)
