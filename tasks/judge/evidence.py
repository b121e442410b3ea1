"""What a verdict rests on: every file judged, by its bytes, and the judgement itself."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fleet.device.errors import UserError
from tasks import champion_files
from tasks.judge.check import refuses
from tasks.provenance import sha256_of
from tasks.stage import REPORTS

_SINGLE = (
    f"{champion_files.FOLDER}/{champion_files.RECORD}",
    f"{champion_files.FOLDER}/{champion_files.PREDICTIONS}",
    "models/parity/predictions.parquet",
    "reports/convert.json",
    "reports/parity.json",
)
_OF_A_DEVICE = (".json", "_samples.parquet", "_layers.csv")


def evidence(workspace: Path, devices: Iterable[str]) -> dict[str, str]:
    """SHA-256 of every file a verdict rests on: models, cards, predictions, reports, the champion."""
    files = [workspace / name for name in _SINGLE]
    files += [workspace / REPORTS / "benchmark" / f"{name}{end}" for name in devices for end in _OF_A_DEVICE]
    files += [workspace / REPORTS / "probe" / f"{name}.json" for name in devices]
    files += (workspace / "models" / "mnn").glob("*/*")
    return {
        file.relative_to(workspace).as_posix(): sha256_of(file) for file in sorted(files) if file.is_file()
    }


def evidence_sha256(report: Mapping[str, Any]) -> str:
    """One hash over the files judged and the judgement: verdict, thresholds, measured values, comparison."""
    judgement = {key: value for key, value in report.items() if key != "evidence_sha256"}
    return hashlib.sha256(json.dumps(judgement, sort_keys=True).encode()).hexdigest()


def require_judged(workspace: Path, report: Mapping[str, Any]) -> None:
    """Refuse files that are not the ones reports/gate.json speaks of.

    Raises:
        UserError: a model, card or report changed since, or the verdict itself was edited.
    """
    judged = report.get("evidence")
    devices = [
        Path(f).stem for f in judged or () if f.startswith("reports/benchmark/") and f.endswith(".json")
    ]
    differing = sorted(set(evidence(workspace, devices).items()) ^ set((judged or {}).items()))
    if not judged or differing or evidence_sha256(report) != report.get("evidence_sha256"):
        raise UserError(
            f"{differing[0][0] if judged and differing else 'reports/gate.json'} is not what the gate judged",
            allowed="models, cards and reports as they were when the gate passed",
            next_step=f"`dvc checkout --force {workspace / 'dvc.yaml'}`, "  # else every workspace
            "or delete the file, then `edgeloop build`",
        )
    refused = any(refuses(check["verdict"], required=check["required"]) for check in report["checks"])
    if report["verdict"] != ("fail" if refused else "pass"):
        raise UserError(
            f"reports/gate.json says {report['verdict']}, its checks say otherwise",
            allowed="the verdict that follows from the checks",
            next_step="delete reports/gate.json, then `edgeloop build`",
        )
