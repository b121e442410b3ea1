"""Writing a prepared dataset: pixels to a scratch map while decoding, then to shards of one split each."""

import hashlib
import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from tasks.data.dataset import COLUMNS

SHARD_BYTES = 2**28
"""A shard holds at most this many bytes of pixels: few files, none too large to copy."""


def pixels_sha256(image: npt.NDArray[np.uint8]) -> str:
    """SHA-256 of stored pixels, uint8 RGB [S, S, 3]: what two files must share to be one image to a model."""
    return hashlib.sha256(np.ascontiguousarray(image).data).hexdigest()


class Writer:
    """Collects images of one size on disk, then writes the folder that `Dataset.open` reads.

    Use as a context manager: nothing appears at `out` before `finish`; the scratch folder goes either way.
    """

    def __init__(self, out: Path, *, capacity: int, size_px: int) -> None:
        """Reserve (sparse) room for `capacity` images beside `out`."""
        self.out, self.size_px = out, size_px
        self._scratch = out.with_name(f"{out.name}.partial")
        self._pixels = self._scratch / "pixels.npy"
        self._capacity, self._count = capacity, 0

    def __enter__(self) -> Self:
        shutil.rmtree(self._scratch, ignore_errors=True)  # left by a run that was killed
        self._scratch.mkdir(parents=True)
        shape = (self._capacity, self.size_px, self.size_px, 3)
        self._map = np.lib.format.open_memmap(self._pixels, "w+", np.uint8, shape)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)

    def add(self, image: npt.NDArray[np.uint8]) -> int:
        """Keep one image, uint8 RGB [S, S, 3]; returns its number."""
        self._map[self._count] = image
        self._count += 1
        return self._count - 1

    def finish(self, frame: pd.DataFrame, label_names: tuple[str, ...]) -> pd.DataFrame:
        """Write shards, manifest and labels, and put the folder in place of `out`.

        Args:
            frame: One row an image to keep: the manifest's columns except shard and row, and the `number`
                `add` gave it.
            label_names: Class names in the order of their labels.

        Returns:
            The manifest: rows by split, then by sha256, so that the first n of a split are a random sample.
        """
        folder = self._scratch / "prepared"
        folder.mkdir()
        rows_per_shard = max(1, SHARD_BYTES // (3 * self.size_px**2))
        parts = []
        for split, rows in frame.sort_values(["split", "sha256"], kind="stable").groupby("split"):
            for number, start in enumerate(range(0, len(rows), rows_per_shard)):
                part = rows.iloc[start : start + rows_per_shard]
                shard = f"{split}-{number:03d}.npy"
                self._write_shard(folder / shard, part["number"].to_numpy(np.int64))
                parts.append(part.assign(shard=shard, row=np.arange(len(part), dtype=np.int64)))
        manifest = pd.concat(parts, ignore_index=True)[list(COLUMNS)]
        manifest.to_parquet(folder / "manifest.parquet", index=False)
        names = json.dumps(label_names, ensure_ascii=False, indent=1)
        (folder / "labels.json").write_text(names + "\n", encoding="utf-8")
        shutil.rmtree(self.out, ignore_errors=True)
        folder.replace(self.out)
        return manifest

    def _write_shard(self, path: Path, numbers: npt.NDArray[np.int64]) -> None:
        shape = (len(numbers), self.size_px, self.size_px, 3)
        shard = np.lib.format.open_memmap(path, "w+", np.uint8, shape)
        for row, number in enumerate(numbers):
            shard[row] = self._map[number]
        shard.flush()
