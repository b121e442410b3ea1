"""Who goes where: one copy of each image, disjoint splits, and what a source lacks taken out of train.

Frames have the columns sha256, label (-1 unknown), split, source, group. The random order is that of a keyed
hash of the image's pixels (or its group), so it depends neither on file names nor on the source's order.
"""

import hashlib

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import Field

from fleet.device.errors import UserError
from tasks.data.listing import Refusal, SplitRefusal
from tasks.stage import Params

PRECEDENCE = ("test", "field_test", "val", "calibration", "train", "field")
"""The split that keeps an image, or a group, found in two: a test set must never lose to the training set."""


class HoldoutParams(Params):
    """Shares of train that a source without these splits gives up; a split the source has stays as it is."""

    val: float = Field(default=0.1, gt=0, le=0.5)
    test: float = Field(default=0.2, gt=0, le=0.5)


class CalibrationParams(Params):
    """How many images of train are set apart to measure activation ranges; never padded."""

    share: float = Field(default=0.1, gt=0, le=0.5)
    min_images: int = Field(default=100, ge=1)
    max_images: int = Field(default=500, ge=1)


class FieldParams(Params):
    """What stands for the devices' surroundings in shift experiments."""

    share: float = Field(default=0.0, ge=0, le=0.5)
    """Share of train taken as field images when the source has none."""
    test_share: float = Field(default=0.5, ge=0, lt=1)
    """Share of the labelled field images that becomes field_test; the rest loses its labels."""


def drop_repeats(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[Refusal]]:
    """Keep one copy of each image, in the split of highest precedence.

    An image under two classes is dropped whole: nothing says which class is right.

    Returns:
        The rows that stay, and a refusal for each that does not.
    """
    refusals: list[Refusal] = []
    known = frame[frame["label"] >= 0]
    classes = known.groupby("sha256")["label"].nunique()
    torn = frame["sha256"].isin(classes.index[classes > 1])
    for digest, rows in frame[torn].groupby("sha256"):
        reason = (
            f"the same pixels under several classes: {', '.join(rows['source'])} (sha256 {str(digest)[:12]})"
        )
        refusals += [Refusal(name, "label_conflict", reason) for name in rows["source"]]
    frame = _by_precedence(frame[~torn])
    repeated = frame.duplicated("sha256")
    first = frame[~repeated].set_index("sha256")
    for row in frame[repeated].to_dict("records"):
        source, split = first.loc[row["sha256"], ["source", "split"]]
        kind: SplitRefusal = "duplicate" if row["split"] == split else "split_overlap"
        refusals.append(Refusal(row["source"], kind, f"the same pixels as {source}, kept in {split}"))
    return frame[~repeated].reset_index(drop=True), refusals


def drop_group_overlaps(frame: pd.DataFrame) -> tuple[pd.DataFrame, list[Refusal]]:
    """Keep each group in one split only: the one of highest precedence in which it has an image."""
    frame = _by_precedence(frame)
    home = frame.groupby("group")["split"].transform("first")
    astray = (frame["group"] != "") & (frame["split"] != home)
    refusals = [
        Refusal(source, "group_overlap", f"its group {group} is in {kept}")
        for source, group, kept in zip(
            frame["source"][astray], frame["group"][astray], home[astray], strict=True
        )
    ]
    return frame[~astray].reset_index(drop=True), refusals


def fill_splits(
    frame: pd.DataFrame,
    *,
    holdout: HoldoutParams,
    calibration: CalibrationParams,
    field: FieldParams,
    seed: int,
) -> pd.DataFrame:
    """Take the splits the source lacks out of train, field_test out of field; unlabel what stays in field.

    Raises:
        UserError: too few images in train.
    """
    split = frame["split"].to_numpy(object).copy()

    def move(source: str, target: str, count: int, *, keep_one: bool = True) -> None:
        at = np.flatnonzero(split == source)
        split[at[take(frame.iloc[at], count, key=f"{seed}:{target}", keep_one=keep_one)]] = target

    train = int((split == "train").sum())
    for target, share in (("test", holdout.test), ("val", holdout.val), ("field", field.share)):
        if target not in split:
            move("train", target, round(share * train))
    if "field_test" not in split:
        labelled = int(((split == "field") & (frame["label"] >= 0)).sum())
        move("field", "field_test", round(field.test_share * labelled), keep_one=False)
    if "calibration" not in split:
        move("train", "calibration", calibration_count(int((split == "train").sum()), calibration))
    _require_splits(split)
    return frame.assign(split=split, label=frame["label"].where(split != "field", -1))


def calibration_count(train_images: int, params: CalibrationParams) -> int:
    """How many of `train_images` to set apart: `share` of them within the limits, at most half.

    Raises:
        UserError: half of train is less than `min_images`.
    """
    if train_images < 2 * params.min_images:
        raise UserError(
            f"train has {train_images} images; {params.min_images} of them are wanted for calibration",
            allowed=f"at least {2 * params.min_images} training images: at most half is set apart",
            next_step="add images, or lower prepare.calibration.min_images (fewer scenes, worse int8 ranges)",
        )
    return min(params.max_images, max(params.min_images, int(params.share * train_images)))


def take(frame: pd.DataFrame, count: int, *, key: str, keep_one: bool) -> npt.NDArray[np.int64]:
    """Choose `count` rows, each class in proportion; whole groups only, then classes are left to chance.

    Args:
        frame: Rows to choose from.
        count: How many; with groups as near to it as whole groups in their random order come, at least one.
        key: Seeds the order.
        keep_one: Leave at least one row of every class.

    Returns:
        Positions in `frame`, ascending.
    """
    grouped = frame["group"].to_numpy(object) != ""
    unit = np.where(grouped, "group:" + frame["group"].astype(object), frame["sha256"])
    order = np.argsort([hashlib.sha256(f"{key}:{u}".encode()).hexdigest() for u in unit], kind="stable")
    if grouped.any():
        return _take_groups(unit[order], order, count)
    labels = frame["label"].to_numpy(np.int64)
    chosen = [np.empty(0, np.int64)]
    for label, quota in _quotas(labels, count, keep_one=keep_one).items():
        chosen.append(order[labels[order] == label][:quota])
    return np.sort(np.concatenate(chosen))


def _take_groups(
    units: npt.NDArray[np.object_], order: npt.NDArray[np.int64], count: int
) -> npt.NDArray[np.int64]:
    groups = [order[units == unit] for unit in dict.fromkeys(units)]
    chosen: list[npt.NDArray[np.int64]] = []
    total = 0
    for rows in groups:
        if abs(total + len(rows) - count) < abs(total - count):
            chosen.append(rows)
            total += len(rows)
    if (
        not chosen and count and len(groups) > 1
    ):  # even one group is more than wanted: the smallest is nearest
        chosen = [min(groups, key=len)]
    return np.sort(np.concatenate([np.empty(0, np.int64), *chosen]))


def _quotas(labels: npt.NDArray[np.int64], count: int, *, keep_one: bool) -> dict[int, int]:
    """Split `count` over the classes in proportion (largest remainder), as far as there is room."""
    classes, sizes = np.unique(labels, return_counts=True)
    exact = sizes * (min(count, len(labels)) / max(len(labels), 1))
    room = sizes - 1 if keep_one else sizes
    quotas = np.minimum(exact.astype(np.int64), room)
    count = min(count, int(room.sum()))
    while quotas.sum() < count:  # more than one round only where a class had no room for its share
        for index in np.lexsort((classes, -(exact - np.floor(exact)))):
            if quotas.sum() < count and quotas[index] < room[index]:
                quotas[index] += 1
    return {int(c): int(q) for c, q in zip(classes, quotas, strict=True)}


def _by_precedence(frame: pd.DataFrame) -> pd.DataFrame:
    rank = frame["split"].map({name: position for position, name in enumerate(PRECEDENCE)})
    return frame.assign(_rank=rank).sort_values(["_rank", "source"], kind="stable").drop(columns="_rank")


def _require_splits(split: npt.NDArray[np.object_]) -> None:
    empty = [name for name in ("train", "val", "calibration", "test") if name not in split]
    if empty:
        raise UserError(
            f"no images in {', '.join(empty)}",
            allowed="at least one image in each of train, val, calibration and test",
            next_step="add images, or larger shares under prepare.holdout, or smaller groups",
        )
