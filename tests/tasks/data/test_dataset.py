"""Reading a prepared dataset across shards, and refusing what is none."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fleet.device.errors import UserError
from tasks.data import shards
from tasks.data.dataset import Dataset
from tasks.data.shards import Writer, pixels_sha256

COUNT = 11


@pytest.fixture
def written(tmp_path, monkeypatch) -> Dataset:
    """Eleven images in two splits; shards hold four images each."""
    monkeypatch.setattr(shards, "SHARD_BYTES", 4 * 8 * 8 * 3)
    images = np.random.default_rng(0).integers(0, 256, (COUNT, 8, 8, 3), np.uint8)
    with Writer(tmp_path / "prepared", size_px=8) as writer:
        numbers = [writer.add(image) for image in images]
        frame = pd.DataFrame(
            {
                "number": numbers,
                "sha256": [pixels_sha256(image) for image in images],
                "label": [n % 3 for n in range(COUNT)],
                "split": ["test" if n >= 9 else "train" for n in range(COUNT)],
                "source": [f"{n}.png" for n in range(COUNT)],
                "width": 8,
                "height": 8,
                "group": "",
                "origin": "base",
                "added_in": "",
            }
        )
        writer.finish(frame, ("a", "b", "c"))
    return Dataset.open(tmp_path / "prepared")


def test_shards_hold_one_split_and_a_limited_number(written):
    """Nine training images at four a shard are three files; test has its own."""
    names = sorted(path.name for path in written.root.glob("*.npy"))
    assert names == ["test-000.npy", "train-000.npy", "train-001.npy", "train-002.npy"]
    assert [len(shard) for shard in written.split("train").shards] == [4, 4, 1]


def test_images_come_across_shards_in_the_order_asked(written):
    """Any order, any shard, repeated or not: the pixels whose hash the manifest names."""
    train = written.split("train")
    wanted = [8, 0, 5, 5, 3]
    images = train.images(wanted)
    assert [pixels_sha256(image) for image in images] == [train.sha256[n] for n in wanted]
    assert all(np.array_equal(train.image(n), image) for n, image in zip(wanted, images, strict=True))


def test_batches_cover_a_split_once(written):
    """The last batch is smaller; labels keep to their images."""
    train = written.split("train")
    batches = list(train.batches(4))
    assert [len(labels) for _, labels in batches] == [4, 4, 1]
    digests = [pixels_sha256(image) for images, _ in batches for image in images]
    assert tuple(digests) == train.sha256
    rows = written.manifest.set_index("sha256")
    assert np.concatenate([labels for _, labels in batches]).tolist() == rows.loc[digests, "label"].tolist()


def test_rows_are_in_order_of_their_hash(written):
    """So that the first n rows are a random sample, whatever the files were called."""
    assert list(written.split("train").sha256) == sorted(written.split("train").sha256)


def test_absent_split_is_empty(written):
    """A source without field images has an empty split, not an error."""
    assert len(written.split("field")) == 0
    assert list(written.split("field").batches(8)) == []


def test_a_failing_writer_leaves_nothing(tmp_path):
    """An error half-way leaves neither dataset nor scratch."""

    def fail() -> None:
        with Writer(tmp_path / "prepared", size_px=8) as writer:
            writer.add(np.zeros((8, 8, 3), np.uint8))
            raise UserError("stop", allowed="", next_step="")

    with pytest.raises(UserError):
        fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_clear_error(tmp_path, monkeypatch):
    """No space left is said with what would help, instead of a crash in the middle of a map."""
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *mode: real(Path("/dev/full"), *mode))

    def fill() -> None:
        with Writer(tmp_path / "prepared", size_px=64) as writer:
            for _ in range(10):
                writer.add(np.zeros((64, 64, 3), np.uint8))

    with pytest.raises(UserError, match="No space left"):
        fill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "data"),
    [
        ("manifest.parquet", b"no parquet"),
        ("labels.json", b"{"),
        ("labels.json", b"\xff\xfe"),
    ],
)
def test_foreign_files_are_refused(written, file, data):
    """What prepare did not write is named, with the command that writes it."""
    (written.root / file).write_bytes(data)
    with pytest.raises(UserError, match="dataset") as caught:
        Dataset.open(written.root)
    assert caught.value.next_step == "run `dvc repro prepare`"


def test_a_manifest_without_columns_or_rows_is_refused(written):
    """An older or emptied manifest fails when opened, not in the middle of training."""
    written.manifest.drop(columns="row").to_parquet(written.root / "manifest.parquet")
    with pytest.raises(UserError, match=r"lacks the columns \['row'\]"):
        Dataset.open(written.root)
    written.manifest.iloc[:0].to_parquet(written.root / "manifest.parquet")
    with pytest.raises(UserError, match="0 rows"):
        Dataset.open(written.root)
