"""What inputs are tried, and what of a graph no input can show."""

import numpy as np
import pytest
from onnx import TensorProto
from onnx_graphs import graph, node

from tasks.mnn.onnx_draws import (
    BYTES,
    FROM_END,
    PIXELS,
    SPARSE,
    ZEROS,
    extra_kinds,
    pictures,
    seeded_feeds,
)
from tasks.mnn.onnx_inputs import first_shapes, graph_inputs
from tasks.mnn.onnx_limits import index_inputs, limits
from tasks.mnn.onnx_read import with_shapes

INT32, INT64, DOUBLE = TensorProto.INT32, TensorProto.INT64, TensorProto.DOUBLE


def _kinds(model):
    inputs = graph_inputs(model)
    return set(extra_kinds(model, inputs, first_shapes(inputs, model)[0]))


def _relu(*shape):
    return graph([node("Relu", "x", "y")], [("x", shape)], [("y", None)])


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ([1, 3, 32, 32], True),
        ([1, 32, 32, 3], True),
        ([1, 1, 28, 28], True),
        (["n", 3, "h", "w"], True),
        ([1, 64, 32, 32], False),
        ([1, 3, 32], False),
        ([1, 3, 2, 2], False),
        ([16], False),
    ],
)
def test_raw_pixels_are_tried_where_an_input_may_be_a_picture(shape, shown):
    """Four axes and 1, 3 or 4 channels on either side."""
    assert (PIXELS in _kinds(_relu(*shape))) is shown


def test_a_mask_beside_a_picture_gets_no_pixels():
    """One channel is a picture only where it is the only float input."""
    model = graph([node("Add", "x m", "y")], [("x", [1, 3, 8, 8]), ("m", [1, 1, 8, 8])], [("y", None)])
    inputs = graph_inputs(model)
    shapes = first_shapes(inputs, model)[0]
    assert pictures(inputs, shapes) == {"x"}
    feeds = seeded_feeds(inputs, shapes, PIXELS, 0)
    assert set(np.unique(feeds["x"])) <= set(range(256))
    assert feeds["x"].max() > 200
    assert np.abs(feeds["m"]).max() < 80


def test_zeros_are_tried_but_not_where_only_their_order_could_differ():
    """All of an input and half of it; a ranking of equal values may come in any order."""
    assert {ZEROS, SPARSE} <= _kinds(_relu(4))
    ranked = graph(
        [node("TopK", "x k", "v i")],
        [("x", [1, 9])],
        [("v", None), ("i", None, INT64)],
        {"k": np.array([2])},
    )
    assert _kinds(ranked) == {SPARSE}
    inputs = graph_inputs(_relu(4, 50))
    drawn = {kind: seeded_feeds(inputs, {"x": (4, 50)}, kind, 0)["x"] for kind in (ZEROS, SPARSE)}
    assert not drawn[ZEROS].any()
    assert 0.3 < (drawn[SPARSE] == 0).mean() < 0.7


def test_graphs_that_narrow_to_bytes_get_bytes():
    """0 to 255 everywhere, whatever the shape."""
    narrow = [node("Cast", "x", "u", to=TensorProto.UINT8), node("Cast", "u", "y", to=TensorProto.FLOAT)]
    assert BYTES in _kinds(graph(narrow, [("x", [5])], [("y", [5])]))


INDEXED = {
    "GatherElements": ([node("GatherElements", "d i", "y")], [3, 4]),
    "through a cast and a shape": (
        [
            node("Cast", "i", "j", to=TensorProto.INT32),
            node("Unsqueeze", "j a", "k"),
            node("GatherElements", "d k", "y"),
        ],
        [4],
    ),
    "OneHot": ([node("OneHot", "i n v", "y")], [4]),
}


@pytest.mark.parametrize("kind", INDEXED)
def test_indices_that_may_count_from_the_end_do(kind):
    """-1 and 0 are valid for every axis; other integer inputs stay as they are."""
    nodes, shape = INDEXED[kind]
    constants = {"a": np.array([0]), "n": np.array(5), "v": np.float32([0, 1])}
    model = graph(
        [*nodes, node("Abs", "q", "z")],
        [("d", [3, 4]), ("i", shape, INT64), ("q", [50], INT64)],
        [("y", None), ("z", None, INT64)],
        constants,
    )
    assert index_inputs(model) == {"i"}
    assert FROM_END in _kinds(model)
    inputs = graph_inputs(model)
    shapes = {"d": (3, 4), "i": tuple(shape), "q": (50,)}
    feeds = seeded_feeds(inputs, shapes, FROM_END, 0, indices=index_inputs(model))
    assert set(np.unique(feeds["i"])) == {-1, 0}
    assert feeds["q"].min() >= 0


def test_token_ids_and_data_are_no_counting_indices():
    """The engine's Gather counts from the end as ONNX does, and data operands hold no indices."""
    gather = graph([node("Gather", "t i", "y")], [("t", [9, 2]), ("i", [3], INT64)], [("y", None)])
    data = graph(
        [node("GatherElements", "d c", "y")],
        [("d", [3, 4], INT64)],
        [("y", None, INT64)],
        {"c": np.zeros((3, 4), int)},
    )
    assert not index_inputs(gather)
    assert not index_inputs(data)


@pytest.mark.parametrize(("size", "said"), [("w", 1), (101, 0)])
def test_a_pool_that_rounds_a_dynamic_size_up_is_said(size, said):
    """Its last window may lie in the padding; no word where the size is fixed."""
    pool = node("MaxPool", "x", "y", ceil_mode=1, kernel_shape=[5, 5], strides=[4, 4], pads=[2] * 4)
    found = limits(graph([pool], [("x", ["n", 3, 30, size])], [("y", None)]))
    assert [text.split(" on ")[0] for text in found] == ["pools with ceil_mode"] * said


@pytest.mark.parametrize(
    ("start", "end", "axis", "said"),
    [(-3, 2**62, 3, 1), (0, 8, 3, 1), (2, 2**62, -1, 1), (0, 2**62, 3, 0), (1, 2, 1, 0)],
)
def test_a_slice_inside_a_dynamic_axis_is_said(start, end, axis, said):
    """The axis may be shorter; no word for a whole axis, as with a step, or one of fixed size."""
    bounds = {"s": np.array([start]), "e": np.array([end]), "a": np.array([axis])}
    cut = node("Slice", "x s e a", "y")
    found = limits(graph([cut], [("x", ["n", 3, 30, "w"])], [("y", None)], bounds))
    assert [text.split(" of ")[0] for text in found] == ["slices"] * said


def test_number_formats_that_the_engine_does_not_have_are_said():
    """float64 and int64 arithmetic; int64 that only picks rows is exact, and float32 needs no word."""
    double = graph([node("Tanh", "x", "y")], [("x", [4], DOUBLE)], [("y", [4], DOUBLE)])
    assert limits(double) == ["float64 inputs are computed in float32: x"]
    ids = [("i", [4], INT64)]
    added = graph([node("Mul", "i c", "y")], ids, [("y", [4], INT64)], {"c": np.array(3)})
    assert "'i' goes into Mul" in limits(added)[0]
    assert "2^24" in limits(added)[0]
    clipped = graph([node("Clip", "i", "y")], [("i", [4], INT32)], [("y", [4], INT32)])
    assert "'i' goes into Clip" in limits(clipped)[0]
    table = {"t": np.ones((9, 2), np.float32)}
    assert limits(graph([node("Gather", "t i", "y")], ids, [("y", [4, 2])], table)) == []
    assert limits(_relu(4)) == []


@pytest.mark.parametrize(
    ("axis", "opset", "said"),
    [(1, 17, True), (3, 17, False), (-1, 17, False), (-2, 17, True), (1, 11, False)],
)
def test_a_softmax_that_overflows_is_said(axis, opset, said):
    """Over the last axis the engine subtracts the maximum first; before operator set 13 all axes are one."""
    model = graph(
        [node("Softmax", "x", "y", axis=axis)], [("x", [1, 3, 8, 8])], [("y", [1, 3, 8, 8])], opset=opset
    )
    assert any("-80 to 80" in text for text in limits(with_shapes(model))) is said
