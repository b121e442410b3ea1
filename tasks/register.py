"""Registering a build in MLflow: once, with its evidence, and only what the gate let pass.

No stage of the graph: it cannot be rebuilt. A version of the registered model `edgeloop-WORKSPACE` waits for
review under the alias `candidate`; its description is the gate's table, its tags lead to data, code, engine.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from fleet.device.engine import RuntimeConfig
from fleet.device.errors import UserError
from tasks import provenance
from tasks.gate import require_judged
from tasks.mlflow_store import Store
from tasks.provenance import release_sha256
from tasks.stage import read_json
from tasks.tracking import state_folder, tracking_uri
from tasks.workspace import Workspace

_DESCRIPTION_LIMIT = 4900  # MLflow keeps 5,000 characters
_EVIDENCE = ("convert.json", "parity.json", "gate.json", "gate.md")


@dataclass(frozen=True, kw_only=True)
class Registration:
    """A version in the registry."""

    name: str
    version: int


def register(workspace: Workspace, build_id: str) -> Registration:
    """Register what lies in `workspace`; the same bytes with the same evidence are registered once.

    Raises:
        UserError: the gate refused, or evidence for these bytes is missing.
    """
    verify_evidence(workspace.path)
    sha256 = release_sha256(workspace.path / "models" / "mnn")
    store = Store(tracking_uri(workspace.path), state_folder(workspace.path))
    run_id = store.parent_run(workspace.name, build_id)
    tags = release_tags(workspace, build_id, sha256)
    _close_build(store, run_id, workspace, tags)
    name = f"edgeloop-{workspace.name}"
    version = _find(store, name, tags)
    if version is None:
        version = _create(store, name, run_id, workspace, tags)
    if version != _alias(store, name, "champion"):
        store.call(lambda: store.client.set_registered_model_alias(name, "candidate", str(version)))
    return Registration(name=name, version=version)


def verify_evidence(workspace: Path) -> None:
    """Refuse a build that the gate refused, or whose reports do not speak of the files that are there.

    Raises:
        UserError: says which report or file.
    """
    reports = workspace / "reports"
    gate, convert, parity = (read_json(reports / f"{name}.json") for name in ("gate", "convert", "parity"))
    if gate.get("verdict") != "pass":
        failed = [check["name"] for check in gate.get("checks", ()) if check["verdict"] == "fail"]
        raise UserError(
            f"the gate refused this build: {'; '.join(failed) or gate.get('verdict')}",
            allowed="a build whose gate passed",
            next_step="see reports/gate.md",
        )
    for variant in variant_names(convert):
        folder = workspace / "models" / "mnn" / variant
        model = folder / "model.mnn"
        found = hashlib.sha256(model.read_bytes()).hexdigest() if model.is_file() else "no file"
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


def variant_names(convert: Mapping[str, Any]) -> list[str]:
    """The variants reports/convert.json speaks of."""
    return sorted({key.split("/")[0] for key in convert if "/" in key})


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
    for key, value in {**tags, **links}.items():
        store.call(lambda key=key, value=value: client.set_tag(run_id, key, value))  # type: ignore[misc]  # as above
    store.call(lambda: client.set_terminated(run_id, "FINISHED"))


def _find(store: Store, name: str, tags: Mapping[str, str]) -> int | None:
    """The version with these bytes and this evidence: the same bytes judged anew are reviewed anew."""
    same = (f"tags.{key} = '{tags[key]}'" for key in ("release_sha256", "evidence_sha256"))
    query = " and ".join((f"name = '{name}'", *same))
    found = store.call(lambda: store.client.search_model_versions(query))
    return max((int(version.version) for version in found), default=None)


def _alias(store: Store, name: str, alias: str) -> int | None:
    aliases = store.call(lambda: store.client.get_registered_model(name)).aliases
    return int(aliases[alias]) if alias in aliases else None


def _create(store: Store, name: str, run_id: str, workspace: Workspace, tags: Mapping[str, str]) -> int:
    client, path = store.client, workspace.path
    if not store.call(lambda: client.search_registered_models(f"name = '{name}'")):
        about = f"MNN models of workspace {workspace.name}, built by edgeloop."
        store.call(lambda: client.create_registered_model(name, description=about))
    store.call(lambda: client.log_artifacts(run_id, str(path / "models" / "mnn"), "release/models"))
    for report in (*(path / "reports" / file for file in _EVIDENCE), path / "dvc.lock", path / "params.yaml"):
        store.call(lambda report=report: client.log_artifact(run_id, str(report), "release"))  # type: ignore[misc]  # as above
    for benchmark in sorted((path / "reports" / "benchmark").glob("*.json")):
        store.call(lambda file=benchmark: client.log_artifact(run_id, str(file), "release/benchmark"))  # type: ignore[misc]  # as above
    source = f"{client.get_run(run_id).info.artifact_uri}/release"
    text = description((path / "reports" / "gate.md").read_text(encoding="utf-8"))
    created = store.call(
        lambda: client.create_model_version(name, source, run_id=run_id, tags=dict(tags), description=text)
    )
    return int(created.version)


def description(table: str) -> str:
    """The gate's table as MLflow can keep it; what is cut off is the end, where the passed checks are."""
    if len(table) <= _DESCRIPTION_LIMIT:
        return table
    kept = table[:_DESCRIPTION_LIMIT].rpartition("\n")[0]
    return f"{kept}\n\nThe whole table: artifact release/gate.md.\n"
