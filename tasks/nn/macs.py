"""The size of a model: parameters and multiply-accumulates, counted one way everywhere."""

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def params(model: nn.Module) -> int:
    """Number of trained values; batch-norm statistics are not among them."""
    return sum(parameter.numel() for parameter in model.parameters())


def macs(model: nn.Module, input_shape: tuple[int, int, int, int]) -> int:
    """Multiply-accumulates of one forward pass in eval mode, convolutions and matrix products only.

    PyTorch's FlopCounterMode counts two operations for each; elementwise work is not counted, as is usual.

    Args:
        model: Its mode is restored.
        input_shape: (N, 3, H, W); N = 1 gives the count for one image.
    """
    was_training = model.training
    model.eval()
    image = torch.zeros(input_shape, device=next(model.parameters()).device)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(image)
    model.train(was_training)
    return int(counter.get_total_flops()) // 2
