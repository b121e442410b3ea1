"""A small model, and runs with chosen samples."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fleet.device.bench import RawRun
from fleet.device.engine import ENGINE_VERSION, RuntimeConfig
from tasks.mnn.converter import convert


@pytest.fixture(scope="session")
def make_model(tmp_path_factory):
    """Makes a one-convolution classifier of images of a given side, None for one that is left open."""

    def make(side):
        folder = tmp_path_factory.mktemp("bench")
        weight = np.random.default_rng(0).standard_normal((8, 3, 16, 16)).astype(np.float32)
        sides = [side, side] if side else ["h", "w"]
        graph = helper.make_graph(
            [helper.make_node("Conv", ["input", "w"], ["y"]), helper.make_node("Relu", ["y"], ["logits"])],
            "g",
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, *sides])],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, None)],
            [numpy_helper.from_array(weight, "w")],
        )
        source, target = folder / "m.onnx", folder / "m.mnn"
        opset = [helper.make_opsetid("", 17)]
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), source)
        convert(source, target)
        return target

    return make


@pytest.fixture(scope="session")
def model(make_model):
    """A one-convolution classifier of 16 px images."""
    return make_model(16)


@pytest.fixture(scope="session")
def open_model(make_model):
    """The same for images of any size."""
    return make_model(None)


_QUIET = RawRun(
    engine_version=ENGINE_VERSION,
    config=RuntimeConfig().to_dict(),
    inputs={"input": [1, 3, 16, 16]},
    load_ms=1.0,
    first_ms=2.0,
    warmup_queries=15,
    warmup_stable=True,
    latency_ms=[1.0] * 500,
    end_to_end_ms=[],
    steady_s=0.5,
    cpu_share=1.0,
    core_share=1.0,
    load_avg_1min=0.1,
    load_memory_mb=1.0,
    peak_memory_mb=3.0,
    available_memory_mb=1000.0,
    session_memory_mb=2.0,
    temp_before_c=None,
    temp_after_c=None,
    clock_before_mhz=None,
    clock_after_mhz=None,
    energy_mj=None,
)


@pytest.fixture
def raw_run():
    """Makes what `fleet.device.bench` answers on a quiet host, but for what is given."""
    return lambda latency_ms=(1.0,) * 500, **others: replace(_QUIET, latency_ms=list(latency_ms), **others)
