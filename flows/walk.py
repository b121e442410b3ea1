"""Walking the graph as a Prefect flow: what is due one task a stage, then registration and artifacts.

Who imports this module does not yet import Prefect, which takes seconds.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

from fleet.device.errors import EngineError, UserError
from flows import artifacts, device_slot, stages
from flows.interrupt import leave
from flows.progress import Step, told
from flows.servers import prefect_server
from tasks.summary import variants
from tasks.tracking import QUIET_TOOLS, shown
from tasks.workspace import Workspace

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State

RETRY_AFTER_S = (5.0, 20.0)
_DRAIN_LIMIT_S = 10.0
_GOES_ON = "interrupted; the next build goes on from here"
_SERVER_TROUBLE = 500
"""From this HTTP status on it is the store that failed, not what it was asked."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """What the flow calls; each raises when the build cannot go on."""

    ready: Callable[[], None]
    """Once Prefect is up, before the first stage."""
    judge: Callable[[], Mapping[str, Any]]
    """After the last stage: reports/gate.json."""
    register: Callable[[], dict[str, Any]]
    """When the gate passed: name and version."""
    links: Callable[[Mapping[str, Any] | None], list[str]]
    """With what was registered: markdown links for the artifact."""


@dataclass(frozen=True, kw_only=True)
class Walked:
    """What the flow came to."""

    ran: list[str]
    """Stages that were due."""
    gate: Mapping[str, Any]
    registered: dict[str, Any] | None


def walk(workspace: Workspace, plan: stages.Plan, build_id: str, steps: Steps) -> Walked:
    """Run what is due and conclude the build.

    A stage is due when it is stale or when something it reads came out different.

    Raises:
        StageFailedError: a stage failed; those after it did not run.
        UserError: PREFECT_API_URL names a server that does not answer.
        EngineError: Prefect gave the build up, or its server cannot be started.
    """
    for key, value in _prefect_settings(workspace).items():
        os.environ.setdefault(key, value)
    # The server takes its time, so Prefect is imported meanwhile.
    with prefect_server.in_use(workspace.path, lambda: import_module("prefect.artifacts")) as server:
        from prefect.events.worker import EventsWorker
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with temporary_settings({PREFECT_API_URL: server.api_url}):
            try:
                return _Flow(workspace, plan, build_id, steps, server).run()
            finally:
                EventsWorker.drain_all(timeout=_DRAIN_LIMIT_S)  # while the server is there to take them


class _Flow:
    """One build as a flow. Prefect only makes states of errors: they are kept here and raised at its end."""

    def __init__(
        self,
        workspace: Workspace,
        plan: stages.Plan,
        build_id: str,
        steps: Steps,
        server: prefect_server.PrefectServer,
    ) -> None:
        self._workspace, self._plan, self._build_id = workspace, plan, build_id
        self._steps, self._server = steps, server
        self._ran: list[str] = []
        self._failures: list[Exception] = []

    def run(self) -> Walked:
        from prefect import flow

        walked: list[Walked] = []

        @flow(name=f"build-{self._workspace.name}", flow_run_name=self._build_id)
        def build_flow() -> Any:
            return self._attempt(lambda: walked.append(self._walk()))

        state = cast("State[Any]", build_flow(return_state=True))  # outside of a coroutine it is no awaitable
        if self._failures:
            raise self._explained(self._failures[0])
        if not (state.is_completed() and walked):
            raise EngineError(f"Prefect gave the build up at {self._ran[-1] if self._ran else 'its start'}")
        return walked[0]

    def _explained(self, error: Exception) -> Exception:
        """What Prefect's client raises, as an error for people; any other as it is."""
        import httpx
        from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError

        if isinstance(error, httpx.HTTPError | ConcurrencySlotAcquisitionError):
            return EngineError(f"Prefect at {shown(self._server.url)}: {error or type(error).__name__}")
        return error

    def _walk(self) -> Walked:
        """The body of the flow."""
        from prefect.runtime import flow_run

        print(f"flow run: {self._server.url}/runs/flow-run/{flow_run.id}", file=sys.stderr)
        bar = artifacts.ProgressBar(self._workspace.name)
        self._steps.ready()
        for step in self._due():
            self._ran.append(step.stage)
            self._run_stage(step, bar)
        gate = self._steps.judge()
        registered = self._register() if gate["verdict"] == "pass" else None
        self._publish(gate, registered)
        bar.end(f"gate: {gate['verdict']}")
        return Walked(ran=self._ran, gate=gate, registered=registered)

    def _attempt(self, action: Callable[[], object]) -> Any:
        """Run an action of the flow or of a task; its error becomes a state of Prefect, and is kept."""
        from prefect.states import Failed

        try:
            action()
        except KeyboardInterrupt:
            leave(_GOES_ON)
        except Exception as error:  # noqa: BLE001  # raised again by `run`
            self._failures.append(error)
            return Failed(message=str(error))
        return None

    def _run_stage(self, step: Step, bar: artifacts.ProgressBar) -> None:
        from prefect import task
        from prefect.cache_policies import NO_CACHE
        from prefect.runtime import task_run

        def reproduce(stage: str) -> None:
            with told(step, bar.tell) as env, device_slot.held(stage, self._server.own, task_run.id):
                stages.reproduce(self._workspace, stage, self._build_id, env)

        # DVC is the cache. No retries: what a stage reads decides what it computes; it would fail again.
        @task(cache_policy=NO_CACHE, task_run_name="{stage}")
        def run(stage: str) -> Any:
            return self._attempt(lambda: reproduce(stage))

        if not run(step.stage, return_state=True).is_completed():
            raise _stopped(step.stage)

    def _register(self) -> dict[str, Any]:
        """Register as a task that is tried again while the store fails, as it may on a network."""
        from prefect import task
        from prefect.cache_policies import NO_CACHE

        # The one step that depends on something outside: a server restarted, a database out of connections.
        # MLflow's client repeats a request by itself, but for one that its server has answered with an error.
        @task(
            cache_policy=NO_CACHE,
            task_run_name="register",
            retries=len(RETRY_AFTER_S),
            retry_delay_seconds=list(RETRY_AFTER_S),
            retry_condition_fn=_worth_a_retry,
        )
        def register() -> dict[str, Any]:
            try:
                return self._steps.register()
            except KeyboardInterrupt:
                leave(_GOES_ON)

        registered: dict[str, Any] = register(return_state=True).result()
        return registered

    def _publish(self, gate: Mapping[str, Any], registered: dict[str, Any] | None) -> None:
        """Write the result into Prefect's pages; the build is done, a server that fails costs the page."""
        import httpx

        result = artifacts.Result(
            gate=gate, variants=variants(self._workspace.path / "reports"), registered=registered
        )
        try:
            artifacts.publish(self._workspace.name, result, self._steps.links(registered))
        except httpx.HTTPError as error:
            print(f"warning: Prefect's page has no result of this build: {error}", file=sys.stderr)

    def _due(self) -> Iterator[Step]:
        """Stages that are due; whether what one wrote differs is asked when the next is wanted."""
        plan, changed = self._plan, set[str]()
        possible = may_run(plan)
        for stage, upstream in plan.upstream.items():
            if stage in plan.stale | plan.always or upstream & changed:
                before = stages.locked_outs(self._workspace).get(stage)
                yield Step(stage=stage, number=possible.index(stage) + 1, count=len(possible))
                if stages.locked_outs(self._workspace).get(stage) != before:
                    changed.add(stage)


def may_run(plan: stages.Plan) -> list[str]:
    """The stages that have to run, and all that read from them; none when none has to."""
    found: list[str] = []
    for stage, upstream in plan.upstream.items():  # in an order in which they can run
        if stage in plan.stale | plan.always or not upstream.isdisjoint(found):
            found.append(stage)
    return found


def _stopped(stage: str) -> EngineError:
    """Ends the flow after a task that did not complete; what the task raised is raised in its place."""
    return EngineError(f"Prefect gave the build up at {stage}")


def _worth_a_retry(_task: object, _run: object, state: Any) -> bool:
    """Whether the store failed, rather than what it was asked to do; Prefect's `retry_condition_fn`."""
    error = state.data
    if worth := may_pass(error):
        print(f"register: {error}; trying again", file=sys.stderr, flush=True)
    return worth


def may_pass(error: object) -> bool:
    """Whether an error of the registration may be gone in a while."""
    if isinstance(error, UserError) or not isinstance(error, Exception):
        return False
    if type(error).__module__.partition(".")[0] == "mlflow":
        from mlflow.exceptions import MlflowException

        return isinstance(error, MlflowException) and error.get_http_status_code() >= _SERVER_TROUBLE
    return isinstance(error, ConnectionError | TimeoutError)


def _prefect_settings(workspace: Workspace) -> dict[str, str]:
    """Prefect as a library: its state beside ours, no reports to its makers, quiet."""
    return QUIET_TOOLS | {
        "PREFECT_HOME": str(prefect_server.home(workspace.path)),
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_ENABLED": "false",  # there is a server; a second one would be a mistake
    }
