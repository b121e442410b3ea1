"""Parity over inputs, sessions and shapes, and the reference it is measured against."""

import os

import numpy as np
import pytest
from onnx import TensorProto
from onnx_graphs import graph, node, save, weights

from fleet.device.errors import EngineError, UserError
from tasks.mnn.converter import convert
from tasks.mnn.onnx_axes import UnprovenError
from tasks.mnn.onnx_culprit import diverging_node
from tasks.mnn.onnx_draws import DISTRIBUTIONS, seeded_feeds
from tasks.mnn.onnx_inputs import (
    explicit_shapes,
    first_shapes,
    graph_inputs,
    other_shapes,
    parse_shapes,
)
from tasks.mnn.onnx_parity import DifferenceError, Tolerance, check_parity, tolerance_for
from tasks.mnn.onnx_plan import Inputs, plan_parity
from tasks.mnn.onnx_read import with_shapes
from tasks.mnn.onnx_runs import Planned, run_plan
from tasks.mnn.request import ConvertOptions

EXACT = Tolerance(max_rel_error=1e-4)
CHOSEN = Inputs(shapes={}, runs=3, seed=0)


def _dynamic(second: str = "Relu"):
    """Convolution and an activation over a dynamic batch and dynamic sides."""
    nodes = [node("Conv", "x w", "t", pads=[1, 1, 1, 1]), node(second, "t", "y")]
    return graph(nodes, [("x", ["n", 3, "h", "w"])], [("y", ["n", 4, "h", "w"])], {"w": weights(4, 3, 3, 3)})


@pytest.fixture(scope="module")
def dynamic(tmp_path_factory):
    """A dynamic graph, its conversion, and what it must reproduce."""
    folder = tmp_path_factory.mktemp("dynamic")
    model = _dynamic()
    path = save(model, folder / "m.onnx")
    convert(path, folder / "m.mnn")
    return model, path, folder / "m.mnn", plan_parity(path, model, CHOSEN, timeout_s=60)


def test_a_dynamic_graph_is_proven_at_two_shapes_that_differ_in_every_dynamic_axis(dynamic):
    """Batch and both sides change between the shapes, and every run is counted."""
    _, _, mnn, plan = dynamic
    first, second = (shapes["x"] for shapes in plan.shapes)
    assert [a != b for a, b in zip(first, second, strict=True)] == [True, False, True, True]
    assert second[2] != second[3]
    parity = check_parity(mnn, plan, EXACT, timeout_s=60)
    assert parity.max_rel_error < 1e-5
    assert parity.runs == 2 * (2 * (1 + len(plan.samples[0]) + 3) + 4)


def test_a_model_that_computes_something_else_is_told_from_the_right_one(dynamic, tmp_path):
    """The plan of one graph refutes the conversion of another, and the layer that differs is named."""
    _, path, _, plan = dynamic
    convert(save(_dynamic("Tanh"), tmp_path / "other.onnx"), tmp_path / "other.mnn")
    with pytest.raises(DifferenceError, match="differs from ONNX Runtime") as caught:
        check_parity(tmp_path / "other.mnn", plan, EXACT, timeout_s=60)
    culprit = diverging_node(path, tmp_path / "other.mnn", caught.value.feeds, 1e-4, timeout_s=60)
    assert culprit is not None
    assert culprit.op.endswith("Relu")


def test_a_crash_or_a_hang_of_a_child_is_an_error_of_its_runs(dynamic, tmp_path):
    """A file that is no model, and a limit that has passed, come back as errors, not as results."""
    _, _, mnn, plan = dynamic
    feeds = plan.samples[0][0].feeds
    (tmp_path / "bad.mnn").write_bytes(os.urandom(2000))
    (bad,) = run_plan("engine", tmp_path / "bad.mnn", [Planned(feeds)], timeout_s=60)
    assert bad.outputs is None
    assert bad.error
    (late,) = run_plan("engine", mnn, [Planned(feeds)], timeout_s=0.01)
    assert late.outputs is None
    assert "past its limit" in late.error


def test_an_input_that_the_engine_cannot_hold_is_an_error_of_its_run(tmp_path):
    """int64 narrows to int32 where its values fit; beyond, the run fails instead of wrapping around."""
    model = graph([node("Abs", "x", "y")], [("x", [3], TensorProto.INT64)], [("y", [3], TensorProto.INT64)])
    convert(save(model, tmp_path / "m.onnx"), tmp_path / "m.mnn")
    runs = [Planned({"x": np.array([-7, 5, most])}) for most in (1000, 2**31)]
    held, wide = run_plan("engine", tmp_path / "m.mnn", runs, timeout_s=60)
    assert held.outputs is not None
    assert held.outputs["y"].tolist() == [7, 5, 1000]
    assert wide.outputs is None
    assert "int64" in wide.error


def test_a_reference_that_disagrees_with_itself_is_none(tmp_path):
    """Random numbers give another answer each time, so nothing can be proven."""
    model = graph([node("RandomNormalLike", "x", "r"), node("Add", "x r", "y")], [("x", [4])], [("y", [4])])
    with pytest.raises(UnprovenError, match="random or ambiguous"):
        plan_parity(save(model, tmp_path / "m.onnx"), model, CHOSEN, timeout_s=60)


BAKED = {
    "a reshape to the exported batch": (
        [node("Reshape", "x s", "t"), node("MatMul", "t w", "y")],
        [("x", ["n", 4])],
        [("y", ["n", 2])],
        {"s": np.array([1, 4]), "w": weights(4, 2)},
        "runs only at",
    ),
    "an output that keeps the exported size": (
        [node("Resize", "x _ _ z", "y", mode="nearest")],
        [("x", [1, 3, "h", "w"])],
        [("y", [1, 3, "big_h", "big_w"])],
        {"z": np.array([1, 3, 20, 20])},
        "'big_h'",
    ),
    "a batch that disappears": (
        [node("ReduceSum", "x a", "y", keepdims=1)],
        [("x", ["n", 4])],
        [("y", ["n", 4])],
        {"a": np.array([0])},
        "like an input",
    ),
}


@pytest.mark.parametrize("kind", BAKED)
def test_dynamic_axes_that_do_not_move_are_refused(kind, tmp_path):
    """A size baked in at export shows at the second shape, whether the graph fails or answers."""
    nodes, inputs, outputs, constants, why = BAKED[kind]
    model = graph(nodes, inputs, outputs, constants)
    with pytest.raises(UnprovenError, match=why):
        plan_parity(save(model, tmp_path / "m.onnx"), model, CHOSEN, timeout_s=60)


def test_names_that_an_exporter_made_up_promise_nothing(tmp_path):
    """A fixed output axis with a generated name is accepted."""
    model = graph(
        [node("GlobalAveragePool", "x", "y")],
        [("x", [1, 3, "h", "w"])],
        [("y", [1, 3, "GlobalAveragePooly_dim_2", 1])],
    )
    plan = plan_parity(save(model, tmp_path / "m.onnx"), model, CHOSEN, timeout_s=60)
    assert len(plan.shapes) == 2


def test_explicit_shapes_must_fit_the_graph():
    """Unknown names, wrong ranks, contradictions and missing inputs are user errors that show what fits."""
    inputs = graph_inputs(_dynamic())
    assert explicit_shapes(inputs, {"x": [(1, 3, 8, 8), (2, 3, 9, 7)]})[1] == {"x": (2, 3, 9, 7)}
    for asked in ({"q": [(1, 3, 8, 8)]}, {"x": [(1, 3, 8)]}, {"x": [(1, 4, 8, 8)]}, {"x": [(0, 3, 8, 8)]}):
        with pytest.raises(UserError, match="x=n,3,h,w"):
            explicit_shapes(inputs, asked)


@pytest.mark.parametrize("text", ["x", "x=", "=1,3", "x=1,,3", "x=1,-3", "x=1x3", "x=9999999"])
def test_shapes_are_written_as_name_and_extents(text):
    """Anything but NAME=N,N is a user error; names may hold any character, `=` included."""
    with pytest.raises(UserError, match="--shape"):
        parse_shapes([text])
    assert parse_shapes(["a=b:0=1,3", "a=b:0=2,3"]) == {"a=b:0": [(1, 3), (2, 3)]}


def test_shapes_are_chosen_by_what_an_axis_is():
    """Static inputs have one shape; equal symbols get equal sizes; a dynamic channel follows the weights."""
    static = graph([node("Relu", "x", "y")], [("x", [2, 5])], [("y", [2, 5])])
    assert first_shapes(graph_inputs(static), static) == [{"x": (2, 5)}]
    pair = graph([node("Add", "x z", "y")], [("x", ["n", "t"]), ("z", ["n", "t"])], [("y", ["n", "t"])])
    inputs = graph_inputs(pair)
    first = first_shapes(inputs, pair)[0]
    assert first["x"] == first["z"]
    assert all(
        s["x"] == s["z"] and s["x"][0] == 3 and s["x"][1] != first["x"][1]
        for s in other_shapes(inputs, first)
    )
    conv = {"w": weights(4, 6, 3, 3)}
    open_model = graph([node("Conv", "x w", "y")], [("x", ["a", "b", "c", "d"])], [("y", None)], conv)
    assert first_shapes(graph_inputs(open_model), open_model)[0]["x"][:2] == (1, 6)


def test_inputs_are_reproducible_and_of_the_declared_kind():
    """Same seed, same values; ties hold equal values, halves only on request; indices stay small."""
    inputs = graph_inputs(
        graph(
            [node("Relu", "x", "y")],
            [("x", [4, 50]), ("i", [50], TensorProto.INT64), ("b", [50], TensorProto.BOOL)],
            [("y", None)],
        )
    )
    shapes = {"x": (4, 50), "i": (50,), "b": (50,)}
    for kind in DISTRIBUTIONS:
        one, same, other = (seeded_feeds(inputs, shapes, kind, seed) for seed in (0, 0, 1))
        assert np.array_equal(one["x"], same["x"])
        assert not np.array_equal(one["x"], other["x"])
        assert [one[k].dtype.name for k in "xib"] == ["float32", "int64", "bool"]
        assert 0 <= one["i"].min() <= one["i"].max() < 8
        assert np.abs(one["x"]).max() < 80
    ties = seeded_feeds(inputs, shapes, "ties", 0)["x"]
    assert len(np.unique(ties)) <= 11
    halves = seeded_feeds(inputs, shapes, "ties", 0, halves=True)["x"]
    assert (halves % 1 == 0.5).any()
    assert not (ties % 1 == 0.5).any()


def test_tolerance_follows_what_the_engine_can_do():
    """Strict by default, wider for the functions and precisions that the engine is known to round."""
    plain = tolerance_for(_dynamic(), ConvertOptions()).max_rel_error
    assert plain == 1e-4
    assert tolerance_for(_dynamic("Erf"), ConvertOptions()).max_rel_error == 2e-3
    assert plain < tolerance_for(_dynamic(), ConvertOptions(fp16=True)).max_rel_error < 1e-2
    w8 = tolerance_for(_dynamic(), ConvertOptions(weight_bits=8))
    assert w8.max_rel_error < 0.05
    assert w8.min_cosine > 0.9


@pytest.mark.parametrize(
    ("kernel", "more", "expected"),
    [
        ((5, 5), {}, 6e-4),
        ((4, 4), {}, 6e-4),
        ((3, 3), {}, 1e-4),
        ((9, 9), {}, 1e-4),
        ((1, 5), {}, 1e-4),
        ((5, 5), {"strides": [2, 2]}, 1e-4),
        ((5, 5), {"dilations": [2, 2]}, 1e-4),
        ((5, 5), {"group": 3}, 1e-4),
    ],
)
def test_only_wide_convolutions_that_are_computed_roughly_get_room(kernel, more, expected):
    """Square kernels of 4 to 7, dense, at stride 1; layers add up in quadrature, so another costs little."""
    conv = node("Conv", "x w", "y", kernel_shape=list(kernel), **more)
    small = node("Conv", "y v", "z", kernel_shape=[1, 1])
    weights_ = {"w": weights(3, 3 // more.get("group", 1), *kernel), "v": weights(3, 3, 1, 1)}
    alone = graph([conv], [("x", [1, 3, 32, 32])], [("y", None)], {"w": weights_["w"]})
    both = graph([conv, small], [("x", [1, 3, 32, 32])], [("z", None)], weights_)
    assert tolerance_for(alone, ConvertOptions()).max_rel_error == pytest.approx(expected)
    assert tolerance_for(both, ConvertOptions()).max_rel_error == pytest.approx(expected, rel=0.01)


def test_a_batch_norm_of_unknown_rank_gets_no_wider_tolerance():
    """Only one that is known to work on other than four axes does."""
    nodes = [node("Reshape", "x s", "t"), node("BatchNormalization", "t o o o o", "y")]
    ones = {"o": np.ones(3, np.float32)}
    model = graph(nodes, [("x", ["n"]), ("s", ["r"], TensorProto.INT64)], [("y", None)], ones)
    assert tolerance_for(with_shapes(model), ConvertOptions()).max_rel_error == 1e-4
    flat = graph([node("BatchNormalization", "x o o o o", "y")], [("x", [2, 3])], [("y", None)], ones)
    assert tolerance_for(with_shapes(flat), ConvertOptions()).max_rel_error == 1e-3


def test_nothing_is_proven_where_the_reference_has_no_numbers(tmp_path):
    """A graph that only ever gives NaN is refused although nothing differs."""
    nodes = [node("Abs", "x", "a"), node("Neg", "a", "b"), node("Sub", "b c", "d"), node("Sqrt", "d", "y")]
    model = graph(nodes, [("x", [4])], [("y", [4])], {"c": np.float32(1)})
    path = save(model, tmp_path / "m.onnx")
    convert(path, tmp_path / "m.mnn")
    plan = plan_parity(path, model, CHOSEN, timeout_s=60)
    with pytest.raises(EngineError, match="nothing was proven"):
        check_parity(tmp_path / "m.mnn", plan, EXACT, timeout_s=60)
