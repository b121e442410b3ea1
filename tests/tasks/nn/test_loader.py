"""Batches: every image once an epoch, reproducible, shared out among ranks, the contract's pixels."""

import threading

import pytest
import torch
from digit_set import write_digits

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.data.dataset import Dataset, Split
from tasks.nn.augment import AugmentConfig
from tasks.nn.loader import Loader, even_batch

PREPROCESS = Preprocess(size_px=12, color_order="BGR")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    root = write_digits(tmp_path_factory.mktemp("digits") / "prepared", {"train": 50})
    return Dataset.open(root).split("train")


def loader(split: Split, **changes: object) -> Loader:
    settings = {"batch_size": 10, "seed": 3, "augment": AugmentConfig(), **changes}
    return Loader(split=split, preprocess=PREPROCESS, **settings)


def test_an_epoch_holds_each_image_once(split: Split) -> None:
    """Without augmentation the batches are the contract's pixels, in another order every epoch."""
    expected = {PREPROCESS.apply(split.image(index)).tobytes(): split.labels[index] for index in range(50)}
    orders = []
    for epoch in range(2):
        batches = list(loader(split).epoch(epoch))
        pixels = torch.cat([images for images, _ in batches])
        labels = torch.cat([labels for _, labels in batches])
        names = [image.contiguous().numpy()[None].tobytes() for image in pixels]
        assert set(names) == set(expected)
        assert [expected[name] for name in names] == labels.tolist()
        orders.append(names)
    assert orders[0] != orders[1]


def test_batches_are_channels_last(split: Split) -> None:
    """[N, 3, H, W] float32 in channels_last memory, without a copy for it."""
    images, labels = next(loader(split).epoch(0))
    assert images.shape == (10, 3, 12, 12)
    assert images.dtype == torch.float32
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.dtype == torch.int64


def test_same_seed_same_augmentation(split: Split) -> None:
    """Two loaders of one seed agree in every pixel of a later epoch without running the earlier ones."""
    config = AugmentConfig(shift=0.2, rotation_deg=20, brightness=0.4)
    left, right, other = (
        torch.cat([images for images, _ in loader(split, augment=config, seed=seed).epoch(4)])
        for seed in (3, 3, 4)
    )
    assert torch.equal(left, right)
    assert not torch.equal(left, other)


def test_ranks_share_each_batch(split: Split) -> None:
    """Two ranks together hold the images one process would hold, step by step."""
    whole = list(loader(split).epoch(0))
    ranks = [list(loader(split, rank=rank, world_size=2).epoch(0)) for rank in (0, 1)]
    for step, (images, _) in enumerate(whole):
        parts = torch.cat([ranks[rank][step][0] for rank in (0, 1)])
        assert len(parts) == len(images) == 10
        assert {p.numpy().tobytes() for p in parts} == {i.numpy().tobytes() for i in images}


def test_the_rest_is_left_out_but_not_the_same_rest(split: Split) -> None:
    """50 images in batches of 16 are 3 steps; the two images left out change with the epoch."""
    uneven = loader(split, batch_size=16)
    assert uneven.steps == 3
    seen = [
        {image.numpy().tobytes() for images, _ in uneven.epoch(epoch) for image in images} for epoch in (0, 1)
    ]
    assert len(seen[0]) == len(seen[1]) == 48
    assert seen[0] != seen[1]


def test_an_error_in_a_thread_reaches_the_loop(split: Split) -> None:
    """A shard that vanished stops the training instead of feeding zeros."""
    broken = Split("train", (), split.labels, split.sha256)
    with pytest.raises(IndexError):
        list(loader(broken).epoch(0))


def test_abandoned_epoch_ends_its_threads(split: Split) -> None:
    """A caller that stops early does not hang at exit: the generator closes its pool."""
    before = threading.active_count()
    batches = loader(split).epoch(0)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("batch_size", "images_count", "processes", "expected"),
    [(64, 1000, 2, 64), (64, 51, 2, 50), (64, 3, 1, 3)],
)
def test_batch_shrinks_to_the_split(
    batch_size: int, images_count: int, processes: int, expected: int
) -> None:
    """A small split gives a smaller batch, still the same number of images for each process."""
    assert even_batch(batch_size, images_count, processes) == expected


@pytest.mark.parametrize(("batch_size", "images_count", "processes"), [(15, 100, 2), (8, 3, 4)])
def test_batch_that_cannot_be_shared_is_refused(batch_size: int, images_count: int, processes: int) -> None:
    """Gradients would be weighted unevenly, or a process would have no image."""
    with pytest.raises(UserError, match=f"with {processes} processes"):
        even_batch(batch_size, images_count, processes)
