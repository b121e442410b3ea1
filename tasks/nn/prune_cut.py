"""Torch-Pruning, contained: the graph of a model, a smaller copy of it, and the refusals that follow."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_pruning
from torch import nn
from torch_pruning import ops

from fleet.device.errors import UserError

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)  # noqa: SLF001 - 1d, 2d and 3d
CONVOLUTIONS = (nn.modules.conv._ConvNd,)  # noqa: SLF001 - 1d, 2d, 3d and transposed
LAYERS_WITH_CHANNELS = (*CONVOLUTIONS, nn.Linear, *NORMS)
_MOST_INDICES = 200_000  # a flattened feature map of the largest classifiers has 25,088
# How Torch-Pruning and torch's forward say that they cannot follow a graph; they have no error class for it.
GRAPH_ERRORS = (
    RuntimeError,
    ValueError,
    LookupError,
    ArithmeticError,
    TypeError,
    AttributeError,
    AssertionError,
)


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


def refused(refusals: Sequence[Refusal]) -> UserError:
    """The error that names the first layer and lists all of them for protection."""
    first, names = refusals[0], [r.layer for r in refusals]
    return UserError(
        f"layer `{first.layer}` cannot be pruned: {first.reason}",
        allowed="layers whose channels reach other layers unmixed and vanish when they are zero",
        next_step=f"add to prune.protect: [{', '.join(names)}]",
    )


def trace(model: nn.Module, example: torch.Tensor) -> torch_pruning.DependencyGraph:
    """Torch-Pruning's dependency graph of `model`, which it puts into eval mode.

    Raises:
        UserError: it cannot follow the graph; the innermost block it stumbles over is named.
    """
    try:
        return _build_graph(model, example)
    except GRAPH_ERRORS as error:
        raise UserError(
            f"block `{_untraceable_block(model, example)}` cannot be pruned: Torch-Pruning cannot follow its"
            f" operations ({first_line(error)})",
            allowed="architectures whose channels reach other layers unmixed (no channel shuffle)",
            next_step="leave this model unpruned, or choose another train.architecture",
        ) from error


def _build_graph(model: nn.Module, example: torch.Tensor) -> torch_pruning.DependencyGraph:
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # frozen layers would be invisible: the graph is read from autograd
    with torch.enable_grad():
        graph = torch_pruning.DependencyGraph().build_dependency(model, example, verbose=False)
    for node in graph.module2node.values():
        for dependency in node.dependencies:
            dependency.index_mapping.append(_bounded)
    return graph


def _bounded(indices: list[Any]) -> list[Any]:
    """An index mapping that only looks: on some reshapes (Swin's patch merging) the lists double for ever."""
    if len(indices) > _MOST_INDICES:
        raise RuntimeError("the reshapes behind its channels lead back to themselves")
    return indices


def _untraceable_block(model: nn.Module, example: torch.Tensor) -> str:
    """The first innermost block that cannot be traced on its own, or the model's class."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(_module: nn.Module, inputs: Any) -> None:
            if inputs and isinstance(inputs[0], torch.Tensor):
                seen[name] = inputs[0].detach()

        return hook

    blocks = {name: module for name, module in model.named_modules() if name and any(module.children())}
    handles = [module.register_forward_pre_hook(keep(name)) for name, module in blocks.items()]
    forward(model, example)
    for handle in handles:
        handle.remove()
    failing = []
    for name, x_NCHW in seen.items():
        try:
            _build_graph(blocks[name], x_NCHW)
        except GRAPH_ERRORS:
            failing.append(name)
    innermost = [name for name in failing if not any(other.startswith(f"{name}.") for other in failing)]
    return innermost[0] if innermost else type(model).__name__


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """A smaller copy, not yet proven, and what was taken from it."""

    model: nn.Module
    removed: Mapping[str, list[int]]
    """Layer name -> removed output channels, in the unpruned layer's numbering."""
    parameters: Mapping[str, tuple[int, list[int]]]
    """Name of a free-standing parameter -> pruned dimension and removed indices."""


def cut_copy(model: nn.Module, example: torch.Tensor, cuts: Sequence[Cut]) -> Pruned:
    """Apply the cuts to a copy and record which channels of which layers fell with them.

    Raises:
        GRAPH_ERRORS: as Torch-Pruning does; the caller names the layer.
    """
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
            elif isinstance(target, LAYERS_WITH_CHANNELS) and graph.is_out_channel_pruning_fn(dep.handler):
                now = kept.setdefault(names[target], list(range(width(target))))
                gone = set(indices)
                kept[names[target]] = [c for position, c in enumerate(now) if position not in gone]
        group.prune(record_history=False)
    for name, parameter in pruned.named_parameters():
        parameter.requires_grad_(model.get_parameter(name).requires_grad)
    removed = {k: sorted(set(range(width(model.get_submodule(k)))) - set(v)) for k, v in kept.items()}
    return Pruned(model=pruned.eval(), removed=removed, parameters=parameters)


def _check_something_left(graph: Any, group: Any, names: Mapping[nn.Module, str]) -> None:
    for dep, indices in group:
        target = dep.target.module
        out = graph.is_out_channel_pruning_fn(dep.handler)
        left = graph.get_out_channels(dep.target) if out else graph.get_in_channels(dep.target)
        if left is not None and left <= len(indices):
            side, what = "output" if out else "input", names.get(target)
            where = f"`{what}`" if what else "an operation behind it"
            raise ValueError(f"it would take {len(indices)} {side} channels from {where}, which has {left}")


def forward(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """`model(batch)` without gradients."""
    with torch.no_grad():
        output: torch.Tensor = model(batch)
    return output


def width(layer: nn.Module) -> int:
    """Output channels of one of LAYERS_WITH_CHANNELS."""
    for attribute in ("out_channels", "out_features", "num_features"):
        if hasattr(layer, attribute):
            return int(getattr(layer, attribute))
    raise TypeError(f"{type(layer).__name__} has no channels")


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
