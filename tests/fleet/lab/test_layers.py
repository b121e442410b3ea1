"""Which layers are slow for what they do: made-up profiles with known answers, and a real one."""

from dataclasses import replace

import pytest

from fleet.device.profile import LayerTime
from fleet.lab.layers import judge, profile
from fleet.lab.local import LocalDevice
from fleet.lab.schedule import Job


def layer(name, op_type, p50_ms, work_m, *, int8=False):
    return LayerTime(layer=name, op_type=op_type, int8=int8, p50_ms=p50_ms, work_m=work_m)


CONVS = [layer(f"conv{i}", "Convolution", 0.1, 10.0) for i in range(6)]
SMALL = [layer(f"small{i}", "Convolution", 0.02, 0.1) for i in range(6)]
POINTWISE = [layer(f"relu{i}", "UnaryOp", 0.01, 0.1) for i in range(6)]


def outliers(*times):
    return [judged.layer for judged in judge(list(times)) if judged.outlier]


@pytest.mark.parametrize(
    ("suspect", "found"),
    [
        (layer("slow", "Convolution", 1.2, 10.0), True),
        (layer("big", "Convolution", 1.2, 120.0), False),
        (layer("big and slow", "Convolution", 13.0, 120.0), True),
        (layer("twice the work", "Convolution", 1.2, 20.0), False),
        (layer("slow beside those of its size", "Convolution", 0.3, 0.1), True),
        (layer("small", "Convolution", 0.02, 0.02), False),
        (layer("tiny and costly per work", "Convolution", 0.05, 0.001), False),
        (layer("alone of its kind", "TopKV2", 2.0, 0.1), True),
        (layer("alone and quick", "TopKV2", 0.05, 0.1), False),
        (layer("alone and big", "Softmax", 2.0, 100.0), False),
        (layer("alone beside convolutions", "Deconvolution", 5.0, 10.0), True),
        (layer("uncounted", "UnaryOp", 0.5, 0.0), True),
    ],
    ids=lambda value: value.layer if isinstance(value, LayerTime) else "",
)
def test_slow_is_told_from_big(suspect, found):
    """Ten times the time of what does the same amount of the same."""
    assert outliers(*CONVS, *SMALL, *POINTWISE, suspect) == ([suspect.layer] if found else [])


def test_arithmetics_are_not_mixed():
    """Float layers of an int8 model are no peers of its int8 layers, while there are peers enough."""
    fast = [layer(f"int8_{i}", "Convolution", 0.008, 10.0, int8=True) for i in range(6)]
    assert outliers(*fast, *CONVS) == []  # in float, more than 10 times slower
    assert outliers(*fast, *CONVS, layer("slow", "Convolution", 0.1, 10.0, int8=True)) == ["slow"]


def test_what_takes_no_time_is_nobodys_matter():
    """A hundred times its peers, and still under a hundredth of the model."""
    tiny = [layer(f"reshape{i}", "Reshape", 0.0001, 0.01) for i in range(5)]
    assert outliers(layer("conv", "Convolution", 100.0, 10.0), *tiny, replace(tiny[0], p50_ms=0.01)) == []


def test_too_few_layers_are_not_judged():
    """Two layers have no peers; an empty profile, and one without time, is no error."""
    assert outliers(layer("a", "Convolution", 0.001, 1.0), layer("b", "Convolution", 9.0, 1.0)) == []
    assert judge([]) == []
    assert [judged.share for judged in judge([layer("a", "Convolution", 0.0, 1.0)] * 5)] == [0.0] * 5


def test_an_outlier_says_with_what_it_was_compared():
    """Peers and factor."""
    (why,) = [judged.why for judged in judge([*CONVS, layer("slow", "Convolution", 1.5, 10.0)]) if judged.why]
    assert why == "15 times what 6 Convolution layers with about as much work lead to expect"


def test_a_real_profile_lists_what_ran(model):
    """Operators with their types, in order, with the work of the convolution as the engine counts it."""
    layers = profile(LocalDevice(), Job(model=model))
    assert any(one.op_type == "Convolution" for one in layers)
    assert sum(one.share for one in layers) == pytest.approx(1)
    assert all(one.p50_ms > 0 for one in layers)
