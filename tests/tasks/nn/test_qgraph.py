"""The engine's rules as a table, held against the engine itself: what runs in int8, and its integers."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
import torchvision
from torch import nn

from fleet.device.engine import Session
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.mnn.compression import compression
from tasks.mnn.converter import convert
from tasks.mnn.onnx_export import export_onnx
from tasks.mnn.request import ConvertOptions
from tasks.nn.calibrate import calibrate
from tasks.nn.qgraph import lower
from tasks.nn.quantized import QuantizedModel

SIZE = 16


class Net(nn.Module):
    """first -> a, b -> MIDDLE(a, b) -> c -> tail; the tail stays float, because it ends the graph."""

    def __init__(self, middle, *, channels: int = 8, **modules: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 8, 1)
        self.c, self.tail = nn.Conv2d(channels, 8, 1), nn.Conv2d(8, 4, 1)
        for name, module in modules.items():
            self.add_module(name, module)
        self.middle = middle

    def forward(self, x):
        return self.tail(self.c(self.middle(self, self.a(x), self.b(x)))).flatten(1)


def depthwise(stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(8, 8, 3, padding=1, stride=stride, groups=8)


# name: (network, operators of the engine that run in int8 beside a, b and c)
CASES = {
    "addition": (lambda: Net(lambda _, a, b: a + b), {"add"}),
    "addition and fused relu": (lambda: Net(lambda _, a, b: F.relu(a + b)), {"relu"}),
    "product": (lambda: Net(lambda _, a, b: a * b), {"mul"}),
    "constant factor": (lambda: Net(lambda _, a, b: a * 0.5 + b), set()),
    "relu": (lambda: Net(lambda _, a, b: F.relu(a) + b), {"relu", "add"}),
    "relu6": (lambda: Net(lambda m, a, b: m.relu6(4 * a) + b, relu6=nn.ReLU6()), set()),
    "fused relu6": (
        lambda: Net(lambda m, a, b: m.relu6(4 * b) + m.relu6(m.d(a)), d=depthwise(), relu6=nn.ReLU6()),
        {"relu6_1"},
    ),
    "depthwise": (lambda: Net(lambda m, a, b: F.relu(m.d(a)) + b, d=depthwise()), {"relu", "add"}),
    "hardswish": (lambda: Net(lambda _, a, b: F.hardswish(a) + b), set()),
    "hardswish read twice": (
        lambda: Net(
            lambda m, a, b: m.e(m.h(a)) + F.hardsigmoid(m.h(a) + b), e=nn.Conv2d(8, 8, 1), h=nn.Hardswish()
        ),
        {"e"},
    ),
    "squeeze and excite": (
        lambda: Net(
            lambda m, a, b: F.hardsigmoid(m.up(F.relu(m.down(m.pool(F.hardswish(a)))))) * b,
            pool=nn.AdaptiveAvgPool2d(1),
            down=nn.Conv2d(8, 4, 1),
            up=nn.Conv2d(4, 8, 1),
        ),
        {"relu", "up"},
    ),
    "max pool after relu": (
        lambda: Net(lambda m, a, b: m.p(F.relu(a)) + m.p(F.relu(b)), p=nn.MaxPool2d(2)),
        None,
    ),
    "max pool of float values": (
        lambda: Net(lambda m, a, b: m.p(F.relu(F.hardswish(a) + b)), p=nn.MaxPool2d(2)),
        {"p"},
    ),
    "average pool": (lambda: Net(lambda m, a, b: m.p(F.relu(a + b)), p=nn.AvgPool2d(2)), None),
    "average pool passed on": (
        lambda: Net(lambda m, a, b: F.hardswish(m.p(a)) + F.hardswish(m.p(b)), p=nn.AvgPool2d(2)),
        {"p", "p_1"},
    ),
    "average pool of float values": (
        lambda: Net(lambda m, a, b: m.p(F.hardswish(a) + b), p=nn.AvgPool2d(2)),
        {"p"},
    ),
    "concatenation": (lambda: Net(lambda _, a, b: torch.cat([a, F.relu(b)], 1), channels=16), {"relu"}),
    "concatenation of float values": (
        lambda: Net(lambda _, a, b: torch.cat([a, F.hardswish(b)], 1), channels=16),
        None,
    ),
    "grouped convolution": (
        lambda: Net(lambda m, a, b: m.g(a) + b, g=nn.Conv2d(8, 8, 3, padding=1, groups=2)),
        None,
    ),
    "grouped convolution of float values": (
        lambda: Net(
            lambda m, a, b: m.g(F.hardswish(a)) + F.hardswish(b), g=nn.Conv2d(8, 8, 3, padding=1, groups=4)
        ),
        None,
    ),
}


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 3, SIZE, SIZE)


def quantised(model: nn.Module, images: torch.Tensor, *skip: str) -> QuantizedModel:
    """A calibrated fake-quant model in eval mode."""
    made = QuantizedModel(model.eval(), skip)
    calibrate(made.graph, lambda: iter([images]), "max_abs")
    return made


def in_engine(model: nn.Module, made: QuantizedModel, images: torch.Tensor, folder: Path):
    """Logits of the converted model, and the number of convolutions that ran in int8."""
    twin, state = lower(model), made.graph.state_dict()
    for name, layer in made.layers.items():
        state[f"{name}.weight"] = layer.weight_integers() * layer.weight_step.view(-1, 1, 1, 1)
    twin.load_state_dict({name: state[name] for name in twin.state_dict()})
    onnx_path = folder / "model.onnx"
    export_onnx(twin, Preprocess(size_px=SIZE), onnx_path)
    told = compression(onnx_path, made.scales())
    (folder / "compression.json").write_text(json.dumps(told.parameters))
    options = ConvertOptions(compression=folder / "compression.json")
    convert(onnx_path, folder / "model.mnn", options)
    with Session(folder / "model.mnn") as session:
        _, ops = session.trace({"input": images[:1].numpy()})
        logits = np.concatenate([session.run({"input": image[None].numpy()})["logits"] for image in images])
    int8 = [op for op in ops if op.int8 and op.type.startswith("Conv")]
    return logits, len(int8)


@pytest.mark.parametrize("name", CASES)
def test_every_integer_is_the_engines(name, images, tmp_path):
    """The engine and the fake-quant graph give the same integers, and every listed convolution ran in int8.

    A float operator between int8 ones may differ in its last bit and move a value across a rounding tie, so
    one logit in a thousand may differ; a wrong rule changes a tenth of them and more.
    """
    torch.manual_seed(0)
    model = CASES[name][0]().eval()
    made = quantised(model, images)
    logits, int8_convolutions = in_engine(model, made, images, tmp_path)
    with torch.no_grad():
        expected = made.graph(images).numpy()
    assert int8_convolutions == len(made.layers) >= 2
    differing = np.abs(logits - expected) > 2e-6 * np.ptp(expected)
    assert differing.mean() <= 1e-3


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[1] is not None])
def test_int8_follows_from_the_scales(name):
    """An operator runs in int8 exactly when all its tensors carry scales and it has a kernel."""
    made = QuantizedModel(CASES[name][0]().eval(), ("tail",))
    ran = {node.name for node in made.plan.int8} - {"a", "b", "c", "d"}
    assert ran == CASES[name][1]


def test_a_tensor_has_one_quantiser_for_all_its_readers():
    """The residual path reads the values the next convolution reads, rounded once."""
    made = QuantizedModel(torchvision.models.mobilenet_v2(num_classes=4).eval(), ("first", "last"))
    readers = {}
    for node in made.graph.graph.nodes:
        if node.op == "call_module" and node.target.startswith("quantizers."):
            readers.setdefault(node.args[0].name, []).append(node)
    assert all(len(found) == 1 for found in readers.values())
    shared = [found[0] for found in readers.values() if len(found[0].users) > 1]
    assert len(shared) == 10  # MobileNetV2's residual additions


def test_a_signed_max_pool_keeps_out_of_int8():
    """Int8 max pooling of negative values is wrong on x86: the layers around it stay float."""
    model = Net(lambda m, a, b: m.p(a) + m.p(b), p=nn.MaxPool2d(2)).eval()
    with pytest.raises(UserError, match="no layer is left"):
        QuantizedModel(nn.Sequential(model.a, nn.MaxPool2d(2), nn.Hardswish()).eval())
    made = QuantizedModel(model)
    assert set(made.plan.left_float) == {"a", "b"}
    assert all("max pool" in reason for reason in made.plan.left_float.values())
    assert not {"p", "p_1"} & {node.name for node in made.plan.int8}


def test_an_operator_without_a_known_rule_keeps_its_neighbours_float():
    """Nothing is guessed: a layer whose tensor meets an unknown operator stays float and says which one."""
    made = QuantizedModel(Net(lambda _, a, b: F.interpolate(a, scale_factor=1.0) + b).eval())
    assert "interpolate" in made.plan.left_float["a"]
    assert "b" in made.layers


def test_layers_are_skipped_by_place_and_by_pattern():
    """first, last and shell patterns name layers; each says by which rule it stays float."""
    model = torchvision.models.mobilenet_v3_small(num_classes=4).eval()
    made = QuantizedModel(model, ("first", "last", "features.4.block.2.*"))
    assert made.plan.left_float["features.0.0"] == "skipped by rule 'first'"
    assert {"features.4.block.2.fc1", "features.4.block.2.fc2"} <= set(made.plan.left_float)
    assert len(made.layers) == 49
    assert made.plan.weight_only_safe


def test_a_pattern_for_nothing_is_an_error():
    """A misspelt layer is not silently quantised."""
    with pytest.raises(UserError, match=r"features\.99"):
        QuantizedModel(torchvision.models.mobilenet_v3_small(num_classes=4).eval(), ("features.99.*",))


def test_a_model_without_int8_layers_is_an_error():
    """int8 that leaves everything float is refused, with the count of reasons."""
    with pytest.raises(UserError, match="no int8 linear layer"):
        QuantizedModel(nn.Sequential(nn.Flatten(), nn.Linear(12, 4)).eval())


@pytest.mark.parametrize("middle", [depthwise(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1, groups=2)])
def test_int8_weights_are_not_asked_for_between_int8_tensors(middle):
    """A float convolution between two tensors with scales keeps float weights.

    With int8 weights the engine would run it in int8, and a depthwise one wrongly.
    """
    made = QuantizedModel(Net(lambda m, a, b: m.d(a), d=middle).eval(), ("d",))
    assert not made.plan.weight_only_safe


def test_a_layer_used_twice_stays_float():
    """One weight with two inputs cannot have one input scale."""
    made = QuantizedModel(Net(lambda m, a, b: m.d(F.hardswish(a)) + m.d(b), d=nn.Conv2d(8, 8, 1)).eval())
    assert made.plan.left_float["d"] == "it is used more than once"


@pytest.mark.parametrize("observer", ["max_abs", "percentile", "mse"])
def test_observers_set_steps_from_the_data(observer, images):
    """max_abs covers everything; percentile and mse may clip outliers, never below a plausible range."""
    torch.manual_seed(0)
    model = Net(lambda _, a, b: F.hardswish(a) + b).eval()
    outlier = images.clone()
    outlier[0, 0, 0, 0] = 100.0
    made = QuantizedModel(model)
    calibrate(made.graph, lambda: iter([outlier]), observer)
    covered = 127 * made.graph.quantizers.x.step.item()
    assert covered == pytest.approx(100.0, rel=1e-5) if observer == "max_abs" else 3.0 < covered < 100.1
    widest = 127 * made.graph.quantizers.a.step.item()
    assert 0 < widest <= model.a(outlier).abs().max().item() * 1.001


def test_calibration_needs_images_and_a_known_observer(images):
    """No images and an unknown observer are the user's errors."""
    made = QuantizedModel(Net(lambda _, a, b: a + b).eval())
    with pytest.raises(UserError, match="no calibration images"):
        calibrate(made.graph, lambda: iter([]), "max_abs")
    with pytest.raises(UserError, match="observer"):
        calibrate(made.graph, lambda: iter([images]), "median")


def test_a_copy_is_a_model_of_its_own(images):
    """A deep copy (weight averaging makes one) reads its own quantisers, not the original's."""
    made = quantised(Net(lambda _, a, b: a + b), images)
    twin = copy.deepcopy(made.graph)
    made.graph.quantizers.x.set_step(1.0)
    assert twin.a.input_quantizer is twin.quantizers.x
    assert twin.quantizers.x.step.item() < 0.1
