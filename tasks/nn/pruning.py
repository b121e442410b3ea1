"""Structured channel pruning: which channels go, how many, and what that costs each layer.

Ratio: p of the channels of every prunable group of coupled layers is removed, measured against the unpruned
parent, so a layer keeps (1 - p) of its outputs and about (1 - p)^2 of its weights and multiply-accumulates.
Widths are rounded to a multiple of `round_to`. The layers that make the model's output are never pruned.

Channels are ranked within their group by the scale of its batch norms (network slimming, arXiv 1708.06519):
a filter before a batch norm may have any magnitude without changing the model. Groups without one are ranked
by the magnitude of their weights (DepGraph, arXiv 2301.12900). On MobileNetV3-Small and digits, 30 % removed
and the norms recalibrated but nothing fine-tuned, scales left 88 % top-1 and magnitudes 51 % (n = 359).
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
import torch_pruning
from torch import nn
from torch_pruning import ops

from fleet.device.errors import UserError
from tasks.nn.arch import layer_widths
from tasks.nn.prune_check import check_runs, remove_chosen_channels
from tasks.nn.prune_cut import GRAPH_ERRORS, Cut, Refusal, cut_copy, first_line, refused, trace

# More than this leaves some layer one or two channels; C2 already warns above one half.
MAX_RATIO = 0.9
_RATIO_STEP = 0.01


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """What may be pruned and how widths are rounded."""

    round_to: int = 8
    """Widths become multiples of this: engines pack channels by 4, 8 or 16, and an odd width can be slower
    than a full one. 1 turns rounding off."""
    protect: tuple[str, ...] = ()
    """Module names or shell patterns; a matching layer and everything inside it keep their outputs."""


def prune_to(
    model: nn.Module, example: torch.Tensor, ratio: float, parent: nn.Module, options: PruneOptions
) -> nn.Module:
    """A checked copy of `model` in which `ratio` of the parent's channels are gone.

    Args:
        model: The parent itself, or what earlier steps left of it.
        example: One input batch [N, 3, H, W], N >= 2.
        ratio: Share of channels removed from each group, 0 < ratio <= 0.9, against `parent`.
        parent: The unpruned model, for its widths.
        options: Rounding and protection.

    Raises:
        UserError: the ratio or a pattern is not usable, nothing can be pruned, or the graph cannot be pruned
            without breaking or silently changing it.
    """
    cuts = plan_cuts(model, example, ratio, parent, options)
    return remove_chosen_channels(model, example, cuts) if cuts else copy.deepcopy(model)


def plan_cuts(
    model: nn.Module, example: torch.Tensor, ratio: float, parent: nn.Module, options: PruneOptions
) -> list[Cut]:
    """The least important channels of each group that must go to reach `ratio`; empty when none must."""
    if not 0 < ratio <= MAX_RATIO:
        raise UserError(
            f"pruning ratio {ratio}",
            allowed=f"0 < ratio <= {MAX_RATIO}",
            next_step="correct prune.target in params.yaml",
        )
    widths = {name: width[1] for name, width in layer_widths(parent).items()}
    cuts = []
    for group in prunable_groups(model, example, options):
        root = group.layer
        goal = rounded_width(widths[root], ratio, options.round_to, group.channel_groups)
        surplus = group.width - goal
        if surplus > 0:
            cuts.append(Cut(layer=root, channels=_least_important(group, surplus)))
    return cuts


@dataclass(frozen=True, kw_only=True)
class Group:
    """Layers that must lose the same channels."""

    layer: str
    """Name of the convolution or linear layer the channels are counted on."""
    width: int
    """Its output channels."""
    channel_groups: int
    """Groups of the widest grouped convolution among them: each loses the same number of channels."""
    coupled: torch_pruning.dependency.Group


def prunable_groups(model: nn.Module, example: torch.Tensor, options: PruneOptions) -> list[Group]:
    """Every group of coupled layers that may lose channels, in the order of the model's modules.

    Raises:
        UserError: the model does not run, a pattern matches no module, every group is protected, or a layer's
            couplings cannot be followed.
    """
    check_runs(model, example)
    model = copy.deepcopy(model)  # tracing changes modes and flags
    protected = _protected(model, options.protect)
    found = list(_all_groups(model, example, protected))
    if not found:
        raise UserError(
            f"no layer is left to prune (prune.protect: {list(options.protect)})",
            allowed="a model with hidden convolution or linear layers, some of them unprotected",
            next_step="protect fewer layers",
        )
    return found


def _all_groups(model: nn.Module, example: torch.Tensor, protected: set[nn.Module]) -> Iterator[Group]:
    refusals, seen = [], set(protected)
    graph = trace(model, example)
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Conv2d | nn.Linear) or layer not in graph.module2node or layer in seen:
            continue
        pruner = graph.get_pruner_of_module(layer)
        width = pruner.get_out_channels(layer)
        try:
            coupled = graph.get_pruning_group(layer, pruner.prune_out_channels, list(range(width)))
        except GRAPH_ERRORS as error:
            refusals.append(
                Refusal(layer=name, reason=f"its channels cannot be followed: {first_line(error)}")
            )
            continue
        outs = [dep.target for dep, _ in coupled if graph.is_out_channel_pruning_fn(dep.handler)]
        seen.update(target.module for target in outs)
        makes_the_output = any(t.type == ops.OPTYPE.OUTPUT or not t.outputs for t in outs)
        if makes_the_output or any(target.module in protected for target in outs):
            continue
        channel_groups = max(_channel_groups(dep.target.module) for dep, _ in coupled)
        yield Group(layer=name, width=width, channel_groups=channel_groups, coupled=coupled)
    if refusals:
        raise refused(refusals)


def rounded_width(width: int, ratio: float, round_to: int, channel_groups: int = 1) -> int:
    """`width * (1 - ratio)` as the nearest multiple of both others, halves up, at least one multiple.

    A layer no wider than one multiple keeps its width.
    """
    unit = math.lcm(round_to, channel_groups)
    nearest = max(1, math.floor(width * (1 - ratio) / unit + 0.5))
    return min(width, nearest * unit)


def ratio_for(
    cost: Callable[[nn.Module], float],
    limit: float,
    model: nn.Module,
    example: torch.Tensor,
    options: PruneOptions,
) -> float:
    """The smallest ratio, in steps of 1 %, whose pruned model costs at most `limit`.

    Args:
        cost: Multiply-accumulates, milliseconds or whatever is to be limited, of a pruned model in eval mode.
        limit: In the unit of `cost`.
        model: The parent.
        example: One input batch.
        options: Rounding and protection.

    Raises:
        UserError: even the largest ratio costs more, or the parent already costs less.
    """
    if cost(model) <= limit:
        raise UserError(
            f"pruning target {limit:g}: the unpruned model already costs {cost(model):g}",
            allowed="a target below the unpruned model's cost",
            next_step="lower prune.target.value",
        )
    low, high = 0, round(MAX_RATIO / _RATIO_STEP)  # cost(low) > limit; every width falls with the ratio
    if (least := cost(prune_to(model, example, MAX_RATIO, model, options))) > limit:  # proves the graph, too
        raise UserError(
            f"pruning target {limit:g}: removing {MAX_RATIO:.0%} of the channels still costs {least:g}",
            allowed=f"a target of at least {least:g}",
            next_step="raise prune.target.value, protect fewer layers, or start from a smaller model",
        )
    while high - low > 1:
        middle = (low + high) // 2
        cuts = plan_cuts(model, example, middle * _RATIO_STEP, model, options)
        if cost(cut_copy(model, example, cuts).model) <= limit:
            high = middle
        else:
            low = middle
    return round(high * _RATIO_STEP, 2)


def sensitivity(
    score: Callable[[nn.Module], float],
    ratios: Sequence[float],
    model: nn.Module,
    example: torch.Tensor,
    options: PruneOptions,
) -> dict[str, dict[float, float]]:
    """What `score` (e.g. validation accuracy) becomes when one group alone is pruned, without fine-tuning.

    Args:
        score: Of a pruned model in eval mode.
        ratios: Shares of the group's channels to remove.
        model: The parent, of a graph that `prune_to` has accepted.
        example: One input batch.
        options: Rounding and protection.

    Returns:
        Layer name -> ratio -> score; ratios that rounding turns into no change are left out.
    """
    result: dict[str, dict[float, float]] = {}
    for ratio in ratios:
        for cut in plan_cuts(model, example, ratio, model, options):
            result.setdefault(cut.layer, {})[ratio] = score(cut_copy(model, example, [cut]).model)
    return result


def removed_share(parent: nn.Module, pruned: nn.Module) -> float:
    """Share of all output channels that is gone, 0..1: what rounding and protection made of the ratio."""
    before, after = _total_width(layer_widths(parent)), _total_width(layer_widths(pruned))
    return 1 - after / before


def _total_width(widths: Mapping[str, tuple[int, int, int]]) -> int:
    return sum(n_out for _, n_out, _ in widths.values())


def _least_important(group: Group, count: int) -> tuple[int, ...]:
    """The `count` least important channels; a grouped convolution loses the same ones in each group."""
    importance: torch.Tensor | None = torch_pruning.importance.BNScaleImportance()(group.coupled)
    if importance is None:
        importance = torch_pruning.importance.GroupMagnitudeImportance(p=2)(group.coupled)
    per_group = group.width // group.channel_groups
    scores = importance.view(group.channel_groups, per_group).mean(0)
    worst = torch.argsort(scores, stable=True)[: count // group.channel_groups]
    offsets = torch.arange(group.channel_groups)[:, None] * per_group
    return tuple(sorted((worst[None] + offsets).flatten().tolist()))


def _channel_groups(module: nn.Module) -> int:
    """1 for anything but a grouped convolution; depthwise ones lose single channels."""
    if not isinstance(module, nn.Conv2d) or module.groups == module.out_channels:
        return 1
    return module.groups


def _protected(model: nn.Module, patterns: Sequence[str]) -> set[nn.Module]:
    modules = dict(model.named_modules())
    protected: set[nn.Module] = set()
    for pattern in patterns:
        matching = [module for name, module in modules.items() if name and fnmatchcase(name, pattern)]
        if not matching:
            raise UserError(
                f"prune.protect: {pattern!r} matches no layer",
                allowed=f"module names or patterns, e.g. {', '.join([n for n in modules if n][:5])}",
                next_step="correct prune.protect in params.yaml",
            )
        protected.update(inner for module in matching for inner in module.modules())
    return protected
