"""The release candidate against what stood before it, image by image: the champion, else the fp32 parent."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from fleet.device.errors import UserError
from tasks.champion import Champion, Predicted, in_common
from tasks.report.evidence import Evidence
from tasks.report.rows import Row, headline

Classes = npt.NDArray[np.int64]
_NO_CLASS = -1


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """Two models' predictions on the same N test images."""

    candidate: str
    before: str
    """The variant compared with; empty where there is nothing to compare with."""
    champion: str
    """Name and version of the champion it belongs to; empty for the candidate's own parent."""
    labels: tuple[str, ...]
    sha256: tuple[str, ...]
    truth: Classes
    before_classes: Classes
    """-1 where the model before predicted a class this one does not have."""
    after_classes: Classes
    left_out: int
    """Test images the model before was not asked about, or whose class it does not know."""

    @property
    def compared(self) -> bool:
        """Whether there is a model before."""
        return bool(self.before)

    @property
    def right_to_wrong(self) -> Classes:
        """Indices of the images only the model before got right."""
        return np.flatnonzero((self.before_classes == self.truth) & (self.after_classes != self.truth))

    @property
    def wrong_to_right(self) -> Classes:
        """Indices of the images only the candidate got right."""
        return np.flatnonzero((self.before_classes != self.truth) & (self.after_classes == self.truth))


@dataclass(frozen=True, kw_only=True)
class ClassRow:
    """One class: shares of its n images that were right, 0..1."""

    label: str
    n: int
    before: float | None
    after: float

    @property
    def delta_pp(self) -> float:
        """What the candidate gained, in percentage points; 0 without a model before."""
        return 0.0 if self.before is None else 100 * (self.after - self.before)


@dataclass(frozen=True, kw_only=True)
class Confused:
    """Images of one class taken for another."""

    truth: str
    predicted: str
    n: int
    """Images of the true class."""
    after: int
    before: int | None


def pair(evidence: Evidence, table: Sequence[Row]) -> Pairing | None:
    """The headline variant's predictions beside the champion's or its parent's; None where there are none.

    Raises:
        UserError: predictions hold a class the model does not have.
    """
    row, frame = headline(tuple(table)), evidence.predictions
    if row is None or frame is None or row.name not in frame or row.name not in evidence.cards:
        return None
    labels = evidence.cards[row.name].names("labels")
    frame = frame[frame["label"] >= 0]
    truth, after = _classes(frame, "label", labels), _classes(frame, row.name, labels)
    alone = Pairing(
        candidate=row.name,
        before="",
        champion="",
        labels=labels,
        sha256=tuple(map(str, frame["sha256"])),
        truth=truth,
        before_classes=np.full(len(frame), _NO_CLASS, np.int64),
        after_classes=after,
        left_out=0,
    )
    if evidence.champion is not None and evidence.champion_predictions is not None:
        paired = _with_champion(alone, row, evidence.champion, evidence.champion_predictions, frame)
        if paired is not None:
            return paired
    parent = _parent(row, frame)
    return (
        alone
        if parent is None
        else replace(alone, before=parent, before_classes=_classes(frame, parent, labels))
    )


def _parent(row: Row, frame: pd.DataFrame) -> str | None:
    """The fp32 variant it was quantised from, else the unpruned one."""
    for changes in ({"precision": "fp32"}, {"precision": "fp32", "pruned_percent": 0}):
        name = replace(row.variant, **changes).name
        if name != row.name and name in frame:
            return name
    return None


def _with_champion(
    alone: Pairing, row: Row, champion: Champion, then: pd.DataFrame, now: pd.DataFrame
) -> Pairing | None:
    """Keep the images both were asked about, as the gate does.

    Returns:
        None where the champion's variant has no predictions, or has them of other images.
    """
    against = row.comparison.against if row.comparison else row.name
    if against not in then:
        return None
    _classes(then, against, champion.labels)
    both = in_common(
        Predicted(table=then, labels=champion.labels, variant=against),
        Predicted(table=now, labels=alone.labels, variant=row.name),
    )
    if not len(both.truth):
        return None
    return replace(
        alone,
        before=against,
        champion=str(champion),
        sha256=tuple(alone.sha256[position] for position in both.rows),
        truth=both.truth,
        before_classes=both.then,
        after_classes=both.now,
        left_out=len(alone.sha256) - len(both.truth),
    )


def _classes(frame: pd.DataFrame, column: str, labels: Sequence[str]) -> Classes:
    values = frame[column].to_numpy()
    low, high = values.min(initial=0), values.max(initial=0)
    if values.dtype.kind not in "iu" or not 0 <= low <= high < len(labels):
        raise UserError(
            f"predictions of {column}: {low} to {high} in {values.dtype}",
            allowed=f"whole numbers from 0 to {len(labels) - 1}, one a class",
            next_step="`dvc repro parity` writes predictions again; git has those of the champion",
        )
    return values.astype(np.int64)


def confusion(pairing: Pairing, predicted: Classes) -> Classes:
    """Counts [true class, predicted class]."""
    size = len(pairing.labels)
    known = predicted >= 0
    flat = pairing.truth[known] * size + predicted[known]
    return np.bincount(flat, minlength=size * size).reshape(size, size).astype(np.int64)


def class_rows(pairing: Pairing) -> tuple[ClassRow, ...]:
    """Every class with test images, what lost most first."""
    found = []
    for number, label in enumerate(pairing.labels):
        mask = pairing.truth == number
        n = int(mask.sum())
        if n:
            before = float((pairing.before_classes[mask] == number).mean()) if pairing.compared else None
            after = float((pairing.after_classes[mask] == number).mean())
            found.append(ClassRow(label=label, n=n, before=before, after=after))
    return tuple(sorted(found, key=lambda row: (row.delta_pp, row.after)))


def most_confused(pairing: Pairing, limit: int) -> tuple[Confused, ...]:
    """The pairs of classes with most errors of the candidate."""
    after, before = confusion(pairing, pairing.after_classes), confusion(pairing, pairing.before_classes)
    errors = after * (1 - np.eye(len(pairing.labels), dtype=np.int64))
    order = np.argsort(-errors, axis=None, kind="stable")[:limit]
    rows, columns = np.unravel_index(order, errors.shape)
    return tuple(
        Confused(
            truth=pairing.labels[t],
            predicted=pairing.labels[p],
            n=int(after[t].sum()),
            after=int(after[t, p]),
            before=int(before[t, p]) if pairing.compared else None,
        )
        for t, p in zip(rows, columns, strict=True)
        if errors[t, p]
    )
