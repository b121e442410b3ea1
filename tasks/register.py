"""Registering a build in MLflow: once, with its evidence, and only what the gate let pass.

No stage of the graph: it cannot be rebuilt. A version of the registered model `edgeloop-WORKSPACE` waits for
review under the alias `candidate`; its description is the gate's table, its tags lead to data, code, engine,
and the ledger (`tasks/review/ledger.py`) keeps the hashes that a later decision is held against.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath

import yaml

from fleet.device.engine import RuntimeConfig
from fleet.device.errors import UserError
from tasks import provenance
from tasks.champion_files import PREDICTIONS
from tasks.gate import require_judged
from tasks.mlflow_store import Store
from tasks.provenance import release_sha256, sha256_of
from tasks.refusal import refusing, what_was_found
from tasks.report.write import Drawn, write_report
from tasks.report_keys import names_in
from tasks.review.author import Author, author
from tasks.review.desk import Desk, open_desk
from tasks.review.reconcile import reconcile_desk
from tasks.review.release import (
    ARTIFACTS,
    ATTACHED,
    REPORT,
    artifact_of,
)
from tasks.review.standing import CANDIDATE, CHAMPION
from tasks.stage import read_json
from tasks.tracking import state_folder, tracking_uri
from tasks.workspace import Workspace

_ORIGIN = (
    "workspace",
    "build_id",
    "model_version",
    "engine_version",
    "config_version",
    "monitor_version",
    "variants",
    "data_digest",
    "git_commit",
)
"""Tags that nobody may set but the build; the ledger keeps them."""
_DESCRIPTION_LIMIT = 4900  # MLflow keeps 5,000 characters


@dataclass(frozen=True, kw_only=True)
class Registration:
    """A version in the registry."""

    name: str
    version: int


def register(workspace: Workspace, build_id: str, report: Drawn | None = None) -> Registration:
    """Register what lies in `workspace`; the same bytes with the same evidence are registered once.

    Args:
        workspace: What to register.
        build_id: Of the run in MLflow that it is registered from.
        report: The release report where it has just been drawn; of other evidence it is drawn anew.

    Raises:
        UserError: the gate refused, or evidence for these bytes is missing.
    """
    verify_evidence(workspace.path)
    sha256 = release_sha256(workspace.path / "models" / "mnn")
    store = Store(tracking_uri(workspace.path), state_folder(workspace.path))
    run_id = store.parent_run(workspace.name, build_id)
    with open_desk(workspace, store) as desk:
        reconcile_desk(desk)  # first: a version number may have been another's
        desk.require_crowned()
        verify_evidence(workspace.path)  # again: that may have brought another champion than the gate's
        files = release_files(workspace.path, report)
        tags = release_tags(workspace, build_id, sha256) | attached_tags(files)
        _close_build(store, run_id, workspace, tags)
        version = _released(desk, sha256) or _find(store, desk.name, tags)
        if version is None:
            version = _create(store, desk.name, run_id, files=files, tags=tags)
            desk.look_again()
        _record(desk, version, author(workspace.path, None), tags)
        desk.settle()
    return Registration(name=desk.name, version=version)


def _released(desk: Desk, sha256: str) -> int | None:
    """The champion, when it is these bytes: judged against itself it needs no other review."""
    _, now, shown = desk.look()
    champion = now.aliases.get(CHAMPION)
    if champion is None or champion not in shown.versions:
        return None
    return champion if shown.versions[champion].tags.get("release_sha256") == sha256 else None


def _record(desk: Desk, version: int, who: Author, tags: Mapping[str, str]) -> None:
    """Write to the ledger that a version is there, once, and that it is the candidate while it waits.

    Args:
        desk: Of the model.
        version: Created, or found with the same bytes.
        who: Builds.
        tags: Of this build. What MLflow shows of a version that was found may be another's.
    """
    _, now, shown = desk.look()
    review, drafts, why = now.review(version), [], "registered by a build"
    if review.registered is None:
        theirs = shown.versions[version].tags
        told = tags if theirs.get("evidence_sha256") == tags["evidence_sha256"] else theirs
        files = {key: told[key] for key in ATTACHED if told.get(key)}
        origin = {key: told[key] for key in _ORIGIN if told.get(key)}
        drafts.append(replace(desk.draft("registered", version, who, why), files=files, origin=origin))
    if review.state in ("pending", "refused") and now.aliases.get(CANDIDATE) != version:
        drafts.append(replace(desk.draft("alias", version, who, why), alias=CANDIDATE))
    desk.write(drafts)


def verify_evidence(workspace: Path) -> None:
    """Refuse a build that the gate refused, or whose reports do not speak of the files that are there.

    Raises:
        UserError: says which report or file.
    """
    reports = workspace / "reports"
    gate, convert, parity = (read_json(reports / f"{name}.json") for name in ("gate", "convert", "parity"))
    if gate.get("verdict") != "pass":
        why = [f"{c['name']}: {what_was_found(c)}" for c in refusing({"checks": (), **gate})]
        raise UserError(
            f"the gate refused this build: {'; '.join(why) or gate.get('verdict')}",
            allowed="a build whose gate passed",
            next_step="see reports/gate.md",
        )
    for variant in names_in(convert):
        folder = workspace / "models" / "mnn" / variant
        model = folder / "model.mnn"
        found = sha256_of(model) if model.is_file() else "no file"
        if found != read_json(folder / "card.json").get("mnn_sha256"):
            raise UserError(
                f"{model}: {found}, its card says otherwise",
                allowed="the files the convert stage wrote",
                next_step="`edgeloop build` writes them again",
            )
        if f"{variant}/top1" not in parity:
            raise UserError(
                f"reports/parity.json says nothing about {variant}",
                allowed="a parity report on every converted variant",
                next_step="`edgeloop build` writes it again",
            )
    require_judged(workspace, gate)


def release_tags(workspace: Workspace, build_id: str, sha256: str) -> dict[str, str]:
    """What a reviewer, or a program, needs to walk from a version to its origin and back."""
    path = workspace.path
    params = yaml.safe_load((path / "params.yaml").read_text(encoding="utf-8"))
    configs = (params["benchmark"] or {}).get("configs") or [{}]
    config = RuntimeConfig(**configs[0])  # the first one is bound to the release
    config_sha256 = hashlib.sha256(json.dumps(asdict(config), sort_keys=True).encode()).hexdigest()
    cards = {p.parent.name: read_json(p) for p in sorted((path / "models" / "mnn").glob("*/card.json"))}
    train = provenance.inputs_locked(path)["train"]
    return {
        "workspace": workspace.name,
        "build_id": build_id,
        "gate": "pass",
        "review_state": "pending",
        "model_version": sha256[:12],
        "engine_version": ",".join(sorted({card["engine_version"] for card in cards.values()})),
        "config_version": config_sha256[:12],
        "monitor_version": "none",  # no monitor is part of a build yet
        "variants": ",".join(cards),
        "release_sha256": sha256,
        "evidence_sha256": read_json(path / "reports" / "gate.json")["evidence_sha256"],
        "data_digest": train.data_digest,
        "git_commit": provenance.git_commit(path),
        "dvc_lock_sha256": provenance.lock_sha256(path),
    }


def _close_build(store: Store, run_id: str, workspace: Workspace, tags: Mapping[str, str]) -> None:
    """Tag the build's run with its origin, and link every stage to the run that computed it, however old."""
    client, experiment = store.client, store.experiment(workspace.name)
    links = {}
    for stage, inputs in provenance.inputs_locked(workspace.path).items():
        query = f"tags.stage_hash = '{inputs.stage_hash}' and attributes.status = 'FINISHED'"
        runs = store.call(
            lambda query=query: client.search_runs(  # type: ignore[misc]  # mypy infers no lambda with a default
                [experiment], query, max_results=1, order_by=["attributes.start_time DESC"]
            )
        )
        if runs:
            links[f"stage_run/{re.sub(r'[^0-9A-Za-z_.-]', '-', stage)}"] = str(runs[0].info.run_id)
    its = {
        key: value for key, value in tags.items() if key != "review_state"
    }  # versions are reviewed, not runs
    for key, value in {**its, **links}.items():
        store.call(lambda key=key, value=value: client.set_tag(run_id, key, value))  # type: ignore[misc]  # as above
    store.call(lambda: client.set_terminated(run_id, "FINISHED"))


def _find(store: Store, name: str, tags: Mapping[str, str]) -> int | None:
    """The version with these bytes and this evidence: the same bytes judged anew are reviewed anew."""
    same = (f"tags.{key} = '{tags[key]}'" for key in ("release_sha256", "evidence_sha256"))
    query = " and ".join((f"name = '{name}'", *same))
    found = store.call(lambda: store.client.search_model_versions(query))
    return max((int(version.version) for version in found), default=None)


def _create(
    store: Store, name: str, run_id: str, *, files: Mapping[str, Path], tags: Mapping[str, str]
) -> int:
    client = store.client
    if not store.call(lambda: client.search_registered_models(f"name = '{name}'")):
        about = f"MNN models of workspace {tags['workspace']}, built by edgeloop."
        store.call(lambda: client.create_registered_model(name, description=about))
    for artifact, file in files.items():
        folder = str((PurePosixPath(ARTIFACTS) / artifact).parent)
        store.call(lambda file=file, folder=folder: client.log_artifact(run_id, str(file), folder))  # type: ignore[misc]  # as above
    run = client.get_run(run_id).info
    page = f"#/experiments/{run.experiment_id}/runs/{run_id}/artifacts/{ARTIFACTS}"
    text = description(files["gate.md"].read_text(encoding="utf-8"), page)
    source = f"{run.artifact_uri}/{ARTIFACTS}"
    created = store.call(
        lambda: client.create_model_version(name, source, run_id=run_id, tags=dict(tags), description=text)
    )
    return int(created.version)


def release_files(workspace: Path, report: Drawn | None = None) -> dict[str, Path]:
    """Everything a release is reviewed by: its place below the run's `release/`, and the file."""
    gate = read_json(workspace / "reports" / "gate.json")
    judged = {artifact_of(file): workspace / file for file in gate["evidence"]}
    beside = {file: workspace / "reports" / file for file in ("gate.json", "gate.md")}
    beside |= {file: workspace / file for file in ("dvc.lock", "params.yaml")}
    beside[PREDICTIONS] = workspace / "models" / "parity" / PREDICTIONS
    known = report is not None and report.is_of(gate["evidence_sha256"])
    beside[REPORT] = report.path if report and known else write_report(workspace)
    return judged | beside


def attached_tags(files: Mapping[str, Path]) -> dict[str, str]:
    """Hashes of what the evidence does not speak of, by tag."""
    return {tag: sha256_of(files[artifact]) for tag, artifact in ATTACHED.items() if artifact in files}


def description(table: str, page: str = "") -> str:
    """What MLflow shows of a version: links to what lies in its run, then the gate's table.

    MLflow keeps 5,000 characters; what is cut off is the end, where the passed checks are.

    Args:
        table: reports/gate.md.
        page: The page of the run's artifacts, as MLflow's links go; empty leaves the links out.
    """
    links = {"release report": f"{page}/{REPORT}", "gate table": f"{page}/gate.md", "all files": page}
    head = " · ".join(f"[{text}]({link})" for text, link in links.items()) + "\n\n" if page else ""
    if len(head + table) <= _DESCRIPTION_LIMIT:
        return head + table
    kept = table[: _DESCRIPTION_LIMIT - len(head)].rpartition("\n")[0]
    return f"{head}{kept}\n\nThe whole table: artifact release/gate.md.\n"
