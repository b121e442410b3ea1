"""The session around the MNN interpreter: what it computes, and what it refuses to answer wrongly."""

import os
import subprocess
import sys
import threading

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fleet.device.engine import RuntimeConfig, Session, TensorSpec, quiet_stdout
from fleet.device.errors import EngineError, UserError
from tasks.mnn.converter import convert

WEIGHT = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(np.float32)
IMAGE = np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)


def value(name, dtype, shape):
    return helper.make_tensor_value_info(name, dtype, shape)


def weights(**arrays):
    return [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]


GRAPHS = {
    "conv": (
        [helper.make_node("Conv", ["x", "w"], ["t"], pads=[1] * 4), helper.make_node("Relu", ["t"], ["y"])],
        [value("x", TensorProto.FLOAT, [1, 3, 8, 8])],
        [value("y", TensorProto.FLOAT, [1, 4, 8, 8])],
        weights(w=WEIGHT),
    ),
    "dynamic": (
        [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1] * 4)],
        [value("x", TensorProto.FLOAT, ["n", 3, "h", "w_"])],
        [value("y", TensorProto.FLOAT, ["n", 4, "h", "w_"])],
        weights(w=WEIGHT),
    ),
    "gather": (
        [helper.make_node("Gather", ["table", "i"], ["y"])],
        [value("i", TensorProto.INT64, [3])],
        [value("y", TensorProto.FLOAT, [3, 2])],
        weights(table=np.arange(20, dtype=np.float32).reshape(10, 2)),
    ),
    "bytes": (
        [helper.make_node("Cast", ["x"], ["f"], to=1), helper.make_node("Mul", ["f", "two"], ["y"])],
        [value("x", TensorProto.UINT8, [1, 3, 4, 4])],
        [value("y", TensorProto.FLOAT, [1, 3, 4, 4])],
        weights(two=np.float32(2)),
    ),
    "several": (
        [
            helper.make_node("Sub", ["a", "b"], ["difference"]),
            helper.make_node("ArgMax", ["a"], ["index"], axis=1, keepdims=0),
            helper.make_node("ReduceMean", ["a"], ["mean"], keepdims=0),
        ],
        [value("a", TensorProto.FLOAT, [2, 3]), value("b", TensorProto.FLOAT, [2, 3])],
        [
            value("difference", TensorProto.FLOAT, [2, 3]),
            value("index", TensorProto.INT64, [2]),
            value("mean", TensorProto.FLOAT, []),
        ],
        [],
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Name -> path of a converted model."""
    folder = tmp_path_factory.mktemp("engine")
    paths = {}
    for name, (nodes, inputs, outputs, initializers) in GRAPHS.items():
        graph = helper.make_graph(nodes, name, inputs, outputs, initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.save(model, str(folder / f"{name}.onnx"))
        paths[name] = convert(folder / f"{name}.onnx", folder / f"{name}.mnn").path
    return paths


def convolution(x):
    """WEIGHT over `x` with a border of one, straight from the definition."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.einsum("nchwij,ocij->nohw", windows, WEIGHT)


def test_run_computes_the_graph_on_any_memory_order(models):
    """The result is the convolution, also for a transposed view, and is a copy that outlives the session."""
    view = np.ascontiguousarray(IMAGE.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    assert not view.flags.c_contiguous
    with Session(models["conv"]) as session:
        result = session.run({"x": view})["y"]
        kept = result.copy()
        session.run({"x": IMAGE * 0})
    np.testing.assert_array_equal(result, kept)
    np.testing.assert_allclose(result, np.maximum(convolution(IMAGE), 0), atol=1e-5)


def test_one_thread_gives_the_same_bits_every_time(models):
    """Two sessions, and two runs of one, agree to the last bit."""
    with Session(models["conv"]) as first, Session(models["conv"]) as second:
        runs = [first.run({"x": IMAGE})["y"], first.run({"x": IMAGE})["y"], second.run({"x": IMAGE})["y"]]
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])


def test_specs_of_inputs_and_outputs(models):
    """Names, shapes and dtypes are the graph's; int64 is int32 in MNN, an unknown size is -1, a batch 1."""
    with Session(models["several"]) as session:
        assert session.inputs["a"] == TensorSpec(name="a", shape=(2, 3), dtype="float32")
        assert session.outputs["index"] == TensorSpec(name="index", shape=(2,), dtype="int32")
        assert session.outputs["mean"].shape == ()
    with Session(models["dynamic"]) as session:
        assert session.inputs["x"] == TensorSpec(name="x", shape=(1, 3, -1, -1), dtype="unknown")


def test_several_inputs_and_outputs_by_name(models):
    """Inputs are told apart by name, not by order; integer and scalar outputs keep dtype and shape."""
    a, b = np.float32([[1, 5, 2], [0, 1, 9]]), np.float32([[1, 1, 1], [2, 2, 2]])
    with Session(models["several"]) as session:
        outputs = session.run({"b": b, "a": a})
    np.testing.assert_array_equal(outputs["difference"], a - b)
    np.testing.assert_array_equal(outputs["index"], np.int32([1, 2]))
    assert outputs["index"].dtype == np.int32
    assert outputs["mean"].shape == ()
    assert float(outputs["mean"]) == pytest.approx(3.0)


def test_a_dynamic_model_follows_its_inputs(models):
    """Shapes may change from run to run and back; other sizes than at the start are right too."""
    rng = np.random.default_rng(2)
    with Session(models["dynamic"], shapes={"x": (1, 3, 5, 6)}) as session:
        assert session.inputs["x"].shape == (1, 3, 5, 6)
        for shape in [(1, 3, 5, 6), (2, 3, 9, 4), (1, 3, 5, 6)]:
            x = rng.standard_normal(shape).astype(np.float32)
            np.testing.assert_allclose(session.run({"x": x})["y"], convolution(x), atol=1e-5)
        session.resize({"x": (3, 3, 4, 4)})
        assert session.inputs["x"].shape == (3, 3, 4, 4)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_integers_that_fit_are_cast_to_the_declared_width(models, dtype):
    """MNN stores ONNX's int64 as int32: equal values give equal results whatever their width."""
    with Session(models["gather"]) as session:
        rows = session.run({"i": np.array([1, 2, 9], dtype)})["y"]
    np.testing.assert_array_equal(rows, [[2, 3], [4, 5], [18, 19]])


def test_uint8_inputs(models):
    """Raw pixels above 127 arrive unsigned."""
    with Session(models["bytes"]) as session:
        assert session.inputs["x"].dtype == "uint8"
        out = session.run({"x": np.full((1, 3, 4, 4), 200, np.uint8)})["y"]
    np.testing.assert_array_equal(out, np.full((1, 3, 4, 4), 400, np.float32))


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_float_widths_are_cast(models, dtype):
    """The engine computes in float32; a float64 array is not read as raw bytes."""
    x = np.round(IMAGE, 1).astype(dtype)
    with Session(models["conv"]) as session:
        np.testing.assert_array_equal(
            session.run({"x": x})["y"], session.run({"x": x.astype(np.float32)})["y"]
        )


@pytest.mark.parametrize(
    ("model", "feeds", "message"),
    [
        ("conv", {"y": IMAGE}, r"inputs \['y'\].*exactly \['x'\]"),
        ("conv", {}, r"inputs \[\].*exactly \['x'\]"),
        ("several", {"a": np.zeros((2, 3), np.float32)}, r"exactly \['a', 'b'\]"),
        ("conv", {"x": IMAGE.astype(np.int32)}, "input x with dtype int32.*float32"),
        ("conv", {"x": IMAGE.astype(np.uint8)}, "input x with dtype uint8.*float32"),
        ("conv", {"x": IMAGE.astype(bool)}, "input x with dtype bool.*float32"),
        ("conv", {"x": IMAGE.astype(np.complex64)}, "input x with dtype complex64.*float32"),
        ("gather", {"i": np.float32([1, 2, 3])}, "input i with dtype float32.*int32"),
        ("gather", {"i": np.int64([1, 2, 2**40])}, "input i with dtype int64.*int32"),
        ("conv", {"x": np.full(IMAGE.shape, 1e39)}, "input x with dtype float64.*float32"),
        ("bytes", {"x": np.full((1, 3, 4, 4), 256, np.int32)}, "input x with dtype int32.*uint8"),
        ("bytes", {"x": np.zeros((1, 3, 4, 4), np.float32)}, "input x with dtype float32.*uint8"),
        ("conv", {"x": np.zeros((0, 3, 8, 8), np.float32)}, r"shape \(0, 3, 8, 8\).*positive"),
    ],
)
def test_feeds_that_do_not_fit_are_user_errors(models, model, feeds, message):
    """Wrong names, element types and empty shapes say what was got and what is allowed."""
    with Session(models[model]) as session, pytest.raises(UserError, match=f"(?s){message}"):
        session.run(feeds)


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (3, 8, 8), ()])
def test_shapes_the_model_cannot_take_are_refused_before_running(models, shape):
    """The engine fails to build and would run all the same: `run` names the shapes instead, and recovers."""
    with Session(models["conv"]) as session:
        with pytest.raises(EngineError, match="cannot build it for inputs"):
            session.run({"x": np.zeros(shape, np.float32)})
        np.testing.assert_allclose(
            session.run({"x": IMAGE})["y"], np.maximum(convolution(IMAGE), 0), atol=1e-5
        )


def test_inputs_that_do_not_fit_each_other_are_refused(models):
    """Shapes that cannot be broadcast are an error of the pair, not of one input."""
    feeds = {"a": np.zeros((2, 3), np.float32), "b": np.zeros((4, 7), np.float32)}
    with Session(models["several"]) as session, pytest.raises(EngineError, match="cannot build"):
        session.run(feeds)


def test_unknown_or_negative_shapes_are_user_errors(models):
    """`shapes` names existing inputs and positive extents."""
    with pytest.raises(UserError, match=r"(?s)inputs \['z'\].*exactly \['x'\]"):
        Session(models["dynamic"], shapes={"z": (1, 3, 4, 4)})
    with pytest.raises(UserError, match=r"shape \(1, 3, -1, 4\)"):
        Session(models["dynamic"], shapes={"x": (1, 3, -1, 4)})


def test_files_that_are_no_models(models, tmp_path):
    """Missing, empty, a folder: user errors; foreign or truncated content: the engine's refusal."""
    for missing in (tmp_path / "missing.mnn", tmp_path):
        with pytest.raises(UserError, match="missing or empty"):
            Session(missing)
    damaged = tmp_path / "damaged.mnn"
    damaged.write_bytes(b"")
    with pytest.raises(UserError, match="missing or empty"):
        Session(damaged)
    content = models["conv"].read_bytes()
    for bad in (b"hello", np.random.default_rng(0).bytes(5000), content[: len(content) // 2], content[:-8]):
        damaged.write_bytes(bad)
        with pytest.raises(EngineError, match="does not open"):
            Session(damaged)


def test_closed_sessions_refuse(models):
    """Closing twice is fine; using a closed session says so."""
    session = Session(models["conv"])
    session.close()
    session.close()
    with pytest.raises(EngineError, match="closed"):
        session.run({"x": IMAGE})
    with pytest.raises(EngineError, match="closed"):
        _ = session.outputs


def test_an_absent_backend_is_no_silent_fallback(models):
    """MNN would run on the CPU and say so on stdout only."""
    with pytest.raises(EngineError, match="no OPENCL here and fell back to CPU"):
        Session(models["conv"], config=RuntimeConfig(backend="OPENCL"))


@pytest.mark.parametrize(
    "settings", [{"backend": "TPU"}, {"precision": "int8"}, {"memory": ""}, {"threads": 0}, {"threads": -2}]
)
def test_runtime_settings_are_checked(settings):
    """The engine takes any number of threads and ignores unknown levels; the config does not."""
    with pytest.raises(UserError, match=next(iter(settings))):
        RuntimeConfig(**settings)


def test_trace_lists_what_executed(models):
    """The convolution is there by name, in float, and its outputs are those of a plain run."""
    with Session(models["conv"]) as session:
        outputs, ops = session.trace({"x": IMAGE})
        np.testing.assert_array_equal(outputs["y"], session.run({"x": IMAGE})["y"])
    convolutions = [op for op in ops if op.type.startswith("Convolution")]
    assert [op.name for op in convolutions] == ["t"]
    assert not convolutions[0].int8
    assert all(op.duration_ms >= 0 for op in ops)


def test_intermediates_are_read_in_onnx_order(models):
    """The kept operator's values, after the ReLU fused into it; unknown names are absent."""
    with Session(models["conv"]) as session:
        kept = session.intermediates({"x": IMAGE}, {"t", "no such operator"})
    assert set(kept) == {"t"}
    np.testing.assert_allclose(kept["t"], np.maximum(convolution(IMAGE), 0), atol=1e-5)


def test_nothing_is_written_to_stdout(models):
    """Import, opening, a refused shape and a run leave stdout to the program's own output."""
    program = (
        "import sys, numpy as np\n"
        "from fleet.device.engine import Session\n"
        "from fleet.device.errors import EngineError\n"
        "with Session(sys.argv[1]) as session:\n"
        "    try: session.run({'x': np.zeros((1, 4, 8, 8), np.float32)})\n"
        "    except EngineError: print('refused')\n"
        "    print(session.run({'x': np.zeros((1, 3, 8, 8), np.float32)})['y'].shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(models["conv"])], capture_output=True, text=True, check=True
    )
    assert done.stdout == "refused\n(1, 4, 8, 8)\n"


def test_stdout_survives_overlapping_threads(tmp_path):
    """The first thread to leave does not take the redirection from the second, and the last one ends it."""
    saved = os.dup(1)
    try:
        target = os.open(tmp_path / "stdout", os.O_CREAT | os.O_RDWR)
        os.dup2(target, 1)
        inside, leave = threading.Event(), threading.Event()

        def hold():
            with quiet_stdout():
                inside.set()
                leave.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        inside.wait()
        with quiet_stdout():
            os.write(1, b"")
        os.write(1, b"to stderr, the thread is still inside\n")
        leave.set()
        thread.join()
        os.write(1, b"after\n")
        assert (tmp_path / "stdout").read_text() == "after\n"
    finally:
        os.dup2(saved, 1)
