"""What a workspace holds for a reviewer. What is missing stays empty and is said in place."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from fleet.device.errors import UserError
from tasks import champion_files, provenance
from tasks.champion import Champion
from tasks.data.dataset import PREPARED, Dataset
from tasks.gate import require_judged
from tasks.judge.check import Check
from tasks.report_keys import names_in
from tasks.stage import REPORTS, read_json
from tasks.workspace import workspace_name

LADDER_COLUMNS = (
    "ratio",
    "channels_removed_ratio",
    "macs_count",
    "params_count",
    "val_top1_pruned",
    "val_top1",
)
ERROR_COLUMNS = ("precision", "layer", "snr_db", "snr_in_place_db", "cosine_in_place")
SAMPLE_COLUMNS = ("variant", "config", "phase", "latency_ms")
LAYER_COLUMNS = ("variant", "layer", "op_type", "int8", "p50_ms", "share", "outlier", "why")

_TEXT = {"precision", "layer", "variant", "op_type", "why"}

M = TypeVar("M", bound=BaseModel)


class _Record(BaseModel):
    """Part of a file another station owns: what is not shown here may be there, too."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Comparison(_Record):
    """One variant against the champion's."""

    against: str
    n: int
    drop_pp: float
    interval_pp: tuple[float, float] | None = None


class Gate(_Record):
    """reports/gate.json."""

    verdict: Literal["pass", "fail"]
    evidence_sha256: str = ""
    checks: tuple[Check, ...]
    comparison: Mapping[str, Comparison] = {}


@dataclass(frozen=True, kw_only=True)
class Report:
    """A flat report of a stage; an absent one is empty."""

    path: Path
    entries: Mapping[str, Any]

    def number(self, key: str) -> float | None:
        """A number, None where it is not there.

        Raises:
            UserError: there is something else under the key.
        """
        value = self.entries.get(key)
        if value is None:
            return None
        if isinstance(value, int | float) and math.isfinite(value):
            return value
        raise _corrupt(self.path, f"{key} is {str(value)[:60]!r}, no number")

    def share(self, key: str) -> float | None:
        """A number from 0 to 1, None where it is not there.

        Raises:
            UserError: there is something else under the key.
        """
        value = self.number(key)
        if value is None or 0 <= value <= 1:
            return value
        raise _corrupt(self.path, f"{key} is {value}, no share")

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names, empty where it is not there.

        Raises:
            UserError: there is something else under the key.
        """
        value = self.entries.get(key, [])
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return tuple(value)
        raise _corrupt(self.path, f"{key} is {str(value)[:60]!r}, no list of names")

    def text(self, key: str) -> str:
        """The text under a key, empty where it is not there."""
        return str(self.entries.get(key) or "")

    @property
    def variants(self) -> list[str]:
        """The variants of its keys `VARIANT/key`."""
        return names_in(self.entries)


@dataclass(frozen=True, kw_only=True)
class Device:
    """What was measured on one device."""

    name: str
    bench: Report
    probe: Report
    samples: pd.DataFrame | None
    """Columns SAMPLE_COLUMNS, one row an inference; None where the benchmark kept none."""
    layers: pd.DataFrame | None
    """Columns LAYER_COLUMNS, one row a layer of a variant."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All of it. A None or empty field is evidence that is not there."""

    workspace: str
    gate: Gate | None
    stale: str
    """Why the verdict is not about the files that lie there; empty where it is."""
    convert: Report
    parity: Report
    train: Report
    prune: Report
    quantize: Report
    devices: tuple[Device, ...]
    """The one shown first is `local` where it was measured."""
    cards: Mapping[str, Report]
    """Variant to its model card."""
    ladder: pd.DataFrame | None
    layer_errors: pd.DataFrame | None
    predictions: pd.DataFrame | None
    """sha256, label, and a column a variant with the class the engine predicted."""
    champion: Champion | None
    champion_predictions: pd.DataFrame | None
    champion_params: Mapping[str, Any] | None
    """What the champion was built with; None where that was not kept, or is not what its record names."""
    params: Mapping[str, Any] | None
    """What params.yaml says."""
    dataset: Dataset | None
    origin: Mapping[str, str]
    """git_commit, dvc_lock_sha256, data_digest, release_sha256 (over all models); empty where unknown."""


def read_evidence(folder: Path) -> Evidence:
    """Read a workspace's reports, predictions, champion and dataset.

    Raises:
        UserError: a file is there and is not what its stage writes.
    """
    reports = folder / REPORTS
    flat = {
        name: _report(reports / f"{name}.json")
        for name in ("convert", "parity", "train", "prune", "quantize")
    }
    gate_values, crowned = _json(reports / "gate.json"), folder / champion_files.FOLDER
    record = _json(crowned / champion_files.RECORD)
    champion = _parsed(Champion, crowned / champion_files.RECORD, record) if record else None
    return Evidence(
        workspace=workspace_name(folder.resolve()),
        gate=_parsed(Gate, reports / "gate.json", gate_values) if gate_values else None,
        stale=_stale(folder, gate_values),
        **flat,
        devices=tuple(_device(reports, name) for name in _device_names(reports)),
        cards={p.parent.name: _report(p) for p in sorted((folder / "models/mnn").glob("*/card.json"))},
        ladder=_csv(reports / "prune_ladder.csv", LADDER_COLUMNS),
        layer_errors=_csv(reports / "quantize_layers.csv", ERROR_COLUMNS, sparse=True),
        predictions=_parquet(folder / "models/parity/predictions.parquet", ("sha256", "label"), ("label",)),
        champion=champion,
        champion_predictions=_parquet(crowned / champion_files.PREDICTIONS, ("sha256", "label"), ("label",)),
        champion_params=_champion_params(crowned / champion_files.PARAMS, champion),
        params=_yaml(folder / "params.yaml"),
        dataset=Dataset.open(folder / PREPARED)
        if (folder / PREPARED / "manifest.parquet").is_file()
        else None,
        origin=_origin(folder),
    )


def _champion_params(path: Path, champion: Champion | None) -> Mapping[str, Any] | None:
    if champion is None or not path.is_file() or provenance.sha256_of(path) != champion.params_sha256:
        return None
    return _yaml(path)


def _yaml(path: Path) -> Mapping[str, Any] | None:
    """A mapping; None where the file is not there.

    Raises:
        UserError: it is something else.
    """
    if not path.is_file():
        return None
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise _corrupt(path, " ".join(str(error).split())[:200]) from error
    if not isinstance(values, dict):
        raise _corrupt(path, "it holds no sections")
    return values


def _device_names(reports: Path) -> list[str]:
    names = [path.stem for path in (reports / "benchmark").glob("*.json")]
    return sorted(names, key=lambda name: (name != "local", name))


def _device(reports: Path, name: str) -> Device:
    folder = reports / "benchmark"
    return Device(
        name=name,
        bench=_report(folder / f"{name}.json"),
        probe=_report(reports / "probe" / f"{name}.json"),
        samples=_parquet(folder / f"{name}_samples.parquet", SAMPLE_COLUMNS, numbers=("latency_ms",)),
        layers=_csv(folder / f"{name}_layers.csv", LAYER_COLUMNS),
    )


def _origin(folder: Path) -> dict[str, str]:
    try:
        locked = provenance.inputs_locked(folder)
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise _corrupt(folder / "dvc.lock", " ".join(str(error).split())[:200]) from error
    return {
        "git_commit": provenance.git_commit(folder),
        "dvc_lock_sha256": provenance.lock_sha256(folder),
        "release_sha256": provenance.release_sha256(folder / "models/mnn")
        if (folder / "models/mnn").is_dir()
        else "",
        "data_digest": locked["train"].data_digest if "train" in locked else "",
    }


def _stale(folder: Path, gate: Mapping[str, Any]) -> str:
    """What the gate's own check of its evidence says; empty when it agrees or there is no verdict."""
    if not gate:
        return ""
    lacking = sorted({"evidence", "evidence_sha256", "checks"} - set(gate))
    if lacking:
        raise _corrupt(folder / REPORTS / "gate.json", f"it has no {', '.join(lacking)}")
    try:
        require_judged(folder, gate)
    except UserError as error:
        return error.got
    return ""


def _corrupt(path: Path, what: str) -> UserError:
    return UserError(
        f"{path}: {what}",
        allowed="the file as the stage that owns it wrote it",
        next_step="delete it and run `edgeloop build`, which writes it again, then `python -m tasks.report`",
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    values = read_json(path)
    if not isinstance(values, dict):
        raise _corrupt(path, f"a JSON {type(values).__name__}, no object")
    return values


def _report(path: Path) -> Report:
    return Report(path=path, entries=_json(path))


def _parsed(model: type[M], path: Path, values: Mapping[str, Any]) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise _corrupt(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _csv(path: Path, columns: tuple[str, ...], *, sparse: bool = False) -> pd.DataFrame | None:
    """A table of text and numbers; in a sparse one an empty number is NaN."""
    if not path.exists():
        return None
    try:
        table = pd.read_csv(path, keep_default_na=False, dtype=str)
        for name in set(columns) & set(table) - _TEXT:
            table[name] = pd.to_numeric(table[name].replace("", None))
    except (OSError, ValueError) as error:
        raise _corrupt(path, str(error)) from error
    return _complete(path, table, columns, () if sparse else tuple(set(columns) - _TEXT))


def _parquet(path: Path, columns: tuple[str, ...], numbers: tuple[str, ...] = ()) -> pd.DataFrame | None:
    if not path.exists():
        return None
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _corrupt(path, str(error)) from error
    return _complete(path, table, columns, numbers)


def _complete(
    path: Path, table: pd.DataFrame, columns: tuple[str, ...], numbers: tuple[str, ...]
) -> pd.DataFrame | None:
    """The table with its columns checked; None when it has no rows."""
    lacking = [name for name in columns if name not in table]
    if lacking:
        raise _corrupt(path, f"it lacks the columns {', '.join(lacking)}")
    for name in numbers if len(table) else ():
        if not pd.api.types.is_numeric_dtype(table[name]) or not np.isfinite(table[name]).all():
            raise _corrupt(path, f"the column {name} holds something else than numbers")
    return table if len(table) else None
