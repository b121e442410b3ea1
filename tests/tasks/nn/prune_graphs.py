"""Small graphs for the pruner, each of one kind, with widths and weights drawn from a seed."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it


class Graph(nn.Module):
    """Layers by name and a forward that uses them."""

    def __init__(self, forward: Callable[["Graph", torch.Tensor], torch.Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self._forward = forward

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x_NCHW)


def conv(n_in: int, n_out: int, kernel: int = 3, **options) -> nn.Conv2d:
    return nn.Conv2d(n_in, n_out, kernel, padding=kernel // 2, **options)


def head(n_in: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, 5))


def shuffled(x_NCHW: torch.Tensor, groups: int) -> torch.Tensor:
    n, c, h, w = x_NCHW.shape
    return x_NCHW.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)


def channel_shuffle(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.head(m.reader(shuffled(F.relu(m.stem(x)), 2))),
        stem=conv(3, w),
        reader=conv(w, 8),
        head=head(8),
    )


def permute_flatten(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.reader(F.relu(m.stem(x)).permute(0, 2, 3, 1).flatten(1)),
        stem=conv(3, w),
        reader=nn.Linear(w * 64, 5),
    )


def chunk_and_concat(w: int) -> nn.Module:
    def forward(m, x):
        p, q = F.silu(m.stem(x)).chunk(2, 1)
        return m.head(m.reader(torch.cat([p, q, m.inner(q) + q], 1)))

    return Graph(
        forward, stem=conv(3, w), inner=conv(w // 2, w // 2), reader=conv(w * 3 // 2, 8), head=head(8)
    )


def pixel_shuffle(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.head(m.reader(F.pixel_shuffle(F.relu(m.stem(x)), 2))),
        stem=conv(3, 4 * w),
        reader=conv(w, 8),
        head=head(8),
    )


def concat_flatten(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.reader(torch.cat([F.relu(m.stem(x)), F.relu(m.other(x))], 1).flatten(1)),
        stem=conv(3, w),
        other=conv(3, 2 * w),
        reader=nn.Linear(3 * w * 64, 5),
    )


class PositionMap(nn.Module):
    """A learned map added to the features, as position-aware backbones have."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.stem, self.reader, self.head = conv(3, w), conv(w, 8), head(8)
        self.position = nn.Parameter(torch.randn(1, w, 8, 8))

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        return self.head(self.reader(self.stem(x_NCHW) + self.position))


def offset_after_norm(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.head(m.reader(F.relu(m.norm(m.stem(x)) + 1))),
        stem=conv(3, w, bias=False),
        norm=nn.BatchNorm2d(w),
        reader=conv(w, 8),
        head=head(8),
    )


def sigmoid_alone(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.head(m.reader(torch.sigmoid(m.stem(x)))),
        stem=conv(3, w),
        reader=conv(w, 8),
        head=head(8),
    )


def group_norm(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.head(m.reader(m.norm(m.stem(x)))),
        stem=conv(3, w),
        norm=nn.GroupNorm(2, w),
        reader=conv(w, 8),
        head=head(8),
    )


def channel_mean(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.head(m.reader(F.relu(m.stem(x)) - F.relu(m.stem(x)).mean(1, keepdim=True))),
        stem=conv(3, w),
        reader=conv(w, 8),
        head=head(8),
    )


def fixed_slice(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.head(m.reader(F.relu(m.stem(x))[:, : w // 2])),
        stem=conv(3, w),
        reader=conv(w // 2, 8),
        head=head(8),
    )


class TrainingHead(nn.Module):
    """A second classifier that runs in training mode only, so tracing in eval mode never sees it."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.stem, self.reader, self.head, self.auxiliary = conv(3, w), conv(w, 8), head(8), head(w)

    def forward(self, x_NCHW: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.stem(x_NCHW))
        logits = self.head(self.reader(y))
        return logits + 0.1 * self.auxiliary(y) if self.training else logits


REFUSED = {
    "channel_shuffle": channel_shuffle,
    "permute_flatten": permute_flatten,
    "chunk_and_concat": chunk_and_concat,
    "pixel_shuffle": pixel_shuffle,
    "concat_flatten": concat_flatten,
    "position_map": PositionMap,
    "offset_after_norm": offset_after_norm,
    "sigmoid_alone": sigmoid_alone,
    "group_norm": group_norm,
    "channel_mean": channel_mean,
    "fixed_slice": fixed_slice,
    "training_head": TrainingHead,
}


def residual(w: int) -> nn.Module:
    def forward(m, x):
        y = F.relu(m.norm(m.stem(x)))
        return m.head(F.relu(m.after(m.inner(y)) + y))

    return Graph(
        forward,
        stem=conv(3, w),
        norm=nn.BatchNorm2d(w),
        inner=conv(w, w),
        after=nn.BatchNorm2d(w),
        head=head(w),
    )


def depthwise(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.head(m.reader(F.hardswish(m.norm(m.deep(F.relu6(m.stem(x))))))),
        stem=conv(3, w),
        deep=conv(w, w, groups=w),
        norm=nn.BatchNorm2d(w),
        reader=conv(w, 8, 1),
        head=head(8),
    )


def squeeze_excite(w: int) -> nn.Module:
    def forward(m, x):
        y = F.silu(m.norm(m.stem(x)))
        scale = torch.sigmoid(m.expand(F.relu(m.squeeze(y.mean((2, 3), keepdim=True)))))
        return m.head(m.reader(y * scale))

    return Graph(
        forward,
        stem=conv(3, w),
        norm=nn.BatchNorm2d(w),
        squeeze=conv(w, w // 2, 1),
        expand=conv(w // 2, w, 1),
        reader=conv(w, 8),
        head=head(8),
    )


def dense_concat(w: int) -> nn.Module:
    def forward(m, x):
        y = F.relu(m.stem(x))
        z = torch.cat([m.inner(y), y], 1)
        return m.head(m.reader(F.relu(m.norm(z))))

    return Graph(
        forward,
        stem=conv(3, w),
        inner=conv(w, w // 2),
        norm=nn.BatchNorm2d(w + w // 2),
        reader=conv(w + w // 2, 8),
        head=head(8),
    )


def flatten(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.reader(F.relu(m.stem(x)).flatten(1)), stem=conv(3, w), reader=nn.Linear(w * 64, 5)
    )


def prelu_and_instance_norm(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.head(m.reader(m.act(m.norm(m.stem(x))))),
        stem=conv(3, w),
        norm=nn.InstanceNorm2d(w, affine=True),
        act=nn.PReLU(w),
        reader=conv(w, 8),
        head=head(8),
    )


def grouped(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.head(m.reader(F.relu(m.wide(F.relu(m.stem(x)))))),
        stem=conv(3, w),
        wide=conv(w, w, groups=2),
        reader=conv(w, 8),
        head=head(8),
    )


def transposed(w: int) -> nn.Module:
    return Graph(
        lambda m, x: m.head(m.reader(F.relu(m.up(F.relu(m.stem(x)))))),
        stem=conv(3, w),
        up=nn.ConvTranspose2d(w, w, 2, stride=2),
        reader=conv(w, 8),
        head=head(8),
    )


ACCEPTED = {
    "residual": residual,
    "depthwise": depthwise,
    "squeeze_excite": squeeze_excite,
    "dense_concat": dense_concat,
    "flatten": flatten,
    "prelu_and_instance_norm": prelu_and_instance_norm,
    "grouped": grouped,
    "transposed": transposed,
}


def drawn(make: Callable[[int], nn.Module], seed: int, width: int) -> nn.Module:
    """The graph with random weights and batch-norm statistics, in eval mode."""
    torch.manual_seed(seed)
    model = make(width)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()
