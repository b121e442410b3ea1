"""Averaged weights and the distillation loss, against values worked out by hand."""

import math

import pytest
import torch
from torch import nn

from tasks.nn.distill import classification_loss, distillation_loss
from tasks.nn.ema import averaged


def test_ema_follows_weights_and_statistics() -> None:
    """The first update copies, later ones move by 1 - decay, at first faster; counters are copied."""
    model = nn.BatchNorm1d(2)
    average = averaged(model, 0.5)
    average.update_parameters(model)
    with torch.no_grad():
        model.weight.fill_(3.0)
        model.running_mean.fill_(8.0)
        model.num_batches_tracked.fill_(7)
    average.update_parameters(model)  # decay min(0.5, 2 / 11): 9 / 11 of the way
    assert average.module.weight.tolist() == pytest.approx([1 + 2 * 9 / 11] * 2)
    assert average.module.running_mean.tolist() == pytest.approx([8 * 9 / 11] * 2)
    assert average.module.num_batches_tracked.item() == 7


def test_ema_reaches_its_decay() -> None:
    """After many steps one update moves the average by exactly 1 - decay."""
    model = nn.Linear(1, 1, bias=False)
    average = averaged(model, 0.5)
    with torch.no_grad():
        model.weight.fill_(0.0)
        for _ in range(100):
            average.update_parameters(model)
        model.weight.fill_(1.0)
    average.update_parameters(model)
    assert average.module.weight.item() == pytest.approx(0.5)


def test_distillation_loss_is_kl_times_t_squared() -> None:
    """Two classes, T = 2, worked out: p = (0.75, 0.25) against q = (0.5, 0.5)."""
    teacher = torch.tensor([[2 * math.log(3.0), 0.0]])
    student = torch.zeros(1, 2)
    kl = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert distillation_loss(student, teacher, temperature=2.0).item() == pytest.approx(4 * kl, rel=1e-5)
    assert distillation_loss(teacher, teacher, temperature=2.0).item() == pytest.approx(0, abs=1e-7)


def test_classification_loss_with_smoothing() -> None:
    """Smoothing 0.2 over two classes: 0.9 of the weight on the label, 0.1 on the other."""
    logits = torch.tensor([[math.log(3.0), 0.0]])
    loss = classification_loss(logits, torch.tensor([0]), label_smoothing=0.2)
    assert loss.item() == pytest.approx(-0.9 * math.log(0.75) - 0.1 * math.log(0.25), rel=1e-5)
