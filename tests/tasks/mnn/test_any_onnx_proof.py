"""What a conversion has to survive before it is believed: kinds of input that once passed unseen."""

import numpy as np
import pytest
from onnx import TensorProto
from onnx_graphs import graph, node, save, weights
from PIL import Image

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.mnn.any_onnx import convert_any
from tasks.mnn.request import ConvertOptions

INT64, DOUBLE = TensorProto.INT64, TensorProto.DOUBLE
IMAGE = [1, 3, 16, 16]
RAW = Preprocess(size_px=16, mean=(0, 0, 0), std=(1 / 255,) * 3)


def _convert(model, folder, **options):
    return convert_any(save(model, folder / "m.onnx"), folder / "m.mnn", **options)


def _photos(folder, count, *, contrast=lambda _: 1.0):
    """Smooth pictures that all differ."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for index in range(count):
        coarse = rng.uniform(-100, 100, (4, 4, 3)) * contrast(index) + 128
        small = Image.fromarray(np.clip(coarse, 0, 255).astype(np.uint8))
        small.resize((24, 24), Image.Resampling.BICUBIC).save(folder / f"{index:03}.png")
    return folder


def _one(op, **attributes):
    return graph([node(op, "x", "y", **attributes)], [("x", IMAGE)], [("y", None)])


OVERFLOWING = {
    "Exp": _one("Exp"),
    "Softplus": _one("Softplus"),
    "ReduceLogSumExp": _one("ReduceLogSumExp", axes=[1], keepdims=1),
    "Softmax": _one("Softmax", axis=1),
}


@pytest.mark.parametrize("op", OVERFLOWING)
def test_an_exponential_that_overflows_on_raw_pixels_is_found(op, tmp_path):
    """Beyond about 88 the engine differs; the reason says that only raw pixels show it, and what to give."""
    result = _convert(OVERFLOWING[op], tmp_path)
    assert not result.ok
    assert result.unsupported == [op]
    assert "for raw pixels of 0 to 255" in result.reason
    assert "--calibration FOLDER and --preprocess FILE" in result.reason


def test_real_images_show_what_range_pixels_have(tmp_path):
    """With calibration images, the same model is proven in the range that its preprocessing gives."""
    images = _photos(tmp_path / "i", 12)
    normal = _convert(OVERFLOWING["Softplus"], tmp_path, calibration=images)
    assert normal.ok, normal.reason
    refused = _convert(OVERFLOWING["Softplus"], tmp_path, calibration=images, preprocess=RAW)
    assert not refused.ok
    assert "raw pixels" not in refused.reason


@pytest.mark.parametrize("options", [{"fp16": True}, {"weight_bits": 8}], ids=str)
def test_an_overflow_is_found_in_fewer_bits_too(options, tmp_path):
    """Only float32 tells it from rounding, so it is looked for there."""
    nodes = [node("Conv", "x w", "t", pads=[1, 1, 1, 1]), node("Softplus", "t", "y")]
    model = graph(nodes, [("x", IMAGE)], [("y", None)], {"w": weights(8, 3, 3, 3)})
    result = _convert(model, tmp_path, options=ConvertOptions(**options))
    assert not result.ok
    assert "for raw pixels of 0 to 255" in result.reason
    assert result.unsupported == ["Softplus"]


@pytest.mark.parametrize("options", [{}, {"fp16": True}, {"weight_bits": 8}], ids=str)
def test_raw_pixels_do_not_refuse_what_computes_right(options, tmp_path):
    """A network with a softmax at its end saturates on raw pixels, and still agrees."""
    nodes = [
        node("Conv", "x w", "t", pads=[1, 1, 1, 1]),
        node("HardSwish", "t", "u"),
        node("GlobalAveragePool", "u", "p"),
        node("Flatten", "p", "f"),
        node("Gemm", "f v", "l"),
        node("Softmax", "l", "y"),
    ]
    constants = {"w": weights(16, 3, 3, 3), "v": weights(16, 10)}
    model = graph(nodes, [("x", IMAGE)], [("y", [1, 10])], constants)
    result = _convert(model, tmp_path, options=ConvertOptions(**options))
    assert result.ok, result.reason


@pytest.mark.parametrize("options", [{}, {"fp16": True}, {"weight_bits": 8}], ids=str)
def test_raw_pixels_are_not_blamed_for_what_goes_wrong_everywhere(options, tmp_path):
    """That smaller inputs agree is said only after they did."""
    nodes = [node("Conv", "x w", "t", auto_pad="SAME_LOWER"), node("Softplus", "t", "y")]
    model = graph(nodes, [("x", IMAGE)], [("y", None)], {"w": weights(4, 3, 2, 2)})
    result = _convert(model, tmp_path, options=ConvertOptions(**options))
    assert not result.ok
    assert "raw pixels" not in result.reason
    assert "SAME_LOWER" in result.reason


def test_images_come_in_the_batch_that_is_asked_for(tmp_path):
    """Raw pixels show the overflow; in batches of another size they would be left out."""
    model = graph([node("Softplus", "x", "y")], [("x", ["n", *IMAGE[1:]])], [("y", None)])
    images = _photos(tmp_path / "i", 4)
    shapes = ["x=2,3,16,16", "x=4,3,16,16"]
    result = _convert(model, tmp_path, calibration=images, preprocess=RAW, shapes=shapes)
    assert not result.ok
    assert "at x[2, 3, 16, 16]" in result.reason


def test_too_few_images_for_one_run_are_refused(tmp_path):
    """A fixed batch that cannot be filled leaves random inputs, which are not what was asked for."""
    model = graph([node("Softplus", "x", "y")], [("x", [4, *IMAGE[1:]])], [("y", None)])
    with pytest.raises(UserError, match="3 calibration images") as caught:
        _convert(model, tmp_path, calibration=_photos(tmp_path / "i", 3), preprocess=RAW)
    assert "at least 4" in caught.value.allowed


def test_images_at_which_the_model_does_not_run_are_refused(tmp_path):
    """Sizes that the graph takes but does not declare: those chosen here are right, the images' is wrong."""
    nodes = [node("Reshape", "x s", "y")]
    shape = {"s": np.array([1, 3, 1024, -1])}
    model = graph(nodes, [("x", [1, 3, "h", "w"])], [("y", None)], shape)
    images = _photos(tmp_path / "i", 4)
    with pytest.raises(UserError, match="calibration images as x=1,3,16,16") as caught:
        _convert(model, tmp_path, calibration=images, preprocess=RAW)
    assert "x=1,3,64,64" in caught.value.allowed


def test_a_norm_of_zero_is_tried(tmp_path):
    """ONNX gives zero for zero over its norm, the engine NaN."""
    model = graph([node("LpNormalization", "x", "y", axis=1)], [("x", [2, 8])], [("y", [2, 8])])
    result = _convert(model, tmp_path)
    assert not result.ok
    assert "for inputs that are all zero" in result.reason


ROWS, NAMED = ("d", [3, 4]), {"n": np.array(5), "v": np.float32([0, 1])}
COUNTING = {
    "GatherElements": ("d i", [ROWS, ("i", [3, 4], INT64)]),
    "GatherND": ("d i", [ROWS, ("i", [2, 1], INT64)]),
    "ScatterElements": ("d i u", [ROWS, ("i", [1, 4], INT64), ("u", [1, 4])]),
    "OneHot": ("i n v", [("i", [4], INT64)]),
}


@pytest.mark.parametrize("op", COUNTING)
def test_indices_that_count_from_the_end_are_tried(op, tmp_path):
    """ONNX lets -1 be the last; the engine reads beside the array or writes nothing."""
    reads, inputs = COUNTING[op]
    constants, axis = (NAMED, {"axis": -1}) if op == "OneHot" else ({}, {})
    result = _convert(graph([node(op, reads, "y", **axis)], inputs, [("y", None)], constants), tmp_path)
    assert not result.ok
    assert "for indices of -1" in result.reason
    assert result.unsupported == [op]


def test_an_embedding_is_no_counting_index(tmp_path):
    """Gather counts from the end as ONNX does, and is accepted without a word."""
    model = graph([node("Gather", "t i", "y")], [("i", [5], INT64)], [("y", [5, 6])], {"t": weights(9, 6)})
    result = _convert(model, tmp_path)
    assert (result.ok, result.reason) == (True, "")


@pytest.mark.parametrize(
    ("op", "dtype", "said"),
    [("Tanh", DOUBLE, "computed in float32"), ("Neg", INT64, "values beyond 2^24 are not proven")],
)
def test_a_format_that_the_engine_narrows_is_said_with_the_success(op, dtype, said, tmp_path):
    """Nothing differs where it can be tried, so the result says what was not."""
    model = graph([node(op, "x", "y")], [("x", [6], dtype)], [("y", [6], dtype)])
    result = _convert(model, tmp_path)
    assert result.ok, result.reason
    assert said in result.reason


def test_an_enlarged_output_with_the_labels_of_the_input_is_accepted(tmp_path):
    """PixelShuffle exported with the input's axis names: the size moves, so nothing was baked in."""
    nodes = [
        node("Conv", "x w", "t", pads=[1, 1, 1, 1]),
        node("DepthToSpace", "t", "y", blocksize=2, mode="CRD"),
    ]
    shape = ["n", 3, "h", "w"]
    model = graph(nodes, [("x", shape)], [("y", shape)], {"w": weights(12, 3, 3, 3)})
    result = _convert(model, tmp_path)
    assert result.ok, result.reason
    assert "output 'y' declares axis 2 to be 'h' like an input, but it is 128" in result.reason


def _relu6(opset, batch=1):
    """Three convolutions, the middle one between ReLU6 as operator sets up to 10 write it."""
    nodes = []
    for index, reads in enumerate(["x", "r0", "r1"]):
        nodes.append(node("Conv", f"{reads} w{index}", f"c{index}", pads=[1, 1, 1, 1], kernel_shape=[3, 3]))
        nodes.append(node("Clip", f"c{index}", f"r{index}", min=0.0, max=6.0))
    nodes.append(node("GlobalAveragePool", "r2", "y"))
    shapes = {"w0": (8, 3, 3, 3), "w1": (8, 8, 3, 3), "w2": (8, 8, 3, 3)}
    constants = {name: weights(*shape, seed=i, scale=0.2) for i, (name, shape) in enumerate(shapes.items())}
    return graph(nodes, [("x", [batch, *IMAGE[1:]])], [("y", [batch, 8, 1, 1])], constants, opset=opset)


@pytest.mark.parametrize("opset", [7, 10])
def test_relu6_of_old_operator_sets_is_quantised(opset, tmp_path):
    """Up to operator set 10 the limits are attributes; the converter fuses such a Clip all the same."""
    result = _convert(_relu6(opset), tmp_path, int8=True, calibration=_photos(tmp_path / "i", 20))
    assert result.ok, result.reason
    assert "2 layers compute in int8" in result.reason


def test_int8_is_proven_on_images_that_it_was_not_calibrated_on(tmp_path):
    """Scales of pale images clamp the others: those kept for the proof show it, the measured ones cannot."""
    pale = _photos(tmp_path / "pale", 40, contrast=lambda index: 1.0 if index % 5 == 2 else 0.1)
    refused = _convert(_relu6(10), tmp_path, int8=True, calibration=pale)
    assert not refused.ok
    assert "differs from ONNX Runtime" in refused.reason
    even = _convert(_relu6(10), tmp_path, int8=True, calibration=_photos(tmp_path / "even", 40))
    assert even.ok, even.reason
    assert even.parity is not None
    assert even.parity.runs == 2 * (8 + 1 + 3)  # the 8 kept images, the first again, three in a new session


def test_int8_of_a_large_batch_is_proven_on_images(tmp_path):
    """One batch is more images than are usually proven on: none would be left but random inputs."""
    images = _photos(tmp_path / "i", 80)
    result = _convert(_relu6(10, batch=40), tmp_path, int8=True, calibration=images)
    assert result.ok, result.reason
    assert result.parity is not None
    assert result.parity.runs == 2 * (1 + 1 + 1)


def test_copies_of_one_picture_are_no_calibration(tmp_path):
    """120 grey images once passed, and the model was wrong on every other."""
    folder = tmp_path / "i"
    folder.mkdir()
    for index in range(120):
        Image.new("RGB", (24, 24), (128, 128, 128)).save(folder / f"{index}.png")
    with pytest.raises(UserError, match="120 calibration images, of which 0 differ"):
        _convert(_relu6(10), tmp_path, int8=True, calibration=folder)
    assert not (tmp_path / "m.mnn").exists()
