"""Weights in half precision are the nearest float16, whatever the converter does with the lower bits."""

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from onnx_graphs import graph, node, save, weights

from fleet.device.engine import Session
from tasks.mnn.converter import convert
from tasks.mnn.half import rounded_to_half
from tasks.mnn.request import ConvertOptions
from tasks.mnn.source import Source

LESS, MORE = 1 + 0.4 / 1024, 1 + 0.6 / 1024  # on either side of the middle between two float16
POINTS = ("x", [1, 2, 4, 4])


def _source(model):
    return Source(name="m", model=model, sha256="")


def _conv(values, *behind, **constants):
    """One input channel to as many output channels as there are values."""
    w = np.float32(values).reshape(-1, 1, 1, 1)
    nodes = [node("Conv", "x w", "t", kernel_shape=[1, 1]), *behind]
    return graph(nodes, [("x", [1, 1, 1, 1])], [("y", None)], {"w": w, **constants})


def test_the_engine_computes_with_the_nearest_half(tmp_path):
    """Cut off, both weights would be 1; the same holds of a negative one and of a matrix."""
    model = _conv([LESS, MORE, -MORE, 6e4], node("Flatten", "t", "f"), node("MatMul", "f m", "y"))
    model.graph.initializer.append(
        numpy_helper.from_array(np.eye(4, dtype=np.float32) * np.float32(MORE), "m")
    )
    convert(save(model, tmp_path / "m.onnx"), tmp_path / "m.mnn", ConvertOptions(fp16=True))
    with Session(tmp_path / "m.mnn") as session:
        (got,) = session.run({"x": np.ones((1, 1, 1, 1), np.float32)})["y"]
    step = 1 + 1 / 1024
    np.testing.assert_allclose(got, np.float32([1, step, -step, 6e4]) * step, rtol=1e-6)


def test_a_bias_of_two_axes_is_no_weight(tmp_path):
    """The converter keeps a Gemm's bias in float32 whatever its shape, so nothing is rounded away of it."""
    bias = np.float32([[LESS, MORE, 1e-9]])
    model = graph(
        [node("Gemm", "x w c", "y")], [("x", [1, 4])], [("y", [1, 3])], {"w": weights(4, 3), "c": bias}
    )
    convert(save(model, tmp_path / "m.onnx"), tmp_path / "m.mnn", ConvertOptions(fp16=True))
    with Session(tmp_path / "m.mnn") as session:
        got = session.run({"x": np.zeros((1, 4), np.float32)})["y"]
    np.testing.assert_array_equal(got, bias)


def test_a_folded_batch_norm_is_counted_in(tmp_path):
    """What is stored is the product of weight and scale: 1,000 products are the nearest float16."""
    rng = np.random.default_rng(0)
    count = 1000
    w = rng.standard_normal((count, 1, 1, 1)).astype(np.float32)
    scale, variance = rng.uniform(-3, 3, count), rng.uniform(0.1, 4, count)
    zeros = np.zeros(count, np.float32)
    norm = {"g": np.float32(scale), "v": np.float32(variance), "z": zeros}
    model = _conv(w, node("BatchNormalization", "t g z z v", "y"), **norm)
    convert(save(model, tmp_path / "m.onnx"), tmp_path / "m.mnn", ConvertOptions(fp16=True))
    with Session(tmp_path / "m.mnn") as session:
        got = session.run({"x": np.ones((1, 1, 1, 1), np.float32)})["y"].ravel()
    exact = w.ravel().astype(np.float64) * norm["g"] / np.sqrt(norm["v"].astype(np.float64) + 1e-5)
    assert np.mean(got == exact.astype(np.float16)) > 0.99
    assert np.abs(got / exact - 1).max() < 1.001 / 2048


def test_only_weights_are_rounded():
    """Biases stay in float32 in the model, and a shared weight may be folded in two ways."""
    constants = {
        "w": np.full((2, 2, 1, 1), MORE, np.float32),
        "b": np.full(2, MORE, np.float32),
        "c": np.full((1, 2, 1, 1), MORE, np.float32),
        "s": np.full((2, 2, 1, 1), MORE, np.float32),
    }
    nodes = [
        node("Conv", "x w b", "t"),
        node("Add", "t c", "u"),
        node("Conv", "u s", "v"),
        node("Conv", "v s", "y"),
    ]
    rounded = rounded_to_half(_source(graph(nodes, [POINTS], [("y", None)], constants)))
    values = {t.name: float(numpy_helper.to_array(t).flat[0]) for t in rounded.graph.initializer}
    assert values == {"w": 1 + 1 / 1024, "b": np.float32(MORE), "c": np.float32(MORE), "s": np.float32(MORE)}


@pytest.mark.parametrize(
    ("value", "kept"),
    [(0.0, 0.0), (1e-9, 0.0), (65504.0, 65504.0), (65519.0, 65504.0), (65520.0, 65520.0), (1e5, 1e5)],
)
def test_the_ends_of_float16_are_kept(value, kept):
    """Nothing becomes infinite: what float16 cannot hold, from 65520 on, stays as it is."""
    constant = helper.make_node(
        "Constant", [], ["w"], value=numpy_helper.from_array(np.full((1, 1), value, np.float32))
    )
    model = graph([constant, node("MatMul", "x w", "y")], [("x", [1, 1])], [("y", [1, 1])])
    (made, _) = rounded_to_half(_source(model)).graph.node
    assert onnx.numpy_helper.to_array(made.attribute[0].t).tolist() == [[kept]]


def test_weights_of_other_widths_are_left_alone():
    """float64 and float16 weights pass through."""
    model = graph(
        [node("MatMul", "x w", "y")],
        [("x", [1, 4], 11)],
        [("y", [1, 4], 11)],
        {"w": weights(4, 4).astype(np.float64)},
    )
    assert rounded_to_half(_source(model)) == model
