"""Exponential moving average of weights and batch-norm statistics (Polyak averaging)."""

from collections.abc import Callable

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """A copy of `model` that follows it by `update_parameters(model)` after every step.

    The decay starts small, min(decay, (1 + t) / (10 + t)), so that a short run is not dominated by its start.
    """
    return AveragedModel(model, multi_avg_fn=_warm_ema(decay), use_buffers=True)


def _warm_ema(decay: float) -> Callable[[Tensors, Tensors, torch.Tensor | int], None]:
    @torch.no_grad()
    def update(averages: Tensors, currents: Tensors, step: torch.Tensor | int) -> None:
        now = min(decay, (1 + int(step)) / (10 + int(step)))
        if torch.is_floating_point(averages[0]):
            torch._foreach_lerp_(averages, currents, 1 - now)
        else:
            for average, current in zip(averages, currents, strict=True):
                average.copy_(current)

    return update
