"""Sensitivity finds a layer that was made sensitive, and the skip list is the one that mends it."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from fleet.device.errors import UserError
from tasks.nn.fakequant import QuantConv2d
from tasks.nn.quantized import QuantizedModel
from tasks.nn.sensitivity import Trials, layer_costs, snr_db
from tasks.nn.skip_search import search

WIDTH, CLASSES, SIZE = 16, 6, 12


def make_net() -> nn.Sequential:
    """Six convolutions, called 0, 2, ... 10."""
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for index in range(6):
        layers += [nn.Conv2d(3 if index == 0 else WIDTH, WIDTH, 3, padding=1), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))
    return net.eval()


def make_trials(*hard: str, images: int = 300) -> Trials:
    """Labels are the float model's own answers, so it is right on every image and each flip is a loss; images
    that it is unsure of are left out.

    The tensor after each layer named in `hard` gets a step 120 times too large: one level is left of it.
    """
    net, rng = make_net(), torch.Generator().manual_seed(0)
    count = 4 * images
    x = torch.randn(count, 3, SIZE, SIZE, generator=rng) + 2 * torch.randn(count, 3, 1, 1, generator=rng)
    with torch.inference_mode():
        logits = net(x)
        net[-1].bias -= logits.mean(0)  # every class is somebody's answer
        answers = net(x)
    best = answers.topk(2).values
    sure = (best[:, 0] - best[:, 1]).argsort(descending=True)[:images]
    trials = Trials(
        build=lambda: copy.deepcopy(net),
        calibration=x,
        observer="max_abs",
        skip=("first",),
        images=x[sure],
        labels=answers[sure].argmax(1).numpy(),
    )
    for layer in hard:
        step = next(scales.output_step for scales in trials.full.scales() if scales.layer == layer)
        (tensor,) = (name for name, of_tensor in trials._steps.items() if of_tensor == step)
        trials._steps[tensor] *= 120
    return trials


@pytest.fixture(scope="module")
def planted():
    trials = make_trials("4")
    return trials, layer_costs(trials)


def test_the_planted_layers_come_first(planted):
    """The writer and the reader of the hard tensor lose for certain; all others are ties."""
    trials, costs = planted
    assert {cost.layer for cost in costs[:2]} == {"4", "6"}
    assert [cost.rank for cost in costs] == [1, 2, 3, 4, 5]
    assert all(cost.alone.low_pp > 0 and cost.alone.drop_pp > 10 for cost in costs[:2])
    assert all(cost.alone.low_pp <= 0 for cost in costs[2:])
    assert len(trials.layers) == 5


def test_ties_are_ranked_by_the_error_in_the_logits(planted):
    """Where accuracy tells nothing, the signal-to-noise ratio of the answer does."""
    _, costs = planted
    rest = [cost.logits_snr_db for cost in costs[2:]]
    assert rest == sorted(rest)
    assert costs[0].logits_snr_db < 20 < rest[0]
    assert all(0 < cost.cosine <= 1 for cost in costs)


def test_alone_means_alone():
    """The model of one layer holds one int8 convolution, and its step is that of the whole model."""
    trials = make_trials()
    whole, others = trials.full, [name for name in trials.layers if name != "6"]
    alone = trials.quantized(others)
    assert list(alone.layers) == ["6"]
    assert sum(isinstance(module, QuantConv2d) for module in alone.graph.modules()) == 1
    (ours,), theirs = alone.scales(), {scales.layer: scales for scales in whole.scales()}
    assert (ours.input_step, ours.output_step) == pytest.approx(
        (theirs["6"].input_step, theirs["6"].output_step)
    )


def test_giving_a_layer_back_is_measured_against_the_whole(planted):
    """One end of the hard tensor keeps its scale alive, so giving back the other alone brings little."""
    trials, costs = planted
    everything = trials.ask(trials.deployed(()).graph)
    without = trials.ask(trials.deployed(("4", "6")).graph)
    assert trials.drop(without, everything).drop_pp > 10
    for cost in costs:
        one = trials.ask(trials.deployed((cost.layer,)).graph)
        assert cost.given_back == trials.drop(one, everything)


def test_the_skip_list_is_what_mends_it(planted):
    """Both ends of the hard tensor, in order of execution, and no more."""
    trials, costs = planted
    found = search(trials, costs, 1.0)
    assert found.layers == ("4", "6")
    assert found.before.drop_pp > 10
    assert found.after.drop_pp <= 1.0
    kept = trials.quantized(found.layers)
    assert set(kept.layers) == set(trials.layers) - {"4", "6"}


def test_what_is_not_needed_is_taken_back(planted):
    """A ranking that names innocent layers first still ends with the two that matter."""
    trials, costs = planted
    innocent = [cost for cost in costs if cost.layer == "2"]
    guilty = [cost for cost in costs if cost.layer in {"4", "6"}]
    rest = [cost for cost in costs if cost.layer in {"8", "10"}]
    # At most half of the ranking is walked; naming the rest twice lets the search come past the innocent one.
    found = search(trials, [*innocent, *guilty, *rest, *rest], 1.0)
    assert found.layers == ("4", "6")


def test_within_the_budget_nothing_is_skipped():
    """An easy model needs no list."""
    trials = make_trials()
    costs = layer_costs(trials)
    found = search(trials, costs, 5.0)
    assert found.layers == ()
    assert found.before == found.after


def test_a_budget_that_cannot_be_met_says_how_near_it_came():
    """Every tensor is hard, so half of the layers do not help."""
    trials = make_trials("2", "4", "6", "8")
    costs = layer_costs(trials)
    with pytest.raises(
        UserError, match=r"2 of 5 layers left out still lose .* nearest was \d+\.\d\d pp"
    ) as said:
        search(trials, costs, 0.0)
    assert "QAT" in said.value.next_step


def test_labels_decide_not_agreement():
    """A flip from wrong to right is a gain."""
    trials = make_trials(images=40)
    right = np.eye(CLASSES, dtype=np.float32)[trials.labels]
    wrong = np.eye(CLASSES, dtype=np.float32)[(trials.labels + 1) % CLASSES]
    assert trials.drop(right, wrong).drop_pp == 100
    assert trials.drop(wrong, right).drop_pp == -100


def test_the_ratio_of_known_arrays():
    """A tenth of the amplitude is 20 dB; no error is 200."""
    ones = np.ones((2, 5), np.float32)
    assert snr_db(ones, ones * 0.9) == pytest.approx(20, abs=1e-3)
    assert snr_db(ones, ones) == 200


def test_skipping_by_name_leaves_the_models_of_the_stage_alone():
    """The whole model is the one that the stage quantize builds."""
    trials = make_trials()
    stage = QuantizedModel(make_net(), ("first",))
    assert trials.layers == stage.plan.layers
    assert set(trials.skipped) == set(stage.plan.left_float)
