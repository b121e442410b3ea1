"""Measuring on this host: real processes, real engine; judgements on made-up samples."""

import json

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fleet.device.engine import ENGINE_VERSION, RuntimeConfig
from fleet.device.errors import EngineError
from fleet.device.preprocess import Preprocess
from fleet.lab.local import measure, measure_interleaved, run_once, summarize
from tasks.mnn.converter import convert


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A one-convolution classifier of 16 px images."""
    folder = tmp_path_factory.mktemp("bench")
    weight = np.random.default_rng(0).standard_normal((8, 3, 16, 16)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["input", "w"], ["y"]), helper.make_node("Flatten", ["y"], ["logits"])],
        "g",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, 8])],
        [numpy_helper.from_array(weight, "w")],
    )
    source, target = folder / "m.onnx", folder / "m.mnn"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), source)
    convert(source, target)
    return target


def raw_run(latency_ms, *, cpu_share=1.0, load_memory_mb=1.0):
    """What `fleet.device.bench` prints, with chosen samples."""
    return {
        "engine_version": ENGINE_VERSION,
        "config": RuntimeConfig().to_dict(),
        "load_ms": 1.0,
        "first_ms": 2.0,
        "latency_ms": list(latency_ms),
        "end_to_end_ms": [],
        "cpu_share": cpu_share,
        "load_memory_mb": load_memory_mb,
        "peak_memory_mb": 3.0,
    }


def test_a_measurement_counts_what_it_ran(model):
    """n, the config and the end-to-end time come from the runs themselves; every latency is positive."""
    got = measure(model, RuntimeConfig(threads=1), queries=60, preprocess=Preprocess(size_px=16))
    assert got.n == 60
    assert got.config["threads"] == 1
    assert 0 < got.p50_ms <= got.p95_ms <= got.p99_ms <= got.max_ms
    assert got.end_to_end_p50_ms > got.p50_ms  # preprocessing a VGA frame is part of it
    assert "too_few_queries" in got.flags
    assert got.p99_bound.value is None


def test_rounds_split_the_queries_and_pool_them(model):
    """Three rounds of an odd number of queries still give at least what was asked, for each model."""
    got = measure_interleaved(
        {"a": (model, None), "b": (model, None)}, RuntimeConfig(), queries=100, rounds=3, seed=0
    )
    assert {name: m.n for name, m in got.items()} == {"a": 102, "b": 102}


def test_pooled_percentiles_are_those_of_all_samples():
    """Two runs of different speed: the median is that of the union, not the mean of medians."""
    got = summarize([raw_run([1.0] * 300), raw_run([2.0] * 200)])
    assert (got.n, got.p50_ms, got.p90_ms) == (500, 1.0, 2.0)


@pytest.mark.parametrize(
    ("runs", "flags"),
    [
        ([raw_run([1.0] * 500)], ()),
        ([raw_run([1.0] * 458)], ("too_few_queries",)),
        ([raw_run([1.0] * 500, cpu_share=0.89)], ("noisy",)),
        ([raw_run([1.0] * 400 + [1.6] * 100)], ("noisy",)),
        ([raw_run([1.0] * 250), raw_run([1.0] * 250, cpu_share=0.5)], ("noisy",)),
    ],
)
def test_doubts_become_flags(runs, flags):
    """A lost core in any run, a wide distribution, or too few samples each leave their flag."""
    assert summarize(runs).flags == flags


def test_memory_that_the_system_does_not_expose_is_none():
    """NaN from a system without /proc becomes None, which JSON can carry."""
    got = summarize([raw_run([1.0] * 500, load_memory_mb=float("nan"))])
    assert got.load_memory_mb is None
    json.dumps(got.to_dict(), allow_nan=False)


def test_a_file_that_is_no_model_is_an_engine_or_user_error(tmp_path):
    """Garbage in a .mnn file: the fresh process fails and its words arrive here."""
    path = tmp_path / "garbage.mnn"
    path.write_bytes(b"not a model" * 100)
    with pytest.raises(EngineError, match=r"garbage\.mnn exited with 1"):
        run_once(path, RuntimeConfig(), queries=50)
