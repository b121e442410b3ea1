"""Pruning: removes what it says, nothing else; refuses graphs it would break or silently change."""

import copy
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from prune_graphs import ACCEPTED, REFUSED, drawn
from torch import nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

from fleet.device.errors import UserError
from tasks.nn.arch import layer_widths
from tasks.nn.macs import macs, params
from tasks.nn.prune_check import remove_channels, remove_chosen_channels
from tasks.nn.prune_cut import Cut
from tasks.nn.pruning import (
    PruneOptions,
    plan_cuts,
    prune_to,
    ratio_for,
    removed_share,
    rounded_width,
    sensitivity,
)

CASES = Path(__file__).resolve().parents[4] / "shared" / "cases"
ROUND_4 = PruneOptions(round_to=4)
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(7))


def torchvision_model(name: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return torchvision.models.get_model(name, weights=None, num_classes=10).eval()


def example(size_px: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size_px, size_px, generator=torch.Generator().manual_seed(1))


def output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


@pytest.mark.parametrize("case", ["pr_bn_offset", "pr_c2f", "pr_permute_flatten", "pr_pixelshuffle"])
def test_shared_fault_cases_are_refused_with_the_layer_named(case: str) -> None:
    """Each case of the shared table is refused, and the message names the layer that was to be pruned."""
    if not CASES.is_dir():
        pytest.skip("the shared fault cases are not beside this checkout")
    spec = importlib.util.spec_from_file_location(case, CASES / case / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, inputs, layer, channels = module.build()
    with pytest.raises(UserError, match=f"`{layer}` cannot be pruned"):
        remove_channels(model, inputs[0], [Cut(layer=layer, channels=tuple(channels))])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_graph_that_would_change_is_refused(kind: str, seed: int) -> None:
    """Every kind of graph that pruning breaks or silently changes is refused, at any width and weights."""
    model = drawn(REFUSED[kind], seed, width=(8, 12)[seed])
    with pytest.raises(UserError, match=r"(layer `stem`|block `Graph`) cannot be pruned"):
        remove_chosen_channels(model, X, [Cut(layer="stem", channels=(1, 2))])


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", ACCEPTED)
def test_pruned_channels_count_as_zero(kind: str, seed: int) -> None:
    """The pruned model computes the original with zeros where readers met the removed channels.

    The reference is made here by zeroing weights, without the pruner's own masks.
    """
    model = drawn(ACCEPTED[kind], seed, width=(8, 12)[seed])
    channels = (1, 5) if seed == 0 else (0, 6)
    pruned = remove_chosen_channels(model, X, [Cut(layer="stem", channels=channels)])
    assert layer_widths(pruned)["stem"][1] == layer_widths(model)["stem"][1] - 2
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for name, layer in reference.named_modules():
            # In these graphs channel c of a coupled layer belongs to channel c of the stem; in the
            # concatenation the stem's channels come last.
            width = getattr(layer, "out_channels", getattr(layer, "num_features", 0))
            offset = width - layer_widths(model)["stem"][1]
            coupled = {"residual": ["stem", "norm", "inner", "after"], "dense_concat": ["stem", "norm"]}
            coupled.setdefault(kind, ["stem", "norm", "deep", "expand"])
            if kind == "grouped":
                coupled[kind] = ["stem"]
            if name in coupled[kind]:
                for c in channels:
                    layer.weight[c + offset] = 0
                    if layer.bias is not None:
                        layer.bias[c + offset] = 0
                    if getattr(layer, "running_mean", None) is not None:
                        layer.running_mean[c + offset] = 0
    torch.testing.assert_close(output(pruned, X), output(reference, X), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(output(pruned, X), output(model, X), rtol=1e-3)


def test_dead_channels_leave_without_a_trace() -> None:
    """Removing channels whose filters and batch-norm rows are zero leaves the output as it was."""
    model = drawn(ACCEPTED["depthwise"], 0, width=8)
    with torch.no_grad():
        for name in ("stem", "deep", "norm"):
            layer = model.get_submodule(name)
            layer.weight[[2, 3]] = 0
            layer.bias[[2, 3]] = 0
    pruned = remove_channels(model, X, [Cut(layer="stem", channels=(2, 3))])
    torch.testing.assert_close(output(pruned, X), output(model, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_dead_filter_with_a_live_batch_norm_shift_is_refused(seed: int) -> None:
    """A channel with a zero filter and a shifting batch norm is a constant: dropping it changes the model."""
    model = drawn(ACCEPTED["residual"], seed, width=8)
    with torch.no_grad():
        model.stem.weight[[1, 4]] = 0
        model.stem.bias[[1, 4]] = 0
    with pytest.raises(UserError, match="`stem` cannot be pruned: its filters are dead"):
        remove_channels(model, X, [Cut(layer="stem", channels=(1, 4))])


def test_equal_weights_do_not_hide_a_mix_up() -> None:
    """Channels that are all alike compute the same after a wrong cut; random weights betray it."""
    model = drawn(REFUSED["permute_flatten"], 0, width=8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    with pytest.raises(UserError, match="`stem` cannot be pruned"):
        remove_chosen_channels(model, X, [Cut(layer="stem", channels=(1, 2))])


@pytest.mark.parametrize(
    ("layer", "channels"), [("stem", (8,)), ("stem", (-1,)), ("stem", ()), ("nowhere", (0,)), ("norm", (0,))]
)
def test_channels_that_do_not_exist_are_refused(layer: str, channels: tuple[int, ...]) -> None:
    """A wrong index, an empty list or an unknown layer is the caller's mistake and is named."""
    with pytest.raises(UserError, match=f"of `{layer}`"):
        remove_channels(drawn(ACCEPTED["residual"], 0, width=8), X, [Cut(layer=layer, channels=channels)])


def test_a_layer_is_never_emptied() -> None:
    """Removing every channel of a layer is refused."""
    with pytest.raises(UserError, match="`stem` cannot be pruned: it would take 8 output channels"):
        remove_channels(
            drawn(ACCEPTED["residual"], 0, width=8), X, [Cut(layer="stem", channels=tuple(range(8)))]
        )


@pytest.mark.parametrize(("size_px", "batch", "reason"), [(8, 1, "training"), (8, 2, None)])
def test_a_model_that_does_not_run_is_not_blamed_on_pruning(
    size_px: int, batch: int, reason: str | None
) -> None:
    """A batch of one image cannot train a norm of single pixels: that is said before anything is pruned."""
    model = nn.Sequential(nn.Conv2d(3, 16, 8), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16, 4)).eval()
    x = torch.randn(batch, 3, size_px, size_px)
    if reason is None:
        assert prune_to(model, x, 0.5, model, PruneOptions())[0].out_channels == 8
    else:
        with pytest.raises(UserError, match=r"cannot be pruned on inputs of shape .*training mode"):
            prune_to(model, x, 0.5, model, PruneOptions())


@pytest.mark.parametrize(
    ("width", "ratio", "round_to", "groups", "kept"),
    [
        (64, 0.3, 8, 1, 48),  # 44.8 lies nearer to 48
        (16, 0.3, 8, 1, 8),  # 11.2 lies nearer to 8
        (40, 0.3, 8, 1, 32),  # 28 lies in the middle: up
        (8, 0.3, 8, 1, 8),  # one multiple stays
        (8, 0.9, 8, 1, 8),
        (6, 0.5, 8, 1, 6),  # narrower than a multiple: untouched
        (100, 0.3, 1, 1, 70),
        (64, 0.5, 16, 1, 32),
        (48, 0.3, 8, 6, 24),  # multiples of lcm(8, 6) = 24
    ],
)
def test_widths_round_to_the_nearest_multiple(
    width: int, ratio: float, round_to: int, groups: int, kept: int
) -> None:
    """Widths go to the nearest multiple that the engine and the grouped convolutions like, never to zero."""
    assert rounded_width(width, ratio, round_to, groups) == kept


@pytest.mark.parametrize(
    "name", ["mobilenet_v3_small", "mobilenet_v2", "resnet18", "squeezenet1_1", "mnasnet0_5"]
)
def test_torchvision_models_lose_the_share_of_channels_that_was_asked_for(name: str) -> None:
    """30 % of the channels go, half of the weights with them; widths are multiples of 8 or unchanged."""
    model, x = torchvision_model(name), example(64 if name == "squeezenet1_1" else 32)
    before = copy.deepcopy(model.state_dict())
    pruned = prune_to(model, x, 0.3, model, PruneOptions())
    assert removed_share(model, pruned) == pytest.approx(0.3, abs=0.015)
    assert params(pruned) / params(model) == pytest.approx(0.49, abs=0.02)
    assert output(pruned, x).shape == (2, 10)
    widths = layer_widths(model)
    assert all(w[1] % 8 == 0 or w[1] == widths[k][1] for k, w in layer_widths(pruned).items())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "the original was changed"


def test_a_small_densenet_is_pruned() -> None:
    """Concatenation chains with a batch norm over all their parts are followed."""
    torch.manual_seed(0)
    model = torchvision.models.DenseNet(16, (2, 2), 32, num_classes=10).eval()
    pruned = prune_to(model, example(), 0.3, model, PruneOptions())
    assert removed_share(model, pruned) == pytest.approx(0.3, abs=0.1)


def test_channel_shuffle_of_shufflenet_is_refused() -> None:
    """ShuffleNet's shuffle is not followed; the block is named and nothing is pruned."""
    model = torchvision_model("shufflenet_v2_x0_5")
    with pytest.raises(UserError, match="`stage2` cannot be pruned"):
        prune_to(model, example(), 0.3, model, PruneOptions())


def test_a_graph_whose_reshapes_never_end_is_refused_soon() -> None:
    """Swin's patch merging sends Torch-Pruning round with ever longer lists; that ends in a refusal."""
    torch.manual_seed(0)
    model = SwinTransformer([4, 4], 16, [1, 1, 1], [1, 2, 4], [4, 4], num_classes=10).eval()
    with pytest.raises(UserError, match=r"`features\.4\.reduction` .*lead back to themselves"):
        prune_to(model, example(64), 0.5, model, PruneOptions())


def small_convnext() -> nn.Module:
    return ConvNeXt([CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)], num_classes=10)


def small_vit() -> nn.Module:
    return VisionTransformer(32, 8, 2, 2, 16, 64, num_classes=10)


@pytest.mark.parametrize("make", [small_convnext, small_vit])
def test_layer_norm_is_refused_and_the_advice_works(make) -> None:
    """Layer norm averages over channels: refused; protecting what the message lists prunes the rest."""
    torch.manual_seed(0)
    model = make().eval()
    options = PruneOptions()
    with pytest.raises(UserError) as refusal:
        prune_to(model, example(), 0.5, model, options)
    advice = re.search(r"add to prune.protect: \[(.*)\]", refusal.value.next_step)[1]
    pruned = prune_to(model, example(), 0.5, model, PruneOptions(protect=tuple(advice.split(", "))))
    assert params(pruned) < 0.95 * params(model)


def test_pruning_in_steps_ends_at_the_same_widths() -> None:
    """20 % and then 30 % leave the widths of 30 % at once: the ratio always refers to the parent."""
    model = drawn(ACCEPTED["squeeze_excite"], 0, width=64)
    once = prune_to(model, X, 0.3, model, ROUND_4)
    half_way = prune_to(model, X, 0.2, model, ROUND_4)
    twice = prune_to(half_way, X, 0.3, model, ROUND_4)
    assert layer_widths(once) == layer_widths(twice) != layer_widths(half_way)
    again = prune_to(
        twice, X, 0.3, model, ROUND_4
    )  # nothing left to cut: still a copy, or training it trains both
    assert again is not twice
    assert layer_widths(again) == layer_widths(twice)
    assert all(torch.equal(tensor, twice.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_the_smallest_batch_norm_scales_go_first() -> None:
    """Channels are ranked by batch-norm scale; large weights before a small scale do not save them."""
    model = drawn(ACCEPTED["depthwise"], 0, width=8)
    with torch.no_grad():
        model.norm.weight.copy_(torch.tensor([1.0, 0.1, 1.2, 0.9, 0.2, 1.1, 0.3, 0.05]))
        model.stem.weight[[1, 4, 6, 7]] *= 100
    cuts = plan_cuts(model, X, 0.5, model, PruneOptions(round_to=4, protect=("reader",)))
    assert cuts == [Cut(layer="stem", channels=(1, 4, 6, 7))]


def test_without_a_batch_norm_the_smallest_weights_go_first() -> None:
    """Channels of a group without a batch norm are ranked by the magnitude of the weights around them."""
    model = drawn(ACCEPTED["flatten"], 0, width=8)
    with torch.no_grad():
        model.stem.weight[[0, 3, 5, 6]] *= 0.01
        model.reader.weight.view(5, 8, 64)[:, [0, 3, 5, 6]] *= 0.01
    assert plan_cuts(model, X, 0.5, model, ROUND_4) == [Cut(layer="stem", channels=(0, 3, 5, 6))]


def test_a_grouped_convolution_loses_the_same_channels_in_each_group() -> None:
    """Otherwise its groups would have different widths."""
    model = drawn(ACCEPTED["grouped"], 0, width=16)
    cuts = {cut.layer: cut.channels for cut in plan_cuts(model, X, 0.5, model, ROUND_4)}
    assert {c % 8 for c in cuts["wide"] if c < 8} == {c % 8 for c in cuts["wide"] if c >= 8}
    pruned = prune_to(model, X, 0.5, model, ROUND_4)
    assert layer_widths(pruned)["wide"] == (8, 8, 2)


def test_protected_layers_keep_their_channels_and_the_classifier_always_does() -> None:
    """A pattern protects what it matches and all inside; the layer that gives the logits needs none."""
    model, x = torchvision_model("mobilenet_v3_small"), example()
    pruned = prune_to(model, x, 0.5, model, PruneOptions(protect=("features.0.0", "features.[1-3]*")))
    before, after = layer_widths(model), layer_widths(pruned)
    kept = [k for k in before if k.startswith(("features.0", "features.1.", "features.2.", "features.3."))]
    assert all(after[k][1] == before[k][1] for k in kept)
    assert after["classifier.3"][1] == 10
    assert after["classifier.0"][1] == 512


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    """A misspelt name would otherwise protect nothing, silently."""
    model = drawn(ACCEPTED["residual"], 0, width=8)
    with pytest.raises(UserError, match="'stemm' matches no layer"):
        prune_to(model, X, 0.5, model, PruneOptions(protect=("stemm",)))


def test_protecting_everything_is_an_error() -> None:
    """A stage that prunes nothing must not claim to have pruned."""
    model = drawn(ACCEPTED["residual"], 0, width=8)
    with pytest.raises(UserError, match="no layer is left to prune"):
        prune_to(model, X, 0.5, model, PruneOptions(protect=("*",)))


@pytest.mark.parametrize("ratio", [0.0, -0.1, 0.95, float("nan")])
def test_a_ratio_outside_its_range_is_an_error(ratio: float) -> None:
    """0 would prune nothing, more than 0.9 nearly everything."""
    model = drawn(ACCEPTED["residual"], 0, width=8)
    with pytest.raises(UserError, match="pruning ratio"):
        prune_to(model, X, ratio, model, PruneOptions())


def test_the_ratio_for_a_cost_is_the_smallest_that_meets_it() -> None:
    """A MACs target is met, and one per cent less pruning would miss it."""
    model = drawn(ACCEPTED["squeeze_excite"], 0, width=64)

    def cost(m: nn.Module) -> float:
        return macs(m, (1, 3, 8, 8))

    limit = 0.6 * cost(model)
    ratio = ratio_for(cost, limit, model, X, ROUND_4)
    assert cost(prune_to(model, X, ratio, model, ROUND_4)) <= limit
    assert cost(prune_to(model, X, ratio - 0.01, model, ROUND_4)) > limit


def test_a_cost_out_of_reach_is_an_error() -> None:
    """A target below what 90 % pruning reaches, or above the unpruned cost, says so with numbers."""
    model = drawn(ACCEPTED["residual"], 0, width=16)
    with pytest.raises(UserError, match="still costs"):
        ratio_for(params, 1, model, X, ROUND_4)
    with pytest.raises(UserError, match="already costs"):
        ratio_for(params, 1e9, model, X, ROUND_4)


def test_sensitivity_prunes_one_group_at_a_time() -> None:
    """Each score comes from a model that lost channels in that one group only."""
    model = drawn(ACCEPTED["squeeze_excite"], 0, width=16)
    seen: list[dict[str, int]] = []

    def score(pruned: nn.Module) -> float:
        seen.append({k: v[1] for k, v in layer_widths(pruned).items()})
        return float(params(pruned))

    result = sensitivity(score, [0.5], model, X, ROUND_4)
    assert set(result) == {"stem", "squeeze", "reader"}
    assert result["squeeze"][0.5] < params(model)
    assert {w["squeeze"] for w in seen} == {8, 4}
    assert all((w["stem"] == 8) + (w["squeeze"] == 4) + (w["reader"] == 4) == 1 for w in seen)


def test_the_same_model_is_pruned_the_same_way_and_random_state_is_left_alone() -> None:
    """Two prunings agree bit for bit; torch's random generator is where it was."""
    model = drawn(ACCEPTED["dense_concat"], 0, width=16)
    state = torch.get_rng_state()
    first, second = (prune_to(model, X, 0.3, model, ROUND_4).state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_frozen_layers_stay_frozen_and_are_pruned_with_the_rest() -> None:
    """requires_grad survives pruning, and a frozen layer is no blind spot of the tracing."""
    model = drawn(ACCEPTED["depthwise"], 0, width=8)
    model.deep.requires_grad_(False)
    pruned = prune_to(model, X, 0.5, model, ROUND_4)
    assert layer_widths(pruned)["deep"] == (4, 4, 4)
    assert not pruned.deep.weight.requires_grad
    assert pruned.stem.weight.requires_grad
    assert np.array_equal(model.deep.weight.shape, (8, 1, 3, 3))
