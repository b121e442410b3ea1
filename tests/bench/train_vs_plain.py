"""Seconds and accuracy of edgeloop's training loop beside a plain, well-written PyTorch loop.

    python tests/bench/train_vs_plain.py --prepared presets/cifar10/data/prepared --size-px 64

Both train the same architecture from scratch with the same optimiser settings, schedule, epochs and kinds of
augmentation, and validate after each epoch. The plain loop is what the tutorials of PyTorch and torchvision
teach: a Dataset over the same memory-mapped shards, DataLoader workers, transforms.v2, AdamW.
`plain_channels_last` is the same with the one change that matters most on a CPU. The loops alternate (A B C,
C B A, ...), so that a drift of the machine falls on all of them; nothing is asserted, the table says what was
measured.
"""

import argparse
import gc
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from report import FOLDER, conditions, parser, write
from torch import nn
from torch.utils import data
from torchvision.transforms import v2

from fleet.device.preprocess import Preprocess
from tasks.data.dataset import Dataset, Split
from tasks.nn.arch import Architecture
from tasks.nn.augment import AugmentConfig
from tasks.nn.loop import FitConfig, fit

CROP_SCALE_MIN, JITTER = 0.5, 0.2
COMMAND = "python tests/bench/train_vs_plain.py --prepared presets/cifar10/data/prepared"
TEXT = (
    "Same architecture, optimiser settings, schedule, epochs and kinds of augmentation; median (least to"
    " most) of the rounds, the loops alternating. `plain` is a Dataset over the same memory-mapped images,"
    " DataLoader workers, transforms.v2 and AdamW; `plain_channels_last` adds the one change that matters"
    " most on a CPU."
)


class PlainDataset(data.Dataset[tuple[torch.Tensor, int]]):
    """One image at a time through transforms.v2, as tutorials do it."""

    def __init__(self, split: Split, transform: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.split, self.transform = split, transform

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = torch.from_numpy(self.split.image(index)).permute(2, 0, 1)
        return self.transform(pixels), int(self.split.labels[index])


def plain_loaders(
    dataset: Dataset, preprocess: Preprocess, config: FitConfig, workers: int
) -> tuple[data.DataLoader, data.DataLoader]:
    """The DataLoaders of train and val."""
    finish = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(preprocess.mean, preprocess.std)]
    size = preprocess.size_px
    train = v2.Compose(
        [
            v2.RandomResizedCrop(size, scale=(CROP_SCALE_MIN, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(JITTER, JITTER, JITTER),
            *finish,
        ]
    )
    val = v2.Compose([v2.Resize((size, size), antialias=True), *finish])
    shared = {"num_workers": workers, "persistent_workers": workers > 0}
    return (
        data.DataLoader(
            PlainDataset(dataset.split("train"), train),
            batch_size=config.batch_size,
            shuffle=True,
            drop_last=True,
            **shared,
        ),
        data.DataLoader(PlainDataset(dataset.split("val"), val), batch_size=256, **shared),
    )


def train_plain(
    model: nn.Module,
    dataset: Dataset,
    preprocess: Preprocess,
    config: FitConfig,
    *,
    workers: int,
    channels_last: bool,
) -> float:
    """The plain loop; the best validation accuracy."""
    torch.manual_seed(config.seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = config.bn_momentum
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model.to(memory_format=layout)
    train, val = plain_loaders(dataset, preprocess, config, workers)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    steps = config.epochs * len(train)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=len(train))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - len(train))
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [len(train)])
    criterion = nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    best = 0.0
    for _ in range(config.epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad(set_to_none=True)
            criterion(model(images.to(memory_format=layout)), labels).backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.inference_mode():
            right = sum(
                int((model(images.to(memory_format=layout)).argmax(1) == labels).sum())
                for images, labels in val
            )
        best = max(best, right / len(val.dataset))
    return best


def train_edgeloop(model: nn.Module, dataset: Dataset, preprocess: Preprocess, config: FitConfig) -> float:
    """The loop of tasks.nn.loop; the best validation accuracy."""
    return fit(model, dataset, preprocess, config).val_top1


def first_images(dataset: Dataset, train_images: int) -> Dataset:
    """The dataset with the first `train_images` of its training split and a tenth as many for validation."""
    by_split = dataset.manifest.groupby("split", sort=False)
    wanted = {"train": train_images, "val": train_images // 10}
    manifest = pd.concat([by_split.get_group(name).head(count) for name, count in wanted.items()])
    return Dataset(dataset.root, manifest, dataset.label_names)


def cpu_seconds() -> float:
    """CPU time of this process and of its ended workers: on a busy machine it says more than the clock."""
    gc.collect()  # ends the workers of a DataLoader that is out of use
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Alternate the loops and collect seconds an epoch and accuracy."""
    dataset = first_images(Dataset.open(arguments.prepared), arguments.train_images)
    preprocess = Preprocess(size_px=arguments.size_px, interpolation="bilinear")
    jitter = {"brightness": JITTER, "contrast": JITTER, "saturation": JITTER}
    config = FitConfig(
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        augment=AugmentConfig(crop_scale_min=CROP_SCALE_MIN, flip=True, **jitter),
    )
    plain = {"workers": arguments.workers}
    loops: dict[str, Callable[..., float]] = {
        "edgeloop": train_edgeloop,
        "plain": lambda *a: train_plain(*a, channels_last=False, **plain),
        "plain_channels_last": lambda *a: train_plain(*a, channels_last=True, **plain),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    cpu: dict[str, list[float]] = {name: [] for name in loops}
    top1: dict[str, list[float]] = {name: [] for name in loops}
    for round_ in range(arguments.rounds):
        for name in list(loops) if round_ % 2 == 0 else list(reversed(loops)):
            torch.manual_seed(round_)
            model = Architecture(name=arguments.architecture, num_classes=len(dataset.label_names)).build()
            started, cpu_started = time.perf_counter(), cpu_seconds()
            found = loops[name](model, dataset, preprocess, config.model_copy(update={"seed": round_}))
            seconds[name].append((time.perf_counter() - started) / arguments.epochs)
            cpu[name].append((cpu_seconds() - cpu_started) / arguments.epochs)
            top1[name].append(found)
            print(f"{name}: {seconds[name][-1]:.2f} s an epoch, val top-1 {found:.3f}", flush=True)

    def ratio(name: str, of: dict[str, list[float]]) -> float:
        return statistics.median(b / a for a, b in zip(of["edgeloop"], of[name], strict=True))

    return {
        "title": "The training loop beside a plain PyTorch loop",
        "command": COMMAND,
        "text": TEXT,
        "conditions": conditions(
            **{k: str(v) for k, v in vars(arguments).items() if k != "out"}, threads=torch.get_num_threads()
        ),
        "rows": [
            {
                "loop": name,
                "s an epoch": _spread(seconds[name]),
                "CPU s an epoch": _spread(cpu[name]),
                "times edgeloop's wall time": ratio(name, seconds),
                "times edgeloop's CPU time": ratio(name, cpu),
                "val top-1": _spread(top1[name]),
            }
            for name in loops
        ],
        "seconds_an_epoch": seconds,
        "cpu_seconds_an_epoch": cpu,
        "val_top1": top1,
    }


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def main() -> None:
    """Parse, measure, write the result."""
    asked_for = parser(__doc__)
    asked_for.add_argument("--prepared", type=Path, default=Path("data/prepared"))
    asked_for.add_argument("--architecture", default="mobilenet_v3_small")
    asked_for.add_argument("--size-px", type=int, default=64)
    asked_for.add_argument("--train-images", type=int, default=2000)
    asked_for.add_argument("--batch-size", type=int, default=32)
    asked_for.add_argument("--epochs", type=int, default=3)
    asked_for.add_argument("--rounds", type=int, default=3)
    asked_for.add_argument("--workers", type=int, default=2)
    asked_for.add_argument("--out", type=Path, default=FOLDER / "train_vs_plain.json")
    arguments = asked_for.parse_args()
    write(arguments.out, measure(arguments))


if __name__ == "__main__":
    main()
