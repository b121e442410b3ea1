"""Accuracy of a model on a split, through the preprocess contract itself."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fleet.device.preprocess import Preprocess
from tasks.data.dataset import Split
from tasks.nn import distributed


@dataclass(frozen=True)
class Evaluation:
    """What a model said about every image of a split, in the split's order."""

    logits: npt.NDArray[np.float32]
    """[N, num_classes]."""
    labels: npt.NDArray[np.int64]
    """[N]; -1 where unknown."""

    @property
    def predictions(self) -> npt.NDArray[np.int64]:
        """The class with the largest logit, [N]."""
        classes: npt.NDArray[np.int64] = self.logits.argmax(axis=1)
        return classes

    @property
    def top1(self) -> float:
        """Share of the labelled images whose prediction is right, 0..1; NaN without labelled images."""
        known = self.labels >= 0
        return float((self.predictions == self.labels)[known].mean()) if known.any() else float("nan")


def evaluate(model: nn.Module, split: Split, preprocess: Preprocess, batch_size: int = 256) -> Evaluation:
    """Run `model` in eval mode over a split; its mode is restored.

    Under torchrun each rank computes every world_size-th batch and all ranks get the whole result.

    Args:
        model: Images float32 [N, 3, H, W] -> logits [N, num_classes].
        split: The images; an empty split gives an empty evaluation.
        preprocess: The contract the model was trained with.
        batch_size: Images of one forward pass; bounds the memory.
    """
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    starts = range(0, len(split), batch_size)[distributed.rank() :: distributed.world_size()]
    parts: dict[int, npt.NDArray[np.float32]] = {}
    with torch.inference_mode():
        for start in starts:
            images = split.images(range(start, min(start + batch_size, len(split))))
            pixels = torch.from_numpy(preprocess.batch(list(images)))
            parts[start] = model(pixels.to(device, memory_format=torch.channels_last)).float().cpu().numpy()
    model.train(was_training)
    gathered = distributed.merge_over_ranks(parts)
    logits = (
        np.concatenate([gathered[start] for start in sorted(gathered)])
        if gathered
        else np.zeros((0, 1), np.float32)
    )
    return Evaluation(logits, split.labels)
