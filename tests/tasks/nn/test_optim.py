"""The optimiser's groups and the learning rate's course."""

import pytest
import torch
from torch import nn

from tasks.nn.optim import (
    ParameterOptions,
    build_optimizer,
    cosine_rate,
    default_options,
    set_learning_rate,
)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def test_norms_and_biases_are_not_decayed(model: nn.Module) -> None:
    """With zero gradients a step shrinks exactly the kernels and matrices."""
    optimizer = build_optimizer(model, learning_rate=0.1, weight_decay=0.5, options=default_options)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    shrunk = {n for n, p in model.named_parameters() if torch.allclose(p, before[n] * 0.95) and p.norm() > 0}
    same = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
    assert shrunk == {"0.weight", "3.weight"}
    assert same == {"0.bias", "1.weight", "1.bias", "3.bias"}


def test_frozen_parameters_are_left_out(model: nn.Module) -> None:
    """A parameter without gradient is in no group."""
    model[0].weight.requires_grad_(False)
    optimizer = build_optimizer(model, learning_rate=0.1, weight_decay=0.5, options=default_options)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert id(model[0].weight) not in held
    assert len(held) == 5


def test_rate_factors_survive_the_schedule(model: nn.Module) -> None:
    """Setting the rate keeps each group's own factor, so a quantiser's scales stay slow."""

    def options(name: str, parameter: nn.Parameter) -> ParameterOptions:
        return ParameterOptions(lr_scale=0.1 if name == "1.weight" else 1.0, weight_decay=False)

    optimizer = build_optimizer(model, learning_rate=0.1, weight_decay=0.5, options=options)
    set_learning_rate(optimizer, 0.02)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(model[1].weight)] == pytest.approx(0.002)
    assert rates[id(model[0].weight)] == 0.02


def test_cosine_rate() -> None:
    """Up in equal steps, at the peak after the warm-up, half of it in the middle, nearly zero at the end."""
    rates = [cosine_rate(step, steps=110, warmup_steps=10, peak=2.0) for step in range(110)]
    assert rates[:3] == pytest.approx([0.2, 0.4, 0.6])
    assert rates[9] == rates[10] == 2.0
    assert rates[60] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001


def test_cosine_without_warmup_starts_at_the_peak() -> None:
    """No warm-up: the first step already has the full rate."""
    assert cosine_rate(0, steps=10, warmup_steps=0, peak=1.0) == 1.0
