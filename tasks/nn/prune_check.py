"""Taking channels out of a model, and the proof that only those channels are gone.

Torch-Pruning follows a graph of gradients, and where it misreads an operation (a channel shuffle, a permute before
a flatten, a value added after the batch norm) the smaller model still runs and computes something else. So nothing
leaves this module unchecked. What it means to prune channel c of a layer:

    the model computes what the original computes with channel c of the layer, and of every layer whose channel c
    falls with it (its batch norm, the other side of a residual sum), forced to zero.

Layers that read such channels must then see zero there. If a constant reaches them instead (a batch-norm
shift kept by the graph, `+ 1`, a sigmoid of zero, a position map), or a normalisation averages over the channels,
the smaller model cannot be equal and the graph is refused with the layer named.

The original and the smaller model are compared in float64 at every layer that has channels, for the weights at hand
and for random ones (weights that are all equal or zero would hide a mix-up).
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch_pruning
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch_pruning import ops

from fleet.device.errors import UserError

# Largest difference of a layer, relative to its largest value. In float64 rounding stays below 1e-12.
_TOLERANCE = 1e-6
_RANDOM_INPUTS = 2
_LAYERS_WITH_CHANNELS = (_ConvNd, nn.Linear, _BatchNorm, _InstanceNorm)
# How Torch-Pruning and a torch forward say that they cannot follow a graph; neither has an error class for it.
GRAPH_ERRORS = (RuntimeError, ValueError, LookupError, ArithmeticError, TypeError, AttributeError, AssertionError)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Output channels to take from one layer, and from everything coupled to it."""

    layer: str
    """Module name of a convolution or linear layer."""
    channels: tuple[int, ...]
    """Indices of output channels of the unpruned layer."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why channels cannot be taken from a layer."""

    layer: str
    """The pruned layer, or the first layer that goes wrong where no single one is to blame."""
    reason: str


def remove_channels(model: nn.Module, example: torch.Tensor, cuts: Sequence[Cut]) -> nn.Module:
    """A smaller copy of `model`, proven to compute what the original computes without those channels.

    Where every removed channel of a layer is dead (zero filter, zero bias), nothing may be lost, so the copy must
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
    pruned = remove_chosen_channels(model, example, cuts)
    for cut in cuts:
        if _is_dead(model.get_submodule(cut.layer), cut.channels):
            _check_nothing_lost(model, example, cut)
    return pruned


def remove_chosen_channels(model: nn.Module, example: torch.Tensor, cuts: Sequence[Cut]) -> nn.Module:
    """`remove_channels` for channels chosen by importance: those carry a signal, and losing it is the point."""
    _check_runs(model, example)
    try:
        pruned = _cut(model, example, cuts)
        found = _compare(model, pruned, example) or _compare_randomised(model, example, cuts)
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


def trace(model: nn.Module, example: torch.Tensor) -> torch_pruning.DependencyGraph:
    """Torch-Pruning's dependency graph of `model`, which it puts into eval mode."""
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # frozen layers would be invisible: the graph is read from autograd
    with torch.enable_grad():
        return torch_pruning.DependencyGraph().build_dependency(model, example, verbose=False)


@dataclass(frozen=True, kw_only=True)
class _Pruned:
    model: nn.Module
    removed: Mapping[str, list[int]]
    """Layer name -> removed output channels, in the unpruned layer's numbering."""
    parameters: Mapping[str, tuple[int, list[int]]]
    """Name of a free-standing parameter -> pruned dimension and removed indices."""


def _cut(model: nn.Module, example: torch.Tensor, cuts: Sequence[Cut]) -> _Pruned:
    """Apply the cuts to a copy and record which channels of which layers fell with them."""
    pruned = copy.deepcopy(model)
    graph = trace(pruned, example.to(next(pruned.parameters()).dtype))
    names = {module: name for name, module in pruned.named_modules()}
    kept: dict[str, list[int]] = {}
    parameters: dict[str, tuple[int, list[int]]] = {}
    for cut in cuts:
        root = pruned.get_submodule(cut.layer)
        pruner = graph.get_pruner_of_module(root)
        now = kept.setdefault(cut.layer, list(range(pruner.get_out_channels(root))))
        group = graph.get_pruning_group(root, pruner.prune_out_channels, [now.index(c) for c in cut.channels])
        _check_something_left(graph, group, names)
        parameter_names = {id(p): name for name, p in pruned.named_parameters()}
        for dep, indices in group:
            target = dep.target.module
            if dep.target.type == ops.OPTYPE.PARAMETER:
                parameters[parameter_names[id(target)]] = (dep.target.pruning_dim, list(indices))
            elif isinstance(target, _LAYERS_WITH_CHANNELS) and graph.is_out_channel_pruning_fn(dep.handler):
                _drop(kept, names[target], graph.get_out_channels(target), indices)
        group.prune(record_history=False)
    for name, parameter in pruned.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    removed = {k: sorted(set(range(_channels(model.get_submodule(k)))) - set(v)) for k, v in kept.items()}
    return _Pruned(model=pruned.eval(), removed=removed, parameters=parameters)


def _check_something_left(graph: Any, group: Any, names: Mapping[nn.Module, str]) -> None:
    for dep, indices in group:
        target = dep.target.module
        out = graph.is_out_channel_pruning_fn(dep.handler)
        width = graph.get_out_channels(dep.target) if out else graph.get_in_channels(dep.target)
        if width is not None and width <= len(indices):
            side = "output" if out else "input"
            raise ValueError(f"it would take {len(indices)} {side} channels from `{names.get(target)}`, which has {width}")


def _drop(kept: dict[str, list[int]], layer: str, width: int, indices: Sequence[int]) -> None:
    now = kept.setdefault(layer, list(range(width)))
    gone = set(indices)
    kept[layer] = [channel for position, channel in enumerate(now) if position not in gone]


def _compare(model: nn.Module, pruned: _Pruned, example: torch.Tensor) -> Refusal | None:
    """The first layer whose output differs from the original's with the removed channels zeroed, or None."""
    before = copy.deepcopy(model).double().eval()
    after = replace(pruned, model=copy.deepcopy(pruned.model).double())
    for name, (dim, indices) in after.parameters.items():
        with torch.no_grad():
            before.get_parameter(name).index_fill_(dim, torch.tensor(indices), 0.0)
    for batch in _inputs(example):
        with channels_zeroed(before, after.removed), _recorded(before) as expected:
            expected_output = _forward(before, batch)
        refusal = _first_difference(after, batch, expected, expected_output)
        if refusal is not None:
            return refusal
    return None


def _compare_randomised(model: nn.Module, example: torch.Tensor, cuts: Sequence[Cut]) -> Refusal | None:
    probe = _randomised(model)
    return _compare(probe, _cut(probe, example, cuts), example)


def _first_difference(
    after: _Pruned, batch: torch.Tensor, expected: Mapping[str, list[torch.Tensor]], expected_output: torch.Tensor
) -> Refusal | None:
    with _recorded(after.model) as got:
        try:
            output = _forward(after.model, batch)
        except GRAPH_ERRORS as error:
            last = next(reversed(got), "the first layer")
            return Refusal(layer=last, reason=f"the forward pass fails after `{last}`: {first_line(error)}")
    for name, calls in got.items():
        gone = set(after.removed.get(name, ()))
        for want, have in zip(expected[name], calls, strict=True):
            dim = _channel_dim(after.model.get_submodule(name))
            kept = torch.tensor([c for c in range(want.shape[dim]) if c not in gone])
            error = _relative_error(want.index_select(dim, kept), have)
            if not error <= _TOLERANCE:
                return Refusal(layer=name, reason=f"`{name}` computes something else (relative difference {error:.1e})")
    error = _relative_error(expected_output, output)
    return Refusal(layer="output", reason=f"the output differs by {error:.1e}") if not error <= _TOLERANCE else None


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Output of each layer with channels, by name in order of execution; after the context, complete."""
    outputs: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            outputs.setdefault(name, []).append(output.clone())  # the next layer may work in place

        return hook

    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, _LAYERS_WITH_CHANNELS)]
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
            refusal = _compare_randomised(model, example, [cut])
            refusal = refusal or _training_mode_fails(_cut(model, example, [cut]).model, example)
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
            _forward(trial, example.to(next(trial.parameters()).dtype))
        except GRAPH_ERRORS as error:
            last = next(reversed(done), "the first layer")
            return Refusal(layer=last, reason=f"training mode fails after `{last}`: {first_line(error)}")
    return None


def _check_runs(model: nn.Module, example: torch.Tensor) -> None:
    try:
        output = _forward(copy.deepcopy(model).eval(), example)
        refusal = _training_mode_fails(model, example)
    except GRAPH_ERRORS as error:
        refusal = Refusal(layer="", reason=first_line(error))
    else:
        if not isinstance(output, torch.Tensor):
            refusal = Refusal(layer="", reason=f"its output is a {type(output).__name__}")
    if refusal is not None:
        raise UserError(
            f"the model cannot be pruned on inputs of shape {tuple(example.shape)}: {refusal.reason}",
            allowed="a model that runs on them in training and in eval mode and returns one tensor",
            next_step="correct the input size, or give a batch of at least two images",
        )


def _check_nothing_lost(model: nn.Module, example: torch.Tensor, cut: Cut) -> None:
    before = copy.deepcopy(model).double().eval()
    removed = _cut(before, example, [cut]).removed
    for batch in _inputs(example):
        whole = _forward(before, batch)
        with channels_zeroed(before, removed):
            error = _relative_error(whole, _forward(before, batch))
        if not error <= _TOLERANCE:
            reason = f"its filters are dead, yet a constant behind them reaches the output (change {error:.1e})"
            raise refused([Refusal(layer=cut.layer, reason=reason)])


def refused(refusals: Sequence[Refusal]) -> UserError:
    """The error that names the first layer and lists all of them for protection."""
    first, names = refusals[0], [r.layer for r in refusals]
    return UserError(
        f"layer `{first.layer}` cannot be pruned: {first.reason}",
        allowed="layers whose channels reach other layers unmixed and vanish when they are zero",
        next_step=f"protect it: prune.protect: [{', '.join(names)}]",
    )


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
            if isinstance(module, _BatchNorm | _InstanceNorm) and module.running_mean is not None:
                module.running_mean.normal_(0, 0.2, generator=generator)
                assert module.running_var is not None
                module.running_var.uniform_(0.5, 1.5, generator=generator)
    return probe


def _inputs(example: torch.Tensor) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(example.shape, generator=generator, dtype=torch.float64) for _ in range(_RANDOM_INPUTS)]
    return [example.double(), *drawn]


def _forward(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(batch)
    return output


def _is_dead(layer: nn.Module, channels: Sequence[int]) -> bool:
    weight, bias = layer.get_parameter("weight").detach(), getattr(layer, "bias", None)
    if getattr(layer, "transposed", False):
        return False  # its output channels lie along dimension 1 of each group; nothing is claimed for them
    chosen = list(channels)
    return not weight[chosen].any() and (bias is None or not bias[chosen].any())


def _channels(layer: nn.Module) -> int:
    for attribute in ("out_channels", "out_features", "num_features"):
        if hasattr(layer, attribute):
            return int(getattr(layer, attribute))
    raise TypeError(f"{type(layer).__name__} has no channels")


def _channel_dim(layer: nn.Module) -> int:
    return -1 if isinstance(layer, nn.Linear) else 1


def _relative_error(want: torch.Tensor, have: torch.Tensor) -> float:
    if want.shape != have.shape:
        return float("inf")
    scale = float(want.abs().max()) if want.numel() else 0.0
    return float((want - have).abs().max()) / scale if scale else float(have.abs().max())


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
