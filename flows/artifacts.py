"""What Prefect's pages show of a build: its verdict, its variants, where to look further, how far it is.

The keys are those of the workspace, so Prefect's page of a key is the history of that workspace's builds.
"""

import hashlib
import re
import sqlite3
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import quote
from uuid import UUID

from flows.progress import Step
from flows.servers import addresses, report_pages
from tasks.judge.text import in_cell
from tasks.mlflow_file import registered_name, run_of
from tasks.refusal import refusing, what_was_found
from tasks.tracking import sqlite_file
from tasks.workspace import Workspace

_REPORTS = {report_pages.REPORT: "release report", "gate.md": "gate", report_pages.DATA_DOCS: "Data Docs"}


def key(kind: str, workspace: str) -> str:
    """An artifact's key as Prefect allows it (a-z, 0-9 and dashes), another one for every workspace."""
    plain = re.sub(r"[^a-z0-9]+", "-", workspace.lower()).strip("-")
    if plain != workspace:  # `My_shoes` is not `my-shoes`
        plain = "-".join(filter(None, (plain, hashlib.sha256(workspace.encode()).hexdigest()[:6])))
    return f"{kind}-{plain}"


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a build came to."""

    gate: Mapping[str, Any]
    """reports/gate.json."""
    variants: Sequence[Mapping[str, Any]]
    """As `tasks.summary.variants` gathers them."""
    registered: Mapping[str, Any] | None
    """Name and version; None when the gate refused."""


def result_markdown(result: Result, links: Sequence[str]) -> str:
    """The artifact's text: the verdict and its reasons first."""
    checks = result.gate["checks"]
    counts = Counter(check["verdict"] for check in checks)
    lines = [f"## Gate: {result.gate['verdict']}", ", ".join(f"{n} {v}" for v, n in counts.most_common())]
    if result.registered:
        name, version = result.registered["name"], result.registered["version"]
        lines += ["", f"Registered as **{name} version {version}**."]
    else:
        lines += ["", "Not registered."]
    if refused := refusing(result.gate):
        lines += ["", "| refused because | found |", "|---|---|"]
        lines += [_row(check["name"], what_was_found(check)) for check in refused]
    lines += ["", "| variant | top-1 | size | MACs | P50 / P95 / P99 | parity | agreement | latency |"]
    lines += ["|---|--:|--:|--:|--:|--:|--:|---|"]
    lines += [_variant_row(variant) for variant in result.variants]
    return "\n".join([*lines, "", "## Look further", "", *(f"- {link}" for link in links), ""])


def _variant_row(v: Mapping[str, Any]) -> str:
    latency = " / ".join(f"{v['latency_ms'][p]:.2f}" for p in ("p50", "p95", "p99")) + " ms"
    size, macs = f"{v['size_bytes'] / 1e6:.2f} MB", f"{v['macs'] / 1e6:.1f} M"
    parity, agreement = f"{v['parity_max_rel_error']:.1e}", f"{v['agreement']:.2%}"
    return _row(v["name"], f"{v['top1']:.2%}", size, macs, latency, parity, agreement, " ".join(v["flags"]))


def _row(*cells: object) -> str:
    return f"| {' | '.join(in_cell(str(cell)) for cell in cells)} |"


def links(workspace: Workspace, build_id: str, uri: str, registered: Mapping[str, Any] | None) -> list[str]:
    """Markdown links to what else there is of a build.

    Args:
        workspace: Whose build it was.
        build_id: Of its run in MLflow.
        uri: MLflow's store.
        registered: Name and version, None when there is none.
    """
    mlflow, reports = addresses.mlflow_url(workspace.path), addresses.reports_url(workspace.path)
    found = []
    if registered:
        page = f"{mlflow}/#/models/{quote(registered['name'])}/versions/{registered['version']}"
        found.append(f"[{registered['name']} version {registered['version']} in MLflow]({page})")
    if run := _run_of(uri, workspace.name, build_id):
        found.append(f"[run of this build in MLflow]({mlflow}/#/experiments/{run[0]}/runs/{run[1]})")
    for name, what in _REPORTS.items():
        file = workspace.path / "reports" / name
        if file.is_file():
            path = file.relative_to(workspace.repository)
            found.append(f"[{what}]({reports}{report_pages.page(workspace.name, name)}), file `{path}`")
    found.append("Links to this machine open while `edgeloop ui` runs. Reports are always the last build's.")
    return found


def _run_of(uri: str, workspace: str, build_id: str) -> tuple[str, str] | None:
    """Experiment and id of a build's run; None when it has none."""
    database = sqlite_file(uri)
    if database is None:
        return _run_on_server(uri, workspace, build_id)
    try:  # without importing MLflow: a refused build has no other use for it
        return run_of(database, build_id)
    except sqlite3.Error:
        return None


def _run_on_server(uri: str, workspace: str, build_id: str) -> tuple[str, str] | None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient(uri)
    try:
        experiment = client.get_experiment_by_name(registered_name(workspace))
        query = f"tags.build_id = '{build_id}' and tags.kind = 'build'"
        runs = client.search_runs([experiment.experiment_id], query, max_results=1) if experiment else []
    except MlflowException:
        return None
    return (str(runs[0].info.experiment_id), str(runs[0].info.run_id)) if runs else None


def publish(workspace: str, result: Result, found: Sequence[str]) -> None:
    """Write the result of a build into Prefect; within its flow run."""
    from prefect.artifacts import create_markdown_artifact

    said = f"gate: {result.gate['verdict']}"
    if result.registered:
        said += f", {result.registered['name']} version {result.registered['version']}"
    create_markdown_artifact(result_markdown(result, found), key=key("result", workspace), description=said)


class ProgressBar:
    """How far a build is, in Prefect; within its flow run. What Prefect does not take is not shown."""

    def __init__(self, workspace: str) -> None:
        """A bar at 0 %."""
        from prefect.artifacts import create_progress_artifact

        created = create_progress_artifact(0.0, key=key("progress", workspace), description="begins")
        self._id = cast("UUID", created)  # outside of a coroutine it is no awaitable

    def tell(self, step: Step, text: str) -> None:
        """Move the bar to where `step` begins, and say how far that is."""
        self._set(step.percent_before, f"{step}: {text}")

    def end(self, text: str) -> None:
        """Move the bar to its end."""
        self._set(100.0, text)

    def _set(self, percent: float, text: str) -> None:
        import httpx
        from prefect.artifacts import update_progress_artifact

        try:
            update_progress_artifact(self._id, percent, text)
        except httpx.HTTPError as error:  # the page is no reason to lose a build
            print(f"warning: Prefect does not show how far the build is: {error}", file=sys.stderr)
