"""What a verdict is made from, read from a workspace as it lies there."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleet.device.errors import UserError
from tasks import champion as champions
from tasks import champion_files
from tasks.champion import Champion, Comparison
from tasks.judge.floors import parent_of
from tasks.paired import Paired
from tasks.report_keys import names_in
from tasks.stage import REPORTS, read_json

if TYPE_CHECKING:
    import pandas as pd

_MODELS = Path("models/mnn")
_PREDICTIONS = Path("models/parity/predictions.parquet")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model file."""

    sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Material:
    """Everything the checks look at."""

    convert: Mapping[str, Any]
    """reports/convert.json."""
    parity: Mapping[str, Any]
    """reports/parity.json."""
    benchmarks: Mapping[str, Mapping[str, Any]]
    """Device to reports/benchmark/DEVICE.json."""
    probes: Mapping[str, Mapping[str, Any]]
    """Device to reports/probe/DEVICE.json."""
    models: Mapping[str, Model]
    """Variant to models/mnn/VARIANT/model.mnn."""
    cards: Mapping[str, Mapping[str, Any]]
    """Variant to models/mnn/VARIANT/card.json."""
    labels: Sequence[str] = ()
    """The build's classes, the same in every card."""
    predicted_top1: Mapping[str, float] = field(default_factory=dict)
    """Variant to the accuracy that models/parity/predictions.parquet comes to; empty without truth."""
    predicted_count: int | None = None
    """Test images in models/parity/predictions.parquet."""
    parent_pairs: Mapping[str, Paired] = field(default_factory=dict)
    """Variant to itself beside the one it was made from, on the test images whose truth is known."""
    champion: Champion | None = None
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)

    @property
    def variants(self) -> list[str]:
        """What is judged: all that the convert stage speaks of, and all that lies there."""
        return sorted({*names_in(self.convert), *self.models})

    def of_champion(self) -> set[str]:
        """The variants whose file is the champion's own."""
        its = self.champion.variants if self.champion else {}
        pairs = {name: (self.models.get(name), its.get(c.against)) for name, c in self.comparisons.items()}
        return {
            name for name, (ours, then) in pairs.items() if ours and then and ours.sha256 == then.mnn_sha256
        }


def read_material(workspace: Path, devices: Sequence[str]) -> Material:
    """Read reports, models, cards, predictions and champion of a workspace.

    Raises:
        UserError: one is missing or cannot be read, a device's report should not be there, or there is no
            model at all.
    """
    reports = workspace / REPORTS
    _refuse_foreign(reports / "benchmark", devices)
    models = {path.parent.name: _model(path) for path in sorted((workspace / _MODELS).glob("*/model.mnn"))}
    if not models:
        raise UserError(
            f"{workspace / _MODELS} holds no model",
            allowed="at least one VARIANT/model.mnn with its card",
            next_step="`dvc repro convert`",
        )
    cards = {name: read_json(workspace / _MODELS / name / "card.json") for name in models}
    labels = _labels(cards)
    parity = _report(reports / "parity.json")
    now = champions.read_predictions(workspace / _PREDICTIONS, labels, _predicted(parity, models))
    champion = champions.read_champion(workspace / champion_files.FOLDER)
    comparisons: dict[str, Comparison] = {}
    if champion is not None:
        path = workspace / champion_files.FOLDER / champion_files.PREDICTIONS
        then = champions.read_predictions(path, champion.labels, list(champion.variants))
        comparisons = champions.compare(champion, then, labels, now)
    known = now[now["label"] >= 0]
    return Material(
        convert=_report(reports / "convert.json"),
        parity=parity,
        benchmarks={name: _report(reports / "benchmark" / f"{name}.json") for name in devices},
        probes={name: _report(reports / "probe" / f"{name}.json") for name in devices},
        models=models,
        cards=cards,
        labels=labels,
        predicted_top1={
            str(name): float((known[name] == known["label"]).mean()) for name in now.columns[2:] if len(known)
        },
        predicted_count=len(now),
        parent_pairs=_parent_pairs(known),
        champion=champion,
        comparisons=comparisons,
    )


def _parent_pairs(known: "pd.DataFrame") -> dict[str, Paired]:
    """Each variant of the predictions beside its parent, where both are there."""
    truth = known["label"].to_numpy()
    right = {str(name): known[name].to_numpy() == truth for name in known.columns[2:] if len(known)}
    pairs = {name: right.get(parent_of(name) or "") for name in right}
    return {name: Paired.of(before, right[name]) for name, before in pairs.items() if before is not None}


def _refuse_foreign(benchmarks: Path, devices: Sequence[str]) -> None:
    foreign = sorted({path.stem for path in benchmarks.glob("*.json")} - set(devices))
    if foreign:
        raise UserError(
            f"reports/benchmark holds reports of {', '.join(foreign)}",
            allowed=f"reports of gate.devices: {', '.join(devices)}",
            next_step="delete the reports of devices that are gone, or add the device to gate.devices",
        )


def _report(path: Path) -> dict[str, Any]:
    """A stage's flat report.

    Raises:
        UserError: it is missing or no JSON object.
    """
    report = read_json(path)
    if not isinstance(report, dict):
        raise UserError(
            f"{path} holds {str(report)[:80] if report is not None else 'null'}",
            allowed="an object of flat keys, VARIANT/key",
            next_step="delete it, then `edgeloop build`",
        )
    return report


def _model(path: Path) -> Model:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}",
            allowed="a model file that can be read",
            next_step="delete it, then `edgeloop build`",
        ) from error
    return Model(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))


def _labels(cards: Mapping[str, Any]) -> list[str]:
    found = {name: card.get("labels") if isinstance(card, dict) else None for name, card in cards.items()}
    labels = next(iter(found.values()))
    odd = [name for name, its in found.items() if not isinstance(its, list) or not its or its != labels]
    if odd:
        raise UserError(
            f"models/mnn/{odd[0]}/card.json: labels {str(found[odd[0]])[:80]}",
            allowed="the classes of the data set, the same in every card",
            next_step="`dvc repro --force convert`",
        )
    return [str(label) for label in labels or ()]


def _predicted(parity: Mapping[str, Any], models: Mapping[str, Model]) -> list[str]:
    """The models that parity speaks of; of the others there can be no predictions."""
    return [name for name in models if any(key.startswith(f"{name}/") for key in parity)]
