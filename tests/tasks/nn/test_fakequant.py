"""Fake quantisation: rounding as the engine rounds, gradients as LSQ defines them."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from tasks.nn.fakequant import ActivationQuantizer, IntegerAvgPool2d, QuantConv2d, weight_only_int8


def quantizer(step: float, **options) -> ActivationQuantizer:
    """A quantiser in eval mode with a given step."""
    made = ActivationQuantizer(**options).eval()
    made.set_step(step)
    return made


def test_ties_go_to_the_even_integer_and_values_saturate():
    """Half steps round to the even neighbour; the range is symmetric, -128 is not used."""
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.9, 500.0, -500.0])
    assert quantizer(1.0).to_integers(x).tolist() == [0, 2, 2, 0, -2, 127, 127, -127]


def test_the_cast_multiplies_by_the_float32_reciprocal():
    """x * float32(1/s) is rounded, not x / s: the two differ for some values."""
    quant = quantizer(0.015)
    step = np.float32(quant.step.item())
    x = (np.arange(-126, 127).astype(np.float32) + np.float32(0.5)) * step
    by_reciprocal = np.rint(x * (np.float32(1) / step))
    assert quant.to_integers(torch.from_numpy(x)).tolist() == by_reciprocal.tolist()
    assert (by_reciprocal != np.rint(x / step)).any()


def test_a_fused_relu_clamps_at_zero():
    """After a fused ReLU nothing negative is left."""
    x = torch.tensor([-3.0, -0.6, 0.4, 2.0])
    assert quantizer(1.0, non_negative=True)(x).tolist() == [0, 0, 0, 2]


def test_relu6_limits_the_step():
    """The engine clamps a fused ReLU6 at 127 steps only, so a step may not exceed 6/127."""
    quant = quantizer(1.0, non_negative=True, upper=6.0)
    assert quant.step.item() == pytest.approx(6 / 127)
    assert quant(torch.tensor([100.0])).item() == pytest.approx(6.0)


def lsq_step_gradient(x: torch.Tensor, step: float, q_min: int, upstream: torch.Tensor) -> float:
    """Equation 3 of Esser et al. 2020, element by element."""
    total = 0.0
    for value, gradient in zip((x / step).tolist(), upstream.tolist(), strict=True):
        if value <= q_min:
            total += gradient * q_min
        elif value >= 127:
            total += gradient * 127
        else:
            total += gradient * (round(value) - value)
    return total


@pytest.mark.parametrize("non_negative", [False, True])
def test_gradients_are_those_of_lsq(non_negative):
    """Inside the range gradients pass, outside they stop; the step's gradient is LSQ's, for its logarithm."""
    torch.manual_seed(0)
    quant = quantizer(0.05, non_negative=non_negative).train()
    x = (torch.randn(1, 400) * 4).requires_grad_()
    upstream = torch.randn(1, 400)
    quant(x).backward(upstream)
    q_min = 0 if non_negative else -127
    inside = (x > q_min * quant.step) & (x < 127 * quant.step)
    assert torch.equal(x.grad, torch.where(inside, upstream, 0.0))
    step = quant.step.item()
    expected = lsq_step_gradient(x.detach()[0], step, q_min, upstream[0]) * step / math.sqrt(400 * 127)
    assert quant.log_step.grad.item() == pytest.approx(expected, rel=1e-3)


def test_memory_layout_does_not_change_gradients():
    """Channels-last tensors give the same gradient of the step as contiguous ones."""
    torch.manual_seed(0)
    x, upstream = torch.randn(2, 5, 7, 3), torch.randn(2, 5, 7, 3)
    grads = []
    for layout in (torch.contiguous_format, torch.channels_last):
        quant = quantizer(0.01).train()
        quant(x.to(memory_format=layout)).backward(upstream.to(memory_format=layout))
        grads.append(quant.log_step.grad.item())
    assert grads[0] == pytest.approx(grads[1], rel=1e-5)


def int_conv(layer: QuantConv2d, q_x: np.ndarray, step_x: float) -> np.ndarray:
    """The convolution in whole numbers and float64, pixel by pixel: 1 x 1 windows only."""
    q_w = layer.weight_integers().detach().numpy()[:, :, 0, 0]
    if layer.depthwise:
        acc = q_x * q_w.T[:, :, None, None].transpose(1, 0, 2, 3).reshape(1, -1, 1, 1)
    else:
        acc = np.einsum("oc,nchw->nohw", q_w, q_x)
    unit = layer.weight_step.detach().numpy().astype(np.float64) * step_x
    bias = layer.bias.detach().numpy().astype(np.float64) / unit
    bias = np.trunc(bias) if layer.depthwise else bias
    return (acc + bias[:, None, None]) * unit[:, None, None]


@pytest.mark.parametrize("groups", [1, 6])
def test_convolutions_count_in_whole_numbers(groups):
    """acc * step_x * step_w with a float bias; a depthwise bias is first cut to whole accumulator units."""
    torch.manual_seed(0)
    quant = quantizer(0.043)
    layer = QuantConv2d(nn.Conv2d(6, 6, 1, groups=groups), quant).eval()
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([0.0101, -0.0077, 0.5, -0.5, 0.00003, 1.7]))
        x = quant(torch.randn(2, 6, 4, 4))
        got = layer(x).numpy()
    expected = int_conv(layer, np.rint(x.numpy() / quant.step.item()), float(quant.step.item()))
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_training_and_eval_mode_agree():
    """The float path that is trained and the integer path that is deployed differ by float rounding only."""
    torch.manual_seed(0)
    quant = quantizer(0.03)
    for groups in (1, 8):
        layer = QuantConv2d(nn.Conv2d(8, 8, 3, padding=1, groups=groups), quant)
        x = quant(torch.randn(2, 8, 9, 9))
        with torch.no_grad():
            torch.testing.assert_close(layer.train()(x), layer.eval()(x).float(), rtol=1e-5, atol=1e-5)


def test_sums_beyond_float32_are_exact():
    """A wide layer's accumulator leaves the range where float32 counts exactly; the result does not."""
    quant = quantizer(1.0)
    conv = nn.Conv2d(1200, 1, 1)
    nn.init.constant_(conv.weight, 1.0)
    nn.init.zeros_(conv.bias)
    layer = QuantConv2d(conv, quant).eval()
    x = torch.full((1, 1200, 1, 1), 127.0)
    x[0, 0] = 126.0
    with torch.no_grad():
        units = layer(x).item() / layer.weight_step.double().item()
    assert round(units) == 127 * 127 * 1200 - 127


def test_a_dead_channel_keeps_its_bias_countable():
    """A channel of zeros gets a step in proportion to the layer's, so its bias stays below 2**31 units."""
    conv = nn.Conv2d(4, 4, 3, groups=4)
    with torch.no_grad():
        conv.weight[2] = 0
        conv.bias.fill_(3.0)
    quant = quantizer(0.02)
    layer = QuantConv2d(conv, quant)
    assert (layer.bias / (layer.weight_step * quant.step)).abs().max() < 2**31
    assert layer.weight_integers()[2].abs().max() == 0


def test_int8_average_pooling_rounds_down():
    """floor(sum(q + 128) * floor(2**24 / n) / 2**24) - 128: below the mean, also for negative values."""
    quant = quantizer(1.0)
    x = torch.tensor([[1.0, 2.0], [2.0, 2.0]]).view(1, 1, 2, 2)
    pool = IntegerAvgPool2d(nn.AvgPool2d(2), quant).eval()
    assert pool(x).item() == 1.0
    assert pool(-x).item() == -2.0
    thirds = IntegerAvgPool2d(nn.AdaptiveAvgPool2d((1, 2)), quant).eval()
    # n = 3 divides 2**24 with a remainder: an exact mean of 5 comes out one step lower.
    assert thirds(torch.full((1, 1, 3, 2), 5.0)).flatten().tolist() == [4.0, 4.0]


def test_int8_weights_are_even_steps_between_the_extremes():
    """Weight-only int8 keeps each channel's least and largest value and at most 256 levels between."""
    torch.manual_seed(0)
    weight = torch.randn(3, 40, 3, 3)
    weight[2] = 0.25
    rounded = weight_only_int8(weight)
    for channel in range(2):
        assert rounded[channel].min() == weight[channel].min()
        assert rounded[channel].max() == pytest.approx(weight[channel].max().item(), rel=1e-6)
        step = (weight[channel].max() - weight[channel].min()) / 255
        assert (rounded[channel] - weight[channel]).abs().max() <= step / 2 * 1.001
        assert 100 < len(rounded[channel].unique()) <= 256
    assert torch.equal(rounded[2], weight[2])
    torch.testing.assert_close(weight_only_int8(rounded), rounded, rtol=0, atol=1e-6)
