"""The champion: what was released last, kept in the workspace so that a build can be held against it.

    champion/champion.json        `{}` when nothing has been released, else the record below
    champion/predictions.parquet  what its variants answered on its test images, as models/parity has it
    champion/params.yaml          what it was built with

The folder is tracked by git and a dependency of the gate: another champion is another verdict.
"""

import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fleet.device.errors import UserError
from tasks.champion_files import FOLDER, PARAMS, PREDICTIONS, RECORD
from tasks.paired import Paired
from tasks.provenance import sha256_of
from tasks.stage import read_json, write_json
from tasks.variants import Variant

if TYPE_CHECKING:
    import pandas as pd  # half a second: only a comparison imports it


_NOT_VARIANTS = ("sha256", "label")
_NEXT_STEP = "`git checkout champion` in the workspace, or approve the release again"


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ChampionVariant(_Record):
    """One variant of the champion."""

    mnn_sha256: str
    size_bytes: int
    top1: float | None = Field(default=None, ge=0, le=1)
    """Accuracy on its own test set, as a share; None where that has no truth."""


class Champion(_Record):
    """What champion.json says."""

    name: str
    """Of the registered model."""
    version: int
    release_sha256: str
    evidence_sha256: str
    git_commit: str
    labels: tuple[str, ...]
    """Class names in the order of its predictions."""
    variants: dict[str, ChampionVariant]
    predictions_sha256: str
    """SHA-256 of the bytes of predictions.parquet."""
    params_sha256: str = ""
    """SHA-256 of the bytes of params.yaml; empty where there is none."""

    def __str__(self) -> str:
        return f"{self.name} version {self.version}"

    def counterpart(self, name: str) -> str | None:
        """The variant to compare `name` with: of the same name, else the best of the same precision."""
        if name in self.variants:
            return name
        precision = Variant.parse(name).precision
        same = [other for other in sorted(self.variants) if Variant.parse(other).precision == precision]
        return max(same, key=lambda other: self.variants[other].top1 or 0.0, default=None)


def write_champion(
    folder: Path,
    champion: Champion | None = None,
    predictions_parquet: Path | None = None,
    params_yaml: Path | None = None,
) -> None:
    """Make `champion` the one that builds are held against; without one, say that there is none.

    Args:
        folder: The workspace's `champion/`; created when missing.
        champion: The record; its `predictions_sha256` is that of `predictions_parquet`.
        predictions_parquet: The release's models/parity/predictions.parquet.
        params_yaml: What it was built with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if champion is None:
        write_json(folder / RECORD, {})
        (folder / PREDICTIONS).unlink(missing_ok=True)
        (folder / PARAMS).unlink(missing_ok=True)
        return
    assert predictions_parquet is not None
    if params_yaml is None:
        (folder / PARAMS).unlink(missing_ok=True)
    for name, source in ((PREDICTIONS, predictions_parquet), (PARAMS, params_yaml)):
        if source is not None:
            temporary = folder / f".{name}"
            shutil.copyfile(source, temporary)
            temporary.replace(folder / name)
    write_json(folder / RECORD, champion.model_dump(mode="json"))  # last: it names the predictions' bytes


def read_champion(folder: Path) -> Champion | None:
    """The champion in a workspace's `champion/`; None when nothing has been released.

    Raises:
        UserError: there is no record, it is not one, or the predictions beside it are not those it names.
    """
    path, predictions = folder / RECORD, folder / PREDICTIONS
    if not path.is_file():
        raise UserError(
            f"there is no {path}",
            allowed="the champion's record, `{}` before the first release",
            next_step=f"`git checkout {folder}`, or `mkdir -p {folder} && echo '{{}}' > {path}`",
        )
    record = read_json(path)
    if record == {}:
        return None
    try:
        champion = Champion.model_validate(record)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(
            f"{path}: {wrong}", allowed=f"{{}} or {', '.join(Champion.model_fields)}", next_step=_NEXT_STEP
        ) from error
    if len(set(champion.labels)) < len(champion.labels):
        raise UserError(f"{path}: a label twice", allowed="each class once", next_step=_NEXT_STEP)
    for name in champion.variants:
        Variant.parse(name)
    found = sha256_of(predictions) if predictions.is_file() else "no file"
    if found != champion.predictions_sha256:
        raise UserError(
            f"{predictions}: {found}",
            allowed=f"the predictions {path} names, {champion.predictions_sha256}",
            next_step=_NEXT_STEP,
        )
    return champion


def read_predictions(path: Path, labels: Sequence[str], variants: Sequence[str]) -> "pd.DataFrame":
    """Predictions as the stage parity writes them, every value looked at.

    Raises:
        UserError: the file cannot be read, an image is in it twice, a variant is missing, or a class index
            belongs to no label.
    """
    import pandas as pd

    wanted = [*_NOT_VARIANTS, *variants]
    try:
        if path.is_dir():  # pandas would read the files in it
            raise IsADirectoryError("is a folder")
        table = pd.read_parquet(path, columns=wanted)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:  # pyarrow's errors, and pandas'
        missing = isinstance(error, FileNotFoundError)
        raise UserError(
            f"{path}: {'is not there' if missing else ' '.join(str(error).split())[:200]}",
            allowed=f"Parquet with the columns {', '.join(wanted)}",
            next_step="`dvc repro parity`" if path.parent.name != FOLDER else _NEXT_STEP,
        ) from error
    twice = int(table["sha256"].duplicated().sum())
    numbers = table[wanted[1:]]
    whole = all(kind.kind == "i" for kind in numbers.dtypes)
    lowest = [-1, *(0 for _ in variants)]  # a model always answers: -1 would count as the last class
    ranges = ", ".join(f"{name} {table[name].min()}..{table[name].max()}" for name in wanted[1:])
    if twice or not whole or ((numbers >= len(labels)) | (numbers < lowest)).any(axis=None):
        raise UserError(
            f"{path}: {twice} images twice; class indices {ranges}",
            allowed=f"each image once, whole numbers from 0 to {len(labels) - 1}, -1 in `label` for no truth",
            next_step="`dvc repro --force parity`" if path.parent.name != FOLDER else _NEXT_STEP,
        )
    return table


@dataclass(frozen=True, kw_only=True)
class ClassChange:
    """One class before and now."""

    label: str
    paired: Paired


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One variant against the champion's, on the test images that both were judged on."""

    against: str
    """The champion's variant."""
    paired: Paired
    test_count: int
    """Test images of this build whose truth is known and a class of the champion's."""
    unknown_count: int
    """Test images left out because the champion does not know their class."""
    classes: tuple[ClassChange, ...]

    @property
    def n(self) -> int:
        """Images compared."""
        return self.paired.n

    @property
    def drop_pp(self) -> float:
        """Percentage points lost against the champion; negative where it is better now."""
        return round(self.paired.drop_pp, 4)

    @property
    def interval_pp(self) -> tuple[float, float]:
        """95 % confidence interval on `drop_pp`."""
        return round(self.paired.low_pp, 4), round(self.paired.high_pp, 4)

    def to_dict(self) -> dict[str, Any]:
        """What reports/gate.json holds: `champion` and `candidate` are shares of the class's n images."""
        return {
            "against": self.against,
            "n": self.n,
            "drop_pp": self.drop_pp,
            "interval_pp": list(self.interval_pp),
            "classes": [
                {
                    "label": change.label,
                    "n": change.paired.n,
                    "champion": round(change.paired.before, 6),
                    "candidate": round(change.paired.now, 6),
                }
                for change in self.classes
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What one variant answered to its test images."""

    table: "pd.DataFrame"
    """sha256, label, and a column a variant with class indices; -1 in `label` for no truth."""
    labels: Sequence[str]
    """Class names in the order of the indices."""
    variant: str


@dataclass(frozen=True, kw_only=True)
class InCommon:
    """What two models answered to the same N test images, classes numbered as in the newer data set."""

    rows: npt.NDArray[np.int64]
    """Which of the newer predictions these images are."""
    truth: npt.NDArray[np.int64]
    then: npt.NDArray[np.int64]
    """-1 where the champion answered a class that is none any more."""
    now: npt.NDArray[np.int64]


def in_common(then: Predicted, now: Predicted) -> InCommon:
    """Join predictions image by image: by SHA-256, and classes by their names, whose order may differ.

    What is true is what `now`'s data set says: a label corrected since is corrected for both. Images without
    truth, and those of classes that `then` does not know, are left out.
    """
    index = {label: position for position, label in enumerate(now.labels)}
    as_now = np.array([index.get(label, -1) for label in then.labels], np.int64)
    mine = now.table[["sha256", "label", now.variant]].rename(columns={now.variant: "now"})
    mine = mine.assign(row=np.arange(len(mine)))
    mine = mine[mine["label"].isin(as_now[as_now >= 0])]
    theirs = then.table[["sha256", then.variant]].rename(columns={then.variant: "then"})
    both = mine.merge(theirs, on="sha256")
    return InCommon(
        rows=both["row"].to_numpy(np.int64),
        truth=both["label"].to_numpy(np.int64),
        then=as_now[both["then"].to_numpy(np.int64)],
        now=both["now"].to_numpy(np.int64),
    )


def compare(
    champion: Champion, then: "pd.DataFrame", labels: Sequence[str], now: "pd.DataFrame"
) -> dict[str, Comparison]:
    """Hold every variant of a build against the champion's counterpart, image by image.

    Args:
        champion: The record.
        then: Its predictions, a column a variant.
        labels: The build's class names.
        now: The build's predictions, a column a variant.

    Returns:
        Variant to comparison; variants without counterpart are missing, and n is 0 without a common image.
    """
    known = np.array([name in champion.labels for name in labels])
    truth = now.loc[now["label"] >= 0, "label"].to_numpy(np.int64)
    test_count = int(known[truth].sum())
    found: dict[str, Comparison] = {}
    for name in (str(column) for column in now.columns if column not in _NOT_VARIANTS):
        against = champion.counterpart(name)
        if against is None:
            continue
        before = Predicted(table=then, labels=champion.labels, variant=against)
        both = in_common(before, Predicted(table=now, labels=labels, variant=name))
        was_right, is_right = both.then == both.truth, both.now == both.truth
        found[name] = Comparison(
            against=against,
            paired=Paired.of(was_right, is_right),
            test_count=test_count,
            unknown_count=len(truth) - test_count,
            classes=tuple(
                ClassChange(label=labels[c], paired=Paired.of(was_right[which], is_right[which]))
                for c in np.unique(both.truth)
                for which in [both.truth == c]
            ),
        )
    return found


def records(comparisons: Mapping[str, Comparison], same: Collection[str]) -> dict[str, Any]:
    """Key `comparison` of reports/gate.json; what had no image in common is not in it.

    Args:
        comparisons: By variant.
        same: The variants whose file is the champion's own.
    """
    return {
        name: comparison.to_dict() | {"same_file": name in same}
        for name, comparison in comparisons.items()
        if comparison.n
    }
