"""Writing a prepared dataset: pixels to a scratch file while decoding, then to shards of one split each."""

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from fleet.device.errors import UserError
from tasks.data.dataset import COLUMNS

SHARD_BYTES = 2**28
"""A shard holds at most this many bytes of pixels: few files, none too large to copy."""


def pixels_sha256(image: npt.NDArray[np.uint8]) -> str:
    """SHA-256 of stored pixels, uint8 RGB [S, S, 3]: what two files must share to be one image to a model."""
    return hashlib.sha256(np.ascontiguousarray(image).data).hexdigest()


class Writer:
    """Collects images of one size on disk, then writes the folder that `Dataset.open` reads.

    Use as a context manager: nothing appears at `out` before `finish`; the scratch folder goes either way.

    Raises:
        UserError: the disk refuses, usually because it is full.
    """

    def __init__(self, out: Path, *, size_px: int) -> None:
        """Write to `out`, with scratch space beside it: the images' bytes, twice."""
        self.out = out
        self._shape = (size_px, size_px, 3)
        self._scratch = out.with_name(f"{out.name}.partial")
        self._pixels = self._scratch / "pixels"
        self._count = 0

    def __enter__(self) -> Self:
        shutil.rmtree(self._scratch, ignore_errors=True)  # left by a run that was killed
        with self._disk():
            self._scratch.mkdir(parents=True)
            self._file = self._pixels.open("wb")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take is of no use any more
            self._file.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def add(self, image: npt.NDArray[np.uint8]) -> int:
        """Keep one image, uint8 RGB [S, S, 3]; returns its number."""
        assert image.shape == self._shape
        with self._disk():
            self._file.write(np.ascontiguousarray(image).data)
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
        with self._disk():
            self._file.close()
            folder.mkdir()
            manifest = self._write_shards(folder, frame.sort_values(["split", "sha256"], kind="stable"))
            manifest.to_parquet(folder / "manifest.parquet", index=False)
            names = json.dumps(label_names, ensure_ascii=False, indent=1)
            (folder / "labels.json").write_text(names + "\n", encoding="utf-8")
            shutil.rmtree(self.out, ignore_errors=True)
            folder.replace(self.out)
        return manifest

    def _write_shards(self, folder: Path, frame: pd.DataFrame) -> pd.DataFrame:
        # Read through a map, written as a plain file: a full disk then is an error, not a bus error.
        pixels = np.memmap(self._pixels, np.uint8, "r", shape=(self._count, *self._shape))
        limit = max(1, SHARD_BYTES // int(np.prod(self._shape)))
        parts = []
        for split, rows in frame.groupby("split"):
            for number, start in enumerate(range(0, len(rows), limit)):
                part = rows.iloc[start : start + limit]
                shard = f"{split}-{number:03d}.npy"
                with (folder / shard).open("wb") as file:
                    header = {"descr": "|u1", "fortran_order": False, "shape": (len(part), *self._shape)}
                    np.lib.format.write_array_header_1_0(file, header)
                    for image in part["number"]:
                        file.write(pixels[image].data)
                parts.append(part.assign(shard=shard, row=np.arange(len(part), dtype=np.int64)))
        return pd.concat(parts, ignore_index=True)[list(COLUMNS)]

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.out}: {error}",
                allowed="a writable folder with room for the dataset twice",
                next_step="free disk space, or lower prepare.stored_size_px or prepare.limit",
            ) from error
