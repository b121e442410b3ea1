"""Rules that see from the graph alone what the converter gets wrong."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_graphs import graph, node, weights

from tasks.mnn.onnx_lint import lint
from tasks.mnn.onnx_read import with_shapes

IMAGE = ("x", [1, 3, 8, 8])
OPEN = ("y", None)
SCALES = {name: np.ones(3, np.float32) for name in "sbmv"}
INDICES = np.array([[0, 2], [1, 0]])


def _findings(nodes, inputs, constants=None, opset=17, outputs=(OPEN,)):
    return lint(with_shapes(graph(nodes, inputs, outputs, constants, opset=opset)))


CERTAIN = {
    "batch norm in training mode": (
        [node("BatchNormalization", "x s b m v", "y m2 v2", training_mode=1)],
        [IMAGE],
        SCALES,
        17,
        "eval()",
    ),
    "dropout in training mode": (
        [node("Dropout", "x r t", "y")],
        [IMAGE],
        {"r": np.float32(0.5), "t": np.array(True)},
        17,
        "eval()",
    ),
    "dilated max pooling": (
        [node("MaxPool", "x", "y", kernel_shape=[2, 2], dilations=[1, 3])],
        [IMAGE],
        {},
        17,
        "dilations=[1, 3]",
    ),
    "dilated average pooling": (
        [node("AveragePool", "x", "y", kernel_shape=[2, 2], dilations=[2, 2])],
        [IMAGE],
        {},
        19,
        "dilations",
    ),
    "scatter with a reduction": (
        [node("ScatterND", "x i u", "y", reduction="mul")],
        [("x", [4, 5])],
        {"i": np.array([[0], [2]]), "u": weights(2, 5)},
        18,
        "reduction=mul",
    ),
    "gather with negative indices": (
        [node("GatherElements", "x i", "y", axis=1)],
        [("x", [2, 5])],
        {"i": INDICES - 1},
        17,
        "negative",
    ),
    "the last of equal maxima": (
        [node("ArgMax", "x", "y", axis=1, select_last_index=1)],
        [IMAGE],
        {},
        17,
        "select_last_index",
    ),
    "a quantised graph": (
        [node("QuantizeLinear", "x s z", "q"), node("DequantizeLinear", "q s z", "y")],
        [IMAGE],
        {"s": np.float32(0.1), "z": np.int8(0)},
        17,
        "--int8",
    ),
    "random numbers": (
        [node("RandomNormalLike", "x", "r"), node("Add", "x r", "y")],
        [IMAGE],
        {},
        17,
        "random",
    ),
}


@pytest.mark.parametrize("kind", CERTAIN)
def test_what_never_comes_out_right_is_certain_and_says_why(kind):
    """Each rule fires on its operator and names what is wrong with it."""
    nodes, inputs, constants, opset, why = CERTAIN[kind]
    certain = [finding for finding in _findings(nodes, inputs, constants, opset) if finding.certain]
    assert [finding.op for finding in certain] == [nodes[0].op_type]
    assert why in str(certain[0])
    assert nodes[0].name in str(certain[0])


HARMLESS = {
    "batch norm for inference": ([node("BatchNormalization", "x s b m v", "y")], [IMAGE], SCALES, 17),
    "dropout for inference": ([node("Dropout", "x", "y")], [IMAGE], {}, 17),
    "max pooling": ([node("MaxPool", "x", "y", kernel_shape=[2, 2], dilations=[1, 1])], [IMAGE], {}, 17),
    "max pooling with unread indices": ([node("MaxPool", "x", "y i", kernel_shape=[2, 2])], [IMAGE], {}, 17),
    "scatter": (
        [node("ScatterElements", "x i u", "y", axis=1, reduction="none")],
        [("x", [2, 5])],
        {"i": INDICES, "u": weights(2, 2)},
        18,
    ),
    "convolution": (
        [node("Conv", "x w", "y", auto_pad="SAME_UPPER")],
        [IMAGE],
        {"w": weights(4, 3, 3, 3)},
        17,
    ),
    "softmax over the last axis": ([node("Softmax", "x", "y", axis=3)], [IMAGE], {}, 11),
    "resize": (
        [node("Resize", "x _ s", "y", mode="linear", antialias=0)],
        [IMAGE],
        {"s": np.array([1, 1, 2, 2], np.float32)},
        18,
    ),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_the_same_operators_without_the_fault_are_not_certain(kind):
    """A rule looks at attributes and constants, never at the operator's name alone."""
    assert not [finding for finding in _findings(*HARMLESS[kind]) if finding.certain]


def test_what_depends_on_sizes_is_a_suspect_that_parity_decides():
    """Padding below and antialiasing go wrong only at some sizes: they are named, but not refused unseen."""
    conv = [node("Conv", "x w", "y", auto_pad="SAME_LOWER", strides=[2, 2])]
    resize = [node("Resize", "x _ _ z", "y", mode="linear", antialias=1)]
    (first,) = _findings(conv, [IMAGE], {"w": weights(4, 3, 3, 3)})
    (second, *_) = _findings(resize, [IMAGE], {"z": np.array([1, 3, 4, 4])}, 18)
    assert [(f.certain, "SAME_LOWER" in f.why or "antialias" in f.why) for f in (first, second)] == [
        (False, True),
        (False, True),
    ]


def test_the_domain_decides_not_the_name():
    """An operator of another domain is refused even when ONNX has one of that name."""
    model = graph([node("HardSwish", "x", "y", domain="my.ops")], [IMAGE], [OPEN])
    model.opset_import.append(helper.make_opsetid("my.ops", 1))
    (finding,) = lint(model)
    assert finding.certain
    assert finding.op == "my.ops::HardSwish"


def test_subgraphs_are_examined_too():
    """A fault inside a branch of an If is found."""
    branch = helper.make_graph(
        [node("MaxPool", "x", "t", kernel_shape=[2, 2], dilations=[2, 2])],
        "branch",
        [],
        [helper.make_tensor_value_info("t", TensorProto.FLOAT, None)],
    )
    choose = node("If", "c", "y", then_branch=branch, else_branch=branch)
    found = _findings([choose], [IMAGE, ("c", [], TensorProto.BOOL)])
    assert [(f.op, f.certain) for f in found] == [("If", False), ("MaxPool", True), ("MaxPool", True)]


def test_names_play_no_part():
    """Renaming tensors and nodes changes no finding but the name in it."""
    model = graph([node("MaxPool", "x", "y", kernel_shape=[2, 2], dilations=[2, 2])], [IMAGE], [OPEN])
    renamed = onnx.ModelProto()
    renamed.CopyFrom(model)
    renamed.graph.node[0].name = "another"
    before, after = lint(model)[0], lint(renamed)[0]
    assert (before.op, before.why) == (after.op, after.why)
    assert after.node == "another"
