"""Reading a prepared dataset: a manifest and uint8 NHWC shards, memory-mapped.

Layout of the folder (written by `tasks.prepare`):

    manifest.parquet   one row an image:
        sha256         of its stored pixels (uint8 RGB [S, S, 3]): equal ones are one image to a model
        label          index into labels.json, -1 where unknown (split `field`)
        split          one of SplitName
        source         printable path inside the source
        width, height  of the upright picture before crop and resize, in pixels
        group          images of one group lie in one split only; empty: a group of its own
        origin         base (the source) or fleet (labelled field images added later)
        added_in       the input set that added it; empty for the base
        shard, row     where its pixels are; rows of a split are ordered by sha256
    labels.json        class names; a label is an index into this list, -1 where unknown (split `field`)
    SPLIT-000.npy ...  uint8 RGB [N, S, S, 3], S = the stored size, rows of one split only
"""

import json
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd

from fleet.device.errors import UserError

PREPARED = Path("data/prepared")
"""Where a workspace keeps its dataset."""

SplitName = Literal["train", "val", "calibration", "test", "field", "field_test"]

COLUMNS = (
    "sha256", "label", "split", "source", "width", "height", "group", "origin", "added_in", "shard", "row",
)  # fmt: skip


@dataclass(frozen=True)
class Split:
    """The images of one split, in manifest order."""

    name: str
    shards: tuple[npt.NDArray[np.uint8], ...]
    """Memory-mapped uint8 RGB [N, S, S, 3] each."""
    labels: npt.NDArray[np.int64]
    sha256: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def _starts(self) -> list[int]:
        return list(np.cumsum([0, *(len(shard) for shard in self.shards)]))

    def image(self, index: int) -> npt.NDArray[np.uint8]:
        """One uint8 RGB image [S, S, 3], copied out of the map."""
        starts = self._starts
        shard = bisect_right(starts, index) - 1
        return np.array(self.shards[shard][index - starts[shard]])

    def images(self, indices: npt.NDArray[np.int64] | range | list[int]) -> npt.NDArray[np.uint8]:
        """Several images, uint8 RGB [len(indices), S, S, 3], in the order asked for."""
        starts = self._starts
        wanted = np.asarray(indices, np.int64)
        size = self.shards[0].shape[1:]
        out = np.empty((len(wanted), *size), np.uint8)
        which = np.searchsorted(starts, wanted, side="right") - 1
        for shard in np.unique(which):
            mask = which == shard
            out[mask] = self.shards[shard][wanted[mask] - starts[shard]]
        return out

    def batches(self, batch_size: int) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
        """All images in order, as (uint8 RGB [N, S, S, 3], labels [N])."""
        for start in range(0, len(self), batch_size):
            chosen = range(start, min(start + batch_size, len(self)))
            yield self.images(chosen), self.labels[chosen.start : chosen.stop]


@dataclass(frozen=True)
class Dataset:
    """A prepared dataset."""

    root: Path
    manifest: pd.DataFrame
    label_names: tuple[str, ...]

    @classmethod
    def open(cls, root: Path) -> "Dataset":
        """Open the folder `tasks.prepare` wrote.

        Raises:
            UserError: files are missing or are not what prepare writes.
        """
        try:
            manifest = pd.read_parquet(root / "manifest.parquet")
            names = tuple(json.loads((root / "labels.json").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise UserError(
                f"dataset {root}: {error}",
                allowed="a folder written by the prepare stage",
                next_step="run `dvc repro prepare`",
            ) from error
        missing = [column for column in COLUMNS if column not in manifest]
        if missing or manifest.empty:
            raise UserError(
                f"dataset {root}: the manifest has {len(manifest)} rows and lacks the columns {missing}",
                allowed=f"at least one row, the columns {', '.join(COLUMNS)}",
                next_step="run `dvc repro prepare`",
            )
        return cls(root, manifest, names)

    @property
    def stored_size(self) -> int:
        """Side of the stored square images in pixels."""
        return int(np.load(self.root / str(self.manifest["shard"].iloc[0]), mmap_mode="r").shape[1])

    def split(self, name: SplitName) -> Split:
        """One split; an absent one is empty."""
        rows = self.manifest[self.manifest["split"] == name]
        shards = tuple(np.load(self.root / str(shard), mmap_mode="r") for shard in rows["shard"].unique())
        return Split(name, shards, rows["label"].to_numpy(np.int64), tuple(rows["sha256"]))
