"""What a prepared dataset really holds, measured image by image: the tables that `tasks.validate` judges."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from tasks.data.dataset import Dataset
from tasks.data.shards import pixels_sha256
from tasks.progress import track

REQUIRED_SPLITS = ("train", "val", "calibration", "test")


@dataclass(frozen=True)
class Facts:
    """Three tables, one row each an image, a class, a split."""

    images: pd.DataFrame
    """The manifest and, measured: shard_state ("ok" or what is wrong), pixels_match (None without pixels),
    mean_brightness and contrast (mean and standard deviation over pixels and channels, 0 to 255), side_px
    (stored), aspect_ratio (>= 1), enlargement (stored side over the picture's shorter side),
    label_fits_split, group_splits (how many splits the image's group is in)."""
    classes: pd.DataFrame
    """class_name, train_images, test_images, imbalance (largest class's train images over this one's)."""
    splits: pd.DataFrame
    """split, images: the splits every build needs, whether they have images or not."""


def examine(dataset: Dataset) -> Facts:
    """Measure a dataset; reads every pixel once."""
    images = dataset.manifest.reset_index(drop=True)
    shards = [(str(shard), rows) for shard, rows in images.groupby("shard", sort=False)]
    tracked = track(shards, "validate: shards", len(shards))
    images = images.join(pd.concat([_examine_shard(dataset.root, shard, rows) for shard, rows in tracked]))
    images["shard_state"] = images["shard_state"].fillna("no shard named")
    shorter, longer = images[["width", "height"]].min(axis=1), images[["width", "height"]].max(axis=1)
    images["aspect_ratio"] = longer / shorter
    images["enlargement"] = images["side_px"] / shorter
    images["label_fits_split"] = (images["label"] >= 0) == (images["split"] != "field")
    per_group = images[images["group"] != ""].groupby("group")["split"].nunique()
    images["group_splits"] = images["group"].map(per_group).fillna(1).astype(np.int64)
    return Facts(images, _classes(images, dataset.label_names), _splits(images))


def _examine_shard(root: Path, name: str, rows: pd.DataFrame) -> pd.DataFrame:
    """shard_state, pixels_match, mean_brightness, contrast and side_px for the rows of one shard."""
    found = pd.DataFrame(
        {
            "shard_state": "ok",
            "pixels_match": None,
            "mean_brightness": np.nan,
            "contrast": np.nan,
            "side_px": 0,
        },
        index=rows.index,
    )
    pixels = _open_shard(root, name)
    if isinstance(pixels, str):
        return found.assign(shard_state=pixels)
    if len(pixels) != len(rows) or not np.array_equal(rows["row"], np.arange(len(rows))):
        return found.assign(shard_state=f"{len(pixels)} images, the manifest numbers {len(rows)}")
    if len(set(rows["split"])) != 1:
        return found.assign(shard_state="rows of several splits")
    found["pixels_match"] = [pixels_sha256(p) == s for p, s in zip(pixels, rows["sha256"], strict=True)]
    found["mean_brightness"] = [float(p.mean()) for p in pixels]
    found["contrast"] = [float(p.std()) for p in pixels]
    return found.assign(side_px=pixels.shape[1])


def _open_shard(root: Path, name: str) -> npt.NDArray[np.uint8] | str:
    """The pixels, or in words what is wrong with the file."""
    if Path(name).name != name:
        return "no plain file name"
    try:
        pixels: npt.NDArray[np.uint8] = np.load(root / name, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        return f"cannot be read: {error}"
    if (
        pixels.dtype != np.uint8
        or pixels.ndim != 4
        or pixels.shape[1] != pixels.shape[2]
        or pixels.shape[3] != 3
    ):
        return f"{pixels.dtype} {pixels.shape}, not uint8 [N, S, S, 3]"
    return pixels


def _classes(images: pd.DataFrame, names: tuple[str, ...]) -> pd.DataFrame:
    def count(split: str) -> npt.NDArray[np.int64]:
        labels = images.loc[(images["split"] == split) & images["label"].between(0, len(names) - 1), "label"]
        return np.bincount(labels.astype(np.int64), minlength=len(names)).astype(np.int64)

    train = count("train")
    imbalance = train.max(initial=0) / np.maximum(train, 1)
    return pd.DataFrame(
        {"class_name": names, "train_images": train, "test_images": count("test"), "imbalance": imbalance}
    )


def _splits(images: pd.DataFrame) -> pd.DataFrame:
    counts = images["split"].value_counts()
    return pd.DataFrame(
        {"split": REQUIRED_SPLITS, "images": [int(counts.get(name, 0)) for name in REQUIRED_SPLITS]}
    )
