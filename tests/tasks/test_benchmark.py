"""The stage benchmark: parameters, the flat report, and what a real build left."""

import csv
import dataclasses
import hashlib
import shutil

import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from fleet.device.bench import RawRun
from fleet.device.engine import ENGINE_VERSION, RuntimeConfig
from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from fleet.lab.layers import Layer, profile
from fleet.lab.local import LocalDevice
from tasks.benchmark import Benchmarked, BenchmarkParams, ModelFile, benchmark, check_threads, flat_report
from tasks.benchmark_files import write_samples
from tasks.stage import read_json, write_json


def run(ms, **others):
    config = {"engine_version": ENGINE_VERSION, "config": RuntimeConfig().to_dict(), "inputs": {}}
    empty = {field.name: None for field in dataclasses.fields(RawRun)}
    times = {"load_ms": 1.0, "first_ms": 1.0, "latency_ms": [ms] * 250, "end_to_end_ms": [], "steady_s": 1.0}
    shares = {"cpu_share": 1.0, "core_share": 1.0, "load_avg_1min": 0.0, "warmup_stable": True}
    return RawRun(**empty | config | times | shares | others)


@pytest.fixture
def measured(tmp_path):
    """One variant in two configs."""
    (tmp_path / "model.mnn").write_bytes(b"model")
    slow = Layer(layer="l", op_type="Conv", int8=False, p50_ms=1.0, share=1.0, outlier=True, why="w")
    runs = {
        ("a", "t1-normal-normal"): [run(1.0), run(1.0)],
        ("a", "t2-low-normal"): [run(3.0, core_share=0.5), run(3.0)],
    }
    return Benchmarked(runs=runs, layers={"a": [slow]}, models={"a": ModelFile.of(tmp_path / "model.mnn")})


def test_the_first_config_bears_the_plain_name(measured):
    """The gate reads VARIANT/key: never the numbers of a config that no release is bound to."""
    report = flat_report(measured, 1000)
    assert (report["a/config"], report["a/p50_ms"], report["a/flags"]) == ("t1-normal-normal", 1.0, "")
    assert (report["a/t2-low-normal/p50_ms"], report["a/t2-low-normal/flags"]) == (3.0, "noisy")
    assert (report["a/p99_bound_ms"], report["a/p99_bound_rank"], report["a/n"]) == (1.0, 500, 500)
    assert report["a/package_bytes"] == 1005
    assert report["a/outlier_layers_count"] == 1
    assert report["a/mnn_sha256"] == hashlib.sha256(b"model").hexdigest()


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"queries": 458}, "queries"),
        ({"rounds": 0}, "rounds"),
        ({"configs": []}, "configs"),
        ({"configs": [{}, {"threads": 1}]}, "twice"),
        ({"configs": [{"threads": 0}]}, "threads"),
        ({"configs": [{"precision": "half"}]}, "precision"),
        ({"threads": 2}, "threads"),
    ],
    ids=str,
)
def test_parameters_that_cannot_be_meant_are_refused(section, named):
    """Before anything is measured, by name."""
    with pytest.raises(ValidationError, match=named):
        BenchmarkParams(**section)


def test_without_models_nothing_is_measured(tmp_path):
    """And what has to run before is named."""
    with pytest.raises(UserError, match="dvc repro convert"):
        benchmark(LocalDevice(), tmp_path, BenchmarkParams())


def test_a_model_replaced_while_it_is_measured_is_refused(tmp_path, tiny_models, monkeypatch):
    """The report would give the latency of the old bytes to the new ones."""
    folder = tmp_path / "a"
    folder.mkdir()
    shutil.copyfile(tiny_models[0], folder / "model.mnn")
    write_json(folder / "card.json", {"preprocess": Preprocess(size_px=16).to_dict()})

    def replace_then_profile(*arguments, **options):
        shutil.copyfile(tiny_models[1], folder / "model.mnn")
        return profile(*arguments, **options)

    monkeypatch.setattr("tasks.benchmark.profile", replace_then_profile)
    with pytest.raises(UserError, match="was replaced while it was measured"):
        benchmark(LocalDevice(), tmp_path, BenchmarkParams(queries=459, rounds=1))


def test_threads_end_at_the_devices_cores():
    """As many as cores are allowed, one more is not."""
    check_threads(2, 2)
    with pytest.raises(UserError, match="1 to 2"):
        check_threads(3, 2)


def test_samples_are_written_as_a_whole_or_not_at_all(measured, tmp_path, monkeypatch):
    """A full disk leaves the samples of before, and no part of the new."""
    path = tmp_path / "s.parquet"
    write_samples(measured.runs, path)
    before = path.read_bytes()

    def full(table, file):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tasks.benchmark_files.pq.write_table", full)
    with pytest.raises(OSError, match="No space"):
        write_samples(measured.runs, path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir() if "parquet" in p.name] == ["s.parquet"]


def test_a_build_leaves_samples_layers_and_the_report(tiny_build):
    """All three speak of the same variants, and the report's percentiles are those of the samples."""
    folder = tiny_build.workspace / "reports" / "benchmark"
    report = read_json(folder / "local.json")
    names = sorted(variant["name"] for variant in tiny_build.result["variants"])
    samples = pq.read_table(folder / "local_samples.parquet").to_pandas()
    with (folder / "local_layers.csv").open(encoding="utf-8", newline="") as file:
        layers = list(csv.DictReader(file))
    assert sorted(samples.variant.unique()) == sorted({layer["variant"] for layer in layers}) == names
    assert set(samples.phase) == {"load", "first", "steady", "end_to_end"}
    for name in names:
        steady = samples[(samples.variant == name) & (samples.phase == "steady")].latency_ms
        assert len(steady) == report[f"{name}/n"] == 500
        assert report[f"{name}/p50_ms"] == pytest.approx(steady.median(), abs=1e-4)
        assert report[f"{name}/config"] == "t1-normal-normal"
        shares = [float(layer["share"]) for layer in layers if layer["variant"] == name]
        assert sum(shares) == pytest.approx(1, abs=0.02)
    int8 = {layer["op_type"] for layer in layers if layer["int8"] == "1" and "-i8-" in layer["variant"]}
    assert "Convolution" in int8
    float_names = [layer["variant"] for layer in layers if layer["int8"] == "1"]
    assert all("-i8-" in name for name in float_names)
