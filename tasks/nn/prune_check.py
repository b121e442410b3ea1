"""Taking channels out of a model, and the proof that only those channels are gone.

Torch-Pruning follows a graph of gradients. Where it misreads an operation (a channel shuffle, a permute
before a flatten, a value added after the batch norm) the smaller model still runs and computes something
else. So nothing leaves this module unproven. What it means to prune channel c of a layer:

    the model computes what the original computes with channel c of the layer, and of every layer whose
    channel c falls with it (its batch norm, the other side of a residual sum), forced to zero.

Layers that read such channels must then see zero there. If a constant reaches them instead (a batch-norm
shift kept by the graph, `+ 1`, a sigmoid of zero, a position map), or a normalisation averages over channels,
the smaller model cannot be equal, and the graph is refused with the layer named.

The original and the smaller model are compared in float64 at every layer that has channels, for the weights
at hand and for random ones (weights that are all equal or zero would hide a mix-up).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fleet.device.errors import UserError
from tasks.nn.prune_cut import (
    CONVOLUTIONS,
    GRAPH_ERRORS,
    LAYERS_WITH_CHANNELS,
    NORMS,
    Cut,
    Pruned,
    Refusal,
    cut_copy,
    first_line,
    forward,
    refused,
    width,
)

# Largest difference of a layer, relative to its largest value. In float64 rounding stays below 1e-12.
_TOLERANCE = 1e-6
_RANDOM_INPUTS = 2


def remove_channels(model: nn.Module, example: torch.Tensor, cuts: Sequence[Cut]) -> nn.Module:
    """A smaller copy of `model`, proven to compute what the original computes without those channels.

    Where every removed channel of a layer is dead (zero filter and bias), nothing may be lost: the copy must
    also compute what the original computes as it is.

    Args:
        model: A float model; it is not changed.
        example: One input batch, at least two images so that training mode can be tried.
        cuts: The channels to remove.

    Returns:
        The pruned copy in eval mode.

    Raises:
        UserError: removing them would break the model or silently change it; the layer is named.
    """
    check_runs(model, example)
    _check_cuts(model, cuts)
    pruned = remove_chosen_channels(model, example, cuts)
    for cut in cuts:
        if _is_dead(model.get_submodule(cut.layer), cut.channels):
            _check_nothing_lost(model, example, cut)
    return pruned


def remove_chosen_channels(model: nn.Module, example: torch.Tensor, cuts: Sequence[Cut]) -> nn.Module:
    """`remove_channels` for channels chosen by importance: they carry signal, and losing it is the point."""
    try:
        pruned = cut_copy(model, example, cuts)
        batches = _inputs(example)
        found = _compare(model, pruned, batches) or _compare_randomised(model, cuts, batches)
        found = found or _training_mode_fails(pruned.model, example)
    except GRAPH_ERRORS as error:
        found = Refusal(layer=cuts[0].layer, reason=first_line(error))
    if found is None:
        return pruned.model
    raise refused(_guilty(model, example, cuts) or [found])


@contextmanager
def channels_zeroed(model: nn.Module, channels: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Force output channels of the named layers to zero while the context lasts."""

    def zero(indices: Sequence[int]) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
        def hook(module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output.index_fill(_channel_dim(module), torch.tensor(list(indices)), 0.0)

        return hook

    handles = [model.get_submodule(k).register_forward_hook(zero(v)) for k, v in channels.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compare(model: nn.Module, pruned: Pruned, batches: Sequence[torch.Tensor]) -> Refusal | None:
    """The first layer whose output differs from the original's with the removed channels zeroed, or None."""
    before = copy.deepcopy(model).double().eval()
    after = replace(pruned, model=copy.deepcopy(pruned.model).double())
    for name, (dim, indices) in after.parameters.items():
        with torch.no_grad():
            before.get_parameter(name).index_fill_(dim, torch.tensor(indices), 0.0)
    for batch in batches:
        with channels_zeroed(before, after.removed), _recorded(before) as expected:
            expected_output = forward(before, batch)
        refusal = _first_difference(after, batch, expected, expected_output)
        if refusal is not None:
            return refusal
    return None


def _compare_randomised(
    model: nn.Module, cuts: Sequence[Cut], batches: Sequence[torch.Tensor]
) -> Refusal | None:
    probe = _randomised(model)
    return _compare(probe, cut_copy(probe, batches[0], cuts), batches)


def _first_difference(
    after: Pruned,
    batch: torch.Tensor,
    expected: Mapping[str, list[torch.Tensor]],
    expected_output: torch.Tensor,
) -> Refusal | None:
    with _recorded(after.model) as got:
        try:
            output = forward(after.model, batch)
        except GRAPH_ERRORS as error:
            last = next(reversed(got), "the first layer")
            return Refusal(layer=last, reason=f"the forward pass fails after `{last}`: {first_line(error)}")
    for name, calls in got.items():
        gone = set(after.removed.get(name, ()))
        for want, have in zip(expected[name], calls, strict=True):
            dim = _channel_dim(after.model.get_submodule(name))
            kept = torch.tensor([c for c in range(want.shape[dim]) if c not in gone])
            if (difference := _difference(want.index_select(dim, kept), have)) is not None:
                return Refusal(layer=name, reason=f"`{name}` then computes something else ({difference})")
    if (difference := _difference(expected_output, output)) is not None:
        return Refusal(layer="output", reason=f"the output changes ({difference})")
    return None


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Output of each layer with channels, by name in order of execution; after the context, complete."""
    outputs: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            outputs.setdefault(name, []).append(output.clone())  # the next layer may work in place

        return hook

    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, LAYERS_WITH_CHANNELS)]
    handles = [module.register_forward_hook(keep(name)) for name, module in layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _guilty(model: nn.Module, example: torch.Tensor, cuts: Sequence[Cut]) -> list[Refusal]:
    """The layers whose channels cannot be removed even alone, with the reason for each."""
    found = []
    for cut in cuts:
        try:
            refusal = _compare_randomised(model, [cut], _inputs(example)[:1])
            refusal = refusal or _training_mode_fails(cut_copy(model, example, [cut]).model, example)
        except GRAPH_ERRORS as error:
            refusal = Refusal(layer=cut.layer, reason=first_line(error))
        if refusal is not None:
            found.append(Refusal(layer=cut.layer, reason=refusal.reason))
    return found


def _training_mode_fails(pruned: nn.Module, example: torch.Tensor) -> Refusal | None:
    """Parts that only run in training (auxiliary heads) are invisible to the tracing: try them."""
    trial = copy.deepcopy(pruned).train()
    with torch.random.fork_rng(devices=[]), _recorded(trial) as done:  # dropout draws random numbers
        try:
            forward(trial, example.to(next(trial.parameters()).dtype))
        except GRAPH_ERRORS as error:
            last = next(reversed(done), "the first layer")
            return Refusal(layer=last, reason=f"training mode fails after `{last}`: {first_line(error)}")
    return None


def check_runs(model: nn.Module, example: torch.Tensor) -> None:
    """Refuse a model that does not run before anything is removed, so that pruning is not blamed for it.

    Raises:
        UserError: it fails on `example` in eval or training mode, or does not return one tensor.
    """
    try:
        output = forward(copy.deepcopy(model).eval(), example)
        refusal = _training_mode_fails(model, example)
    except GRAPH_ERRORS as error:
        refusal = Refusal(layer="", reason=first_line(error))
    else:
        if type(output) is not torch.Tensor:
            refusal = Refusal(layer="", reason=f"its output is a {type(output).__name__}")
    if refusal is not None:
        raise UserError(
            f"the model cannot be pruned on inputs of shape {tuple(example.shape)}: {refusal.reason}",
            allowed="a model that runs on them in training and in eval mode and returns one tensor",
            next_step="correct the input size, or give a batch of at least two images",
        )


def _check_nothing_lost(model: nn.Module, example: torch.Tensor, cut: Cut) -> None:
    before = copy.deepcopy(model).double().eval()
    removed = cut_copy(before, example, [cut]).removed
    for batch in _inputs(example):
        whole = forward(before, batch)
        with channels_zeroed(before, removed):
            difference = _difference(whole, forward(before, batch))
        if difference is not None:
            reason = f"its filters are dead, yet a value behind them reaches the output ({difference})"
            raise refused([Refusal(layer=cut.layer, reason=reason)])


def _randomised(model: nn.Module) -> nn.Module:
    """A copy with random weights of usual scale, so that no two channels are alike."""
    probe = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in probe.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, max(1, parameter[0].numel()) ** -0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
        for module in probe.modules():
            if isinstance(module, NORMS) and module.running_mean is not None:
                module.running_mean.normal_(0, 0.2, generator=generator)
                assert module.running_var is not None
                module.running_var.uniform_(0.5, 1.5, generator=generator)
    return probe


def _inputs(example: torch.Tensor) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(example.shape, generator=generator, dtype=torch.float64) for _ in range(_RANDOM_INPUTS)
    ]
    return [example.double(), *drawn]


def _check_cuts(model: nn.Module, cuts: Sequence[Cut]) -> None:
    layers = {n: m for n, m in model.named_modules() if isinstance(m, (*CONVOLUTIONS, nn.Linear))}
    for cut in cuts:
        channels = range(width(layers[cut.layer])) if cut.layer in layers else range(0)
        if not cut.channels or not set(cut.channels) <= set(channels):
            raise UserError(
                f"channels {list(cut.channels)} of `{cut.layer}`",
                allowed=f"indices 0..{len(channels) - 1}" if channels else f"one of {', '.join(layers)}",
                next_step="name a convolution or linear layer and channels it has",
            )


def _is_dead(layer: nn.Module, channels: Sequence[int]) -> bool:
    """Whether the layer itself, its bias included, makes these channels zero for every input."""
    weight, bias = layer.get_parameter("weight").detach(), getattr(layer, "bias", None)
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):  # noqa: SLF001 - [inputs, outputs of a group, ...]
        weight = weight.reshape(layer.groups, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)
    chosen = list(channels)
    return not weight[chosen].any() and (bias is None or not bias[chosen].any())


def _channel_dim(layer: nn.Module) -> int:
    return -1 if isinstance(layer, nn.Linear) else 1


def _difference(want: torch.Tensor, have: torch.Tensor) -> str | None:
    """How `have` differs from `want`, in words, or None when they agree; NaN never agrees."""
    if want.shape != have.shape:
        return f"shape {tuple(have.shape)} instead of {tuple(want.shape)}"
    if not want.numel():
        return None
    scale = float(want.abs().max()) or 1.0
    relative = float((want - have).abs().max()) / scale
    return None if relative <= _TOLERANCE else f"relative difference {relative:.1e}"
