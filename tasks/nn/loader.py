"""Augmented training batches, prepared by threads while the model computes.

A batch depends on (seed, epoch, step) only, never on the threads: the same seed gives the same pixels on any
machine, and a resumed training sees what an uninterrupted one would have seen.
"""

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import torch

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.data.dataset import Split
from tasks.nn.augment import AugmentConfig, augment

Batch = tuple[torch.Tensor, torch.Tensor]

_AHEAD = 4  # batches in flight: covers the jitter between loader and step, costs four batches of memory


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Training batches of one split."""

    split: Split
    preprocess: Preprocess
    augment: AugmentConfig
    batch_size: int
    """Images of one step, over all ranks together."""
    seed: int
    rank: int = 0
    world_size: int = 1

    @property
    def steps(self) -> int:
        """Steps of one epoch. The shuffled rest that fills no batch is left out; it differs every epoch."""
        return max(1, len(self.split) // self.batch_size)

    def epoch(self, epoch: int) -> Iterator[Batch]:
        """The batches of one epoch: images float32 [N, 3, H, W] in channels_last memory, labels int64 [N]."""
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.split))
        with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
            pending: deque[Future[Batch]] = deque()
            for step in range(self.steps):
                chosen = order[step * self.batch_size : (step + 1) * self.batch_size][
                    self.rank :: self.world_size
                ]
                pending.append(pool.submit(self._batch, chosen, epoch, step))
                if len(pending) > _AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _batch(self, chosen: np.ndarray, epoch: int, step: int) -> Batch:
        rng = np.random.default_rng([self.seed, epoch, step, self.rank])
        stored = self.split.images(chosen)
        images_NHWC = np.stack([augment(image, self.augment, self.preprocess, rng) for image in stored])
        pixels = replace(self.preprocess, layout="NHWC").normalize(images_NHWC)
        return torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.from_numpy(self.split.labels[chosen])


def even_batch(batch_size: int, images_count: int, processes: int) -> int:
    """The batch size, at most the split, that `processes` share out evenly.

    Raises:
        UserError: the batch is no multiple of the processes, or there are fewer images than processes.
    """
    if batch_size % processes or images_count < processes:
        raise UserError(
            f"batch_size {batch_size} and {images_count} training images with {processes} processes",
            allowed="a batch_size that is a multiple of the number of processes, and an image for each",
            next_step="change batch_size in params.yaml or torchrun's --nproc-per-node",
        )
    return min(batch_size, images_count // processes * processes)
