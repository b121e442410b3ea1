"""Stage `prepare`: images of any source in; a manifest, labels and memory-mapped shards out.

Every file the source offers is in the dataset or, with the reason, in reports/prepare_refused.csv.
"""

import csv
import io
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import Field

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.data.dataset import PREPARED
from tasks.data.decode import HANDLED, Handled, Unusable, decode
from tasks.data.digits import list_digits
from tasks.data.layouts import ClassLevel, class_folders, split_lists
from tasks.data.listing import HARMLESS, REFUSAL_KINDS, Entry, Listing, Refusal, printable
from tasks.data.shards import Writer, pixels_sha256
from tasks.data.splits import (
    CalibrationParams,
    FieldParams,
    HoldoutParams,
    drop_group_overlaps,
    drop_repeats,
    fill_splits,
    take,
)
from tasks.data.trees import read_folder, read_tar
from tasks.progress import track
from tasks.stage import REPORTS, Params, stage

_CHUNK = 64  # files held in memory at once


class DigitsSource(Params):
    """scikit-learn's handwritten digits, no file needed."""

    kind: Literal["digits"]
    path: Path
    """The module that reads them stands for the set: dvc.yaml depends on it."""


class FolderSource(Params):
    """A folder of CLASS/IMAGE, or of SPLIT/CLASS/IMAGE."""

    kind: Literal["folder"]
    path: Path
    group: re.Pattern[str] | None = None
    """Found in an image's path, it names the group (person, session) that must stay in one split."""


class TarSource(Params):
    """A tar archive of such a folder, read without extracting it."""

    kind: Literal["tar"]
    path: Path
    group: re.Pattern[str] | None = None
    """As in FolderSource."""


class SplitListSource(Params):
    """A folder or tar archive with train.txt, val.txt, test.txt and classes.csv (Grocery Store dataset)."""

    kind: Literal["split_list"]
    path: Path
    labels: ClassLevel = "fine"
    iconic: bool = False
    """Take each class's product picture as images of the split `field`: another domain than shelves."""
    group: re.Pattern[str] | None = None
    """As in FolderSource."""


Source = Annotated[DigitsSource | FolderSource | TarSource | SplitListSource, Field(discriminator="kind")]


class PrepareParams(Params):
    """Section `prepare` of params.yaml."""

    source: Source
    stored_size_px: int = Field(ge=8, le=1024)
    """Side of the stored squares: the largest model input that needs no enlarging."""
    seed: int = 0
    """Seeds every random choice of this stage."""
    holdout: HoldoutParams = HoldoutParams()
    calibration: CalibrationParams = CalibrationParams()
    field: FieldParams = FieldParams()
    limit: int | None = Field(default=None, ge=1)
    """Read at most this many images, classes and splits in proportion; null reads all."""
    min_side_px: int = Field(default=8, ge=1)
    """Images with a shorter side are refused."""
    max_refused_share: float = Field(default=0.1, ge=0, le=1)
    """Above this share of unusable files the stage stops: the source itself is in doubt."""


@dataclass(frozen=True)
class _Stored:
    """One image as it will lie in a shard."""

    image: npt.NDArray[np.uint8]
    """uint8 RGB [S, S, 3]."""
    sha256: str
    width: int
    height: int
    handled: tuple[Handled, ...]


def prepare(params: PrepareParams, *, out: Path = PREPARED, reports: Path = REPORTS) -> dict[str, float]:
    """Write the dataset to `out` and the list of refused files to `reports`.

    Returns:
        The report: counts by split, refusal and conversion.

    Raises:
        UserError: the source is missing, too many of its files are unusable, or there are too few images.
    """
    listing = list_source(params.source)
    entries = limited(listing.entries, params.limit, seed=params.seed)
    with Writer(out, size_px=params.stored_size_px) as writer:
        rows, refusals, handled = _read_all(entries, params, writer)
        frame, label_names, more = _clean(rows, listing)
        refusals = [*listing.refusals, *refusals, *more]
        write_refusals(reports / "prepare_refused.csv", refusals)
        _require_usable(refusals, len(frame), params.max_refused_share)
        _require_classes(label_names)
        frame = fill_splits(
            frame,
            holdout=params.holdout,
            calibration=params.calibration,
            field=params.field,
            seed=params.seed,
        )
        manifest = writer.finish(frame.assign(origin="base", added_in=""), label_names)
    report: dict[str, float] = {f"refused_{kind}_count": 0 for kind in REFUSAL_KINDS}
    report |= {f"handled_{kind}_count": handled[kind] for kind in HANDLED}
    report |= {f"refused_{kind}_count": n for kind, n in Counter(r.kind for r in refusals).items()}
    report |= {f"{split}_images_count": int(n) for split, n in manifest["split"].value_counts().items()}
    return report | {
        "images_count": len(manifest),
        "classes_count": len(label_names),
        "over_limit_count": len(listing.entries) - len(entries),
        "stored_size_px": params.stored_size_px,
    }


def list_source(source: Source) -> Listing:
    """List what a source offers, without decoding anything.

    Raises:
        UserError: it is missing or not of its kind.
    """
    match source:
        case DigitsSource():
            return list_digits()
        case FolderSource():
            return class_folders(read_folder(source.path), source.group)
        case TarSource():
            return class_folders(read_tar(source.path), source.group)
        case SplitListSource():
            tree = read_folder(source.path) if source.path.is_dir() else read_tar(source.path)
            return split_lists(tree, level=source.labels, iconic=source.iconic, group=source.group)


def limited(entries: list[Entry], limit: int | None, *, seed: int) -> list[Entry]:
    """At most `limit` entries in their order, each split and class in proportion."""
    if limit is None or limit >= len(entries):
        return entries
    strata = {key: number for number, key in enumerate(dict.fromkeys((e.split, e.label) for e in entries))}
    frame = pd.DataFrame(
        {
            "sha256": [e.name for e in entries],
            "label": [strata[e.split, e.label] for e in entries],
            "group": "",
        }
    )
    return [entries[at] for at in take(frame, limit, key=f"{seed}:limit", keep_one=False)]


def _read_all(
    entries: list[Entry], params: PrepareParams, writer: Writer
) -> tuple[list[dict[str, Any]], list[Refusal], Counter[Handled]]:
    contract = Preprocess(size_px=params.stored_size_px)
    rows: list[dict[str, Any]] = []
    refusals: list[Refusal] = []
    handled: Counter[Handled] = Counter()
    for entry, result in track(
        _results(entries, contract, params.min_side_px), "prepare: images", len(entries)
    ):
        if isinstance(result, Refusal):
            refusals.append(result)
            continue
        handled.update(result.handled)
        rows.append(
            {
                "number": writer.add(result.image),
                "sha256": result.sha256,
                "label_name": entry.label,
                "split": entry.split or "train",
                "source": entry.name,
                "width": result.width,
                "height": result.height,
                "group": entry.group,
            }
        )
    return rows, refusals, handled


def _results(
    entries: list[Entry], contract: Preprocess, min_side_px: int
) -> Iterator[tuple[Entry, _Stored | Refusal]]:
    """Read in order (archives dislike jumping), decode on all cores, yield in order."""

    def store(entry: Entry, data: bytes | Refusal) -> _Stored | Refusal:
        if isinstance(data, Refusal):
            return data
        decoded = decode(data, min_side_px=min_side_px)
        if isinstance(decoded, Unusable):
            return Refusal(entry.name, decoded.kind, decoded.reason)
        image = contract.resize(decoded.image)
        height, width = decoded.image.shape[:2]
        return _Stored(image, pixels_sha256(image), width, height, decoded.handled)

    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter(
            "ignore"
        )  # Pillow's, on odd metadata and large sizes: decode() judges these itself
        for start in range(0, len(entries), _CHUNK):
            chunk = entries[start : start + _CHUNK]
            yield from zip(chunk, pool.map(store, chunk, map(_read, chunk)), strict=True)


def _read(entry: Entry) -> bytes | Refusal:
    try:
        return entry.read()
    except OSError as error:
        return Refusal(entry.name, "unreadable", str(error))


def _clean(
    rows: list[dict[str, Any]], listing: Listing
) -> tuple[pd.DataFrame, tuple[str, ...], list[Refusal]]:
    """Number the labels, drop repeats and straying group members, name the classes left without images."""
    columns = ["number", "sha256", "label_name", "split", "source", "width", "height", "group"]
    frame = pd.DataFrame(rows, columns=columns)
    place = {name: label for label, name in enumerate(listing.class_names)}
    frame["label"] = frame["label_name"].map(place).fillna(-1).astype(np.int64)
    frame, repeats = drop_repeats(frame)
    frame, astray = drop_group_overlaps(frame)
    alive = set(frame["label"])
    names = tuple(name for name, label in place.items() if label in alive)
    frame["label"] = frame["label_name"].map({n: i for i, n in enumerate(names)}).fillna(-1).astype(np.int64)
    empty = [
        Refusal(name, "empty_class", "no image of this class is left") for name in place if name not in names
    ]
    return frame.drop(columns="label_name"), names, [*repeats, *astray, *empty]


def write_refusals(path: Path, refusals: list[Refusal]) -> None:
    """Write one row a refused file, ordered by name."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(("name", "kind", "reason"))
    table.writerows(sorted((r.name, r.kind, printable(r.reason)) for r in refusals))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.getvalue(), encoding="utf-8")


def _require_usable(refusals: list[Refusal], kept: int, max_share: float) -> None:
    bad = [refusal for refusal in refusals if refusal.kind not in HARMLESS]
    share = len(bad) / max(1, len(bad) + kept)
    if kept and share <= max_share:
        return
    examples = "; ".join(f"{r.name} ({r.kind}: {r.reason})" for r in bad[:3])
    raise UserError(
        f"{len(bad)} of {len(bad) + kept} images are unusable ({100 * share:.1f} %)"
        + (f": {examples}" if bad else ""),
        allowed=f"at least one image, at most {100 * max_share:g} % unusable (prepare.max_refused_share)",
        next_step="see reports/prepare_refused.csv; mend or remove these files, or raise the limit",
    )


def _require_classes(names: tuple[str, ...]) -> None:
    if len(names) < 2:
        raise UserError(
            f"the source has {len(names)} class with images: {', '.join(names) or 'none'}",
            allowed="at least two classes",
            next_step="give each class a folder of its own: CLASS/IMAGE, or SPLIT/CLASS/IMAGE",
        )


def main() -> None:
    """Run the stage in the current workspace."""
    with stage("prepare", PrepareParams) as run:
        run.report(prepare(run.params))


if __name__ == "__main__":
    main()
