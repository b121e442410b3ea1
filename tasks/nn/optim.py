"""The optimiser: AdamW with per-parameter options, and the learning rate as a function of the step."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class ParameterOptions:
    """How one parameter is trained."""

    lr_scale: float = 1.0
    """Factor on the learning rate."""
    weight_decay: bool = True
    """Whether the run's weight decay applies."""


OptionsFor = Callable[[str, nn.Parameter], ParameterOptions]


def default_options(name: str, parameter: nn.Parameter) -> ParameterOptions:
    """Decay matrices and kernels; norms, biases and quantiser scales (one axis at most) are not decayed."""
    del name
    return ParameterOptions(weight_decay=parameter.ndim > 1)


def build_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float, options: OptionsFor
) -> torch.optim.AdamW:
    """AdamW (Loshchilov, Hutter 2019) with one group for each distinct ParameterOptions.

    Each group carries `lr_scale`; `set_learning_rate` multiplies by it.
    """
    groups: dict[ParameterOptions, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault(options(name, parameter), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "lr": learning_rate * chosen.lr_scale,
                "lr_scale": chosen.lr_scale,
                "weight_decay": weight_decay if chosen.weight_decay else 0.0,
            }
            for chosen, parameters in groups.items()
        ],
        fused=True,  # one kernel, no loop over parameters: 6.5 -> 1.4 ms a step for MobileNetV3-Small
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set every group's rate to `learning_rate` times its own scale."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_scale"]


def cosine_rate(step: int, *, steps: int, warmup_steps: int, peak: float) -> float:
    """Linear warm-up to `peak`, then a cosine to 0 after the last step (Loshchilov, Hutter 2017)."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * done))
