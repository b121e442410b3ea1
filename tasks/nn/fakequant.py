"""Fake-quantised layers that compute what MNN's int8 kernels compute.

In training mode values stay float and rounding is a straight-through estimate with learned steps (LSQ,
Esser et al. 2020). In eval mode the same modules work on the integers themselves, in the engine's order of
operations:

    cast          q = round_half_even(x * float32(1 / step)), clamped to -127..127
    convolution   acc = sum(q_x * q_w) + bias / (step_x * step_w);  y = acc * step_x * step_w, then cast
    depthwise     the same, with the bias truncated towards zero to an integer first
    average pool  floor(sum(q + 128) * floor(2**24 / n) / 2**24) - 128

Shape letters: N batch, O output channels, C channels, H height, W width.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import nn

Q_MAX = 127
"""int8 is used symmetrically: -127..127."""
_EXACT_FLOAT32 = 2**24
"""Integers up to here are exact in float32, and so is a sum that never leaves this range."""
_FIXED_POINT = 2**24
_SMALLEST_STEP = 1e-7
_CHANNEL_RANGE = 2.0**-12
"""A channel's weight step is at least this share of the layer's largest: the engine counts a depthwise bias
in units of step_x * step_w as int32, which a dead channel's step would overflow."""


class _LearnedStep(torch.autograd.Function):
    """round(x / step) * step with gradients for both, in as few passes over memory as autograd allows.

    The gradient of the step is gradient_scale * sum(g * dq/dstep), where dq/dstep is q - x/step inside the
    range and the clamped q outside.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, step: torch.Tensor, q_min: int, gradient_scale: float
    ) -> torch.Tensor:
        in_steps = x * (1 / step)
        q = torch.round(in_steps).clamp_(q_min, Q_MAX)
        ctx.save_for_backward(in_steps, q)
        ctx.q_min, ctx.gradient_scale, ctx.step_shape = q_min, gradient_scale, step.shape
        return q * step

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        (gradient,) = gradients
        in_steps, q = ctx.saved_tensors
        inside = torch.ops.aten.hardtanh_backward(gradient, in_steps, ctx.q_min, Q_MAX)
        if len(ctx.step_shape) == 0:
            step_gradient = _inner(gradient, q) - _inner(inside, in_steps)
        else:  # one step per output channel: weights [O, ...]
            axes = tuple(range(1, gradient.ndim))
            step_gradient = (gradient * q - inside * in_steps).sum(axes, keepdim=True)
        return inside, step_gradient.reshape(ctx.step_shape) * ctx.gradient_scale, None, None


def _inner(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """sum(a * b) in one pass, without copying channels-last tensors."""
    channels_last = [t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in (a, b)]
    if all(channels_last):
        a, b = a.permute(0, 2, 3, 1), b.permute(0, 2, 3, 1)
    return torch.dot(a.reshape(-1), b.reshape(-1))


class ActivationQuantizer(nn.Module):
    """The one quantiser of a tensor that carries a scale, shared by all that read it."""

    def __init__(self, *, non_negative: bool = False, upper: float = math.inf) -> None:
        """Start with a step of one.

        Args:
            non_negative: The tensor comes out of a fused ReLU or ReLU6: the engine clamps at 0 from below.
            upper: The largest value the tensor may take: 6 after ReLU6, because the engine clamps at 127
                steps and nowhere else.
        """
        super().__init__()
        self.q_min = 0 if non_negative else -Q_MAX
        self.upper, self.largest_step = upper, upper / Q_MAX
        # The logarithm is learned: an optimiser's step then is a relative change, at every magnitude of the
        # tensor.
        self.log_step = nn.Parameter(torch.zeros(()))

    @property
    def step(self) -> torch.Tensor:
        """The value of one integer step, a scalar tensor."""
        return self.log_step.exp().clamp(_SMALLEST_STEP, self.largest_step)

    @torch.no_grad()
    def set_step(self, step: float) -> None:
        """Set the step, limited to what the engine can represent."""
        limited = min(max(step, _SMALLEST_STEP), self.largest_step)
        self.log_step.fill_(math.log(limited))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Values, float64 from a convolution in eval mode -> dequantised float32 of the same shape."""
        step = self.step
        if self.training:
            quantised: torch.Tensor = _LearnedStep.apply(
                x, step, self.q_min, 1 / math.sqrt(x[0].numel() * Q_MAX)
            )
            return quantised
        return self.to_integers(x) * step

    def in_float(self, x: torch.Tensor) -> torch.Tensor:
        """What the tensor would hold without rounding: the fused activation's clamps stay."""
        return x.clamp(0, self.upper) if self.q_min == 0 else x

    def to_integers(self, x: torch.Tensor) -> torch.Tensor:
        """The int8 values as float32."""
        return torch.round(x * (1 / self.step.to(x.dtype))).clamp_(self.q_min, Q_MAX).float()


class QuantConv2d(nn.Module):
    """A convolution that the engine computes in int8; what follows it is an `ActivationQuantizer`."""

    def __init__(self, conv: nn.Conv2d, input_quantizer: ActivationQuantizer) -> None:
        """Take over the weights of a folded convolution (ungrouped or depthwise)."""
        super().__init__()
        assert conv.groups in {1, conv.in_channels}, conv
        self.stride, self.padding, self.dilation, self.groups = (
            conv.stride,
            conv.padding,
            conv.dilation,
            conv.groups,
        )
        self.weight = nn.Parameter(conv.weight.detach().clone())
        self.bias = None if conv.bias is None else nn.Parameter(conv.bias.detach().clone())
        largest = self.weight.detach().abs().amax((1, 2, 3)).clamp(min=_SMALLEST_STEP)
        self.log_weight_step = nn.Parameter((largest / Q_MAX).log())
        self._input = (input_quantizer,)  # in a tuple: it is registered once, by the graph

    @property
    def input_quantizer(self) -> ActivationQuantizer:
        """The quantiser of the tensor this layer reads."""
        return self._input[0]

    @property
    def depthwise(self) -> bool:
        """Whether each output channel reads one input channel of its own."""
        return self.groups > 1

    @property
    def weight_step(self) -> torch.Tensor:
        """The value of one weight step per output channel, [O]."""
        step = self.log_weight_step.exp()
        return torch.maximum(step, step.detach().amax() * _CHANNEL_RANGE)

    def weight_integers(self) -> torch.Tensor:
        """The int8 weights as float32, [O, C / groups, H, W]."""
        inverse = 1 / self.weight_step.view(-1, 1, 1, 1)
        return torch.round(self.weight * inverse).clamp_(-Q_MAX, Q_MAX)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        """Dequantised input -> output before the cast: float32 in training mode, float64 in eval mode."""
        return self._straight_through(x_NCHW) if self.training else self._on_integers(x_NCHW)

    def in_float(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        """The same convolution without rounding."""
        return F.conv2d(x_NCHW, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def _straight_through(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        weight_step = self.weight_step
        gradient_scale = 1 / math.sqrt(self.weight[0].numel() * Q_MAX)
        weight = _LearnedStep.apply(self.weight, weight_step.view(-1, 1, 1, 1), -Q_MAX, gradient_scale)
        bias: torch.Tensor | None = self.bias
        if bias is not None and self.depthwise:
            unit = (weight_step * self.input_quantizer.step).detach()
            bias = bias + (torch.trunc(bias / unit) * unit - bias).detach()
        return F.conv2d(x_NCHW, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def _on_integers(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        step = self.input_quantizer.step
        q_x, q_w = torch.round(x_NCHW / step), self.weight_integers()
        if q_w[0].numel() * Q_MAX**2 >= _EXACT_FLOAT32:
            q_x, q_w = q_x.double(), q_w.double()
        acc = F.conv2d(q_x, q_w, None, self.stride, self.padding, self.dilation, self.groups).double()
        unit = step.double() * self.weight_step.double()
        if self.bias is not None:
            bias = self.bias.double() / unit
            acc += (torch.trunc(bias) if self.depthwise else bias).view(-1, 1, 1)
        return acc * unit.view(-1, 1, 1)


class IntegerAvgPool2d(nn.Module):
    """Average pooling from int8 to int8 at one step: the engine's fixed-point kernel, which rounds down."""

    def __init__(self, pool: nn.AvgPool2d | nn.AdaptiveAvgPool2d, quantizer: ActivationQuantizer) -> None:
        """Take over the window of `pool`; `quantizer` is that of its input and its output."""
        super().__init__()
        self.pool = pool
        self._input = (quantizer,)

    def in_float(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        """The same pooling without rounding."""
        mean: torch.Tensor = self.pool(x_NCHW)
        return mean

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        """Dequantised input -> dequantised output on the same grid."""
        step = self._input[0].step
        if self.training:
            mean = self.in_float(x_NCHW)
            return mean + (torch.floor(mean / step) * step - mean).detach()
        q_mean = self.pool(torch.round(x_NCHW / step).double() + 128)
        n = _window(self.pool, x_NCHW, q_mean)
        total = torch.round(q_mean * n)
        q = torch.floor(total * (_FIXED_POINT // n) / _FIXED_POINT) - 128
        return q.float() * step


def _window(pool: nn.AvgPool2d | nn.AdaptiveAvgPool2d, x_NCHW: torch.Tensor, out_NCHW: torch.Tensor) -> int:
    """Number of values that one output is the mean of."""
    if isinstance(pool, nn.AvgPool2d):
        size = pool.kernel_size
        return size**2 if isinstance(size, int) else math.prod(size)
    return math.prod(max(1, n // m) for n, m in zip(x_NCHW.shape[2:], out_NCHW.shape[2:], strict=True))


def weight_only_int8(weight: torch.Tensor) -> torch.Tensor:
    """What MNN's `--weightQuantBits 8` makes of a weight [O, ...]: 256 even steps from the least to the
    largest value of each output channel. Applying it twice changes nothing but the last bits.
    """
    rows = weight.detach().flatten(1)
    lowest, highest = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
    step = (highest - lowest) / 255
    codes = torch.where(step > 0, torch.round((rows - lowest) / step), 0)
    return (codes * step + lowest).view_as(weight)
