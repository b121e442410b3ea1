"""`edgeloop bench`: what programs and people get, and what is refused before anything is measured."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pyarrow.parquet as pq
import pytest
from clones import ROOT, environment

from fleet.device.errors import EngineError, UserError
from fleet.device.preprocess import Preprocess
from fleet.lab.layers import Layer, profile
from tasks.bench import bench, parse_configs
from tasks.bench_text import print_result, short_names


@pytest.fixture(scope="module")
def several(tiny_models, tmp_path_factory):
    """Two models in two configs, and the file with all samples."""
    samples = tmp_path_factory.mktemp("samples") / "samples.parquet"
    configs = parse_configs("1,2", "normal", "normal")
    record = Preprocess(size_px=16)
    return bench(tiny_models, configs, queries=8, preprocess=record, samples=samples), samples


def test_one_model_is_one_flat_record(tiny_models):
    """The keys that programs rely on; too few queries are flagged and bound nothing."""
    got = bench(tiny_models[:1], parse_configs("1", "normal", "normal"), queries=60).to_dict()
    assert {"device", "latency_ms", "n", "memory_mb", "flags", "warnings", "config", "package_bytes"} <= set(
        got
    )
    assert (got["device"], got["n"], got["config"]["threads"]) == ("local", 60, 1)
    assert set(got["latency_ms"]) >= {"p50", "p90", "p95", "p99", "p99_bound"}
    assert got["latency_ms"]["p90_bound"] >= got["latency_ms"]["p90"]
    assert got["latency_ms"]["p99_bound"] is None
    assert "too_few_queries" in got["flags"]
    assert got["package_bytes"] > got["model_bytes"] == tiny_models[0].stat().st_size
    assert any(layer["op_type"] == "Convolution" for layer in got["slowest_layers"])
    json.dumps(got, allow_nan=False)


def test_several_are_measured_side_by_side(several):
    """Every model in every config, each of the others compared with the first."""
    got = several[0].to_dict()
    measured = [(one["model"].rpartition("/")[2], one["config"]["threads"]) for one in got["measurements"]]
    assert measured == [("small.mnn", 1), ("small.mnn", 2), ("large.mnn", 1), ("large.mnn", 2)]
    assert len(got["comparisons"]) == 3
    for one in got["comparisons"]:
        assert one["ratio_min"] <= one["ratio"] <= one["ratio_max"]
    assert [bool(one["slowest_layers"]) for one in got["measurements"]] == [True, False, True, False]


def test_samples_hold_every_single_latency(several):
    """Their percentile is the one that was printed; each round has a load and a first inference."""
    result, file = several
    table = pq.read_table(file).to_pandas()
    assert list(table) == ["variant", "config", "round", "phase", "index", "latency_ms"]
    first = result.measured[0]
    mine = table[(table.variant == first.model) & (table.config == "t1-normal-normal")]
    assert mine.phase.value_counts().to_dict() == {"steady": 8, "end_to_end": 8, "load": 4, "first": 4}
    steady = mine[mine.phase == "steady"]
    assert steady.latency_ms.median() == pytest.approx(first.cost.p50_ms)
    assert steady["round"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert steady["index"].tolist() == [0, 1] * 4


def test_people_get_a_table_and_what_it_means(several, capsys):
    """Names without the folders they share, the bound, what flags mean, the slowest layers, the outliers."""
    result = several[0]
    slow = Layer(
        layer="topk", op_type="TopKV2", int8=False, p50_ms=9.0, share=0.5, outlier=True, why="12 times x"
    )
    flagged = replace(result.measured[0].cost, flags=("throttled",), warnings=("memory",))
    first = replace(result.measured[0], cost=flagged, layers=(slow,))
    print_result(replace(result, measured=(first, *result.measured[1:])))
    said = capsys.readouterr().out
    assert " small.mnn " in said
    assert "* throttled (small.mnn t1-normal-normal): it grew slower" in said
    assert "! memory (small.mnn t1-normal-normal): " in said
    assert "70 %" in said
    assert "! fallback" in said
    assert "! topk takes 12 times x" in said
    assert "* too_few_queries (" in said
    assert "slowest layers of large.mnn" in said


@pytest.mark.parametrize(
    ("models", "names"),
    [
        (["a/model.mnn"], ["model.mnn"]),
        (["m/a/model.mnn", "m/b/model.mnn"], ["a/model.mnn", "b/model.mnn"]),
        (["a.mnn (1)", "a.mnn (2)"], ["a.mnn (1)", "a.mnn (2)"]),
        (["/x/a.mnn", "b.mnn"], ["/x/a.mnn", "b.mnn"]),
        (["/x/a.mnn", "/y/z/b.mnn"], ["x/a.mnn", "y/z/b.mnn"]),
    ],
)
def test_names_are_short_and_told_apart(models, names):
    """Whatever mixture of paths was given."""
    assert short_names(models) == dict(zip(models, names, strict=True))


def test_the_same_file_twice_is_two_measurements(tiny_models):
    """A against A shows what is no difference."""
    got = bench([tiny_models[0]] * 2, parse_configs("1", "normal", "normal"), queries=4)
    assert [one.model[-4:] for one in got.measured] == [" (1)", " (2)"]


def test_configs_are_all_combinations():
    """Of three lists; what is said twice counts once."""
    got = parse_configs("1,2", "normal,low", "normal,normal")
    assert [(c.threads, c.precision) for c in got] == [(1, "normal"), (1, "low"), (2, "normal"), (2, "low")]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("0", "normal", "normal"), "threads '0'"),
        (("-1", "normal", "normal"), "threads '-1'"),
        (("1,,2", "normal", "normal"), "threads"),
        (("many", "normal", "normal"), "threads"),
        (("²", "normal", "normal"), "threads"),
        (("9" * 5000, "normal", "normal"), "threads"),
        (("1", "half", "normal"), "precision 'half'"),
        (("1", "normal", "lots"), "memory 'lots'"),
        (("1", "", "normal"), "precision ''"),
    ],
    ids=lambda value: "-".join(value)[:30] if isinstance(value, tuple) else "",
)
def test_configs_that_do_not_exist_are_refused(given, named):
    """The option is named with its value."""
    with pytest.raises(UserError, match=named):
        parse_configs(*given)


def test_more_threads_than_cores_are_refused(tiny_models):
    """They would wait for each other, and the number would be nobody's."""
    with pytest.raises(UserError, match=r"1 to \d+, the cores"):
        bench(tiny_models, parse_configs("1024", "normal", "normal"))


def _missing(folder):
    return folder / "none.mnn", "missing"


def _empty(folder):
    (folder / "empty.mnn").touch()
    return folder / "empty.mnn", "empty"


def _folder(folder):
    return folder, "is a folder"


def _onnx(folder):
    (folder / "m.onnx").write_bytes(b"x")
    return folder / "m.onnx", "edgeloop convert"


@pytest.mark.parametrize("make", [_missing, _empty, _folder, _onnx])
def test_what_is_no_model_file_is_refused(tmp_path, make, tiny_models):
    """Before the good model beside it is measured for minutes."""
    path, said = make(tmp_path)
    with pytest.raises(UserError, match=said):
        bench([tiny_models[0], path], parse_configs("1", "normal", "normal"))


@pytest.mark.parametrize("kept", [0, 8, 100, 1000], ids=str)
def test_a_damaged_model_is_one_error(tmp_path, tiny_models, kept):
    """Cut off and overwritten: refused or crashed, the engine leaves one error and no traceback."""
    content = bytearray(tiny_models[0].read_bytes())
    damaged = tmp_path / "damaged.mnn"
    damaged.write_bytes(content[:kept] + b"\xff" * 64)
    with pytest.raises(EngineError, match=r"damaged\.mnn") as error:
        bench([damaged], parse_configs("1", "normal", "normal"), queries=4)
    assert "Traceback" not in str(error.value)


def test_a_file_replaced_while_it_is_measured_is_refused(tmp_path, tiny_models, monkeypatch):
    """Its latency would be told of the new bytes; no samples are left of it either."""
    model, samples = tmp_path / "m.mnn", tmp_path / "samples.parquet"
    model.write_bytes(tiny_models[0].read_bytes())

    def replace_then_profile(*arguments):
        model.write_bytes(tiny_models[1].read_bytes())
        return profile(*arguments)

    monkeypatch.setattr("tasks.bench.profile", replace_then_profile)
    with pytest.raises(UserError, match=r"m\.mnn was replaced while it was measured"):
        bench([tiny_models[0], model], parse_configs("1", "normal", "normal"), queries=4, samples=samples)
    assert not samples.exists()


@pytest.mark.parametrize("samples", ["none/samples.parquet", ".", "link.parquet", "small.mnn", "notes.txt"])
def test_samples_that_could_not_be_written_are_refused_first(tmp_path, tiny_models, samples):
    """Not after minutes of measuring; and never instead of the model, or any file of another kind."""
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    model = tmp_path / "small.mnn"
    model.write_bytes(tiny_models[0].read_bytes())
    (tmp_path / "link.parquet").symlink_to("/dev/null")
    with pytest.raises(UserError, match="--samples"):
        bench([model], parse_configs("1", "normal", "normal"), samples=tmp_path / samples)
    assert model.read_bytes() == tiny_models[0].read_bytes()


@pytest.mark.parametrize("queries", [0, -5, 10**9])
def test_queries_out_of_range_are_refused(tiny_models, queries):
    """None, or more than memory holds."""
    with pytest.raises(UserError, match="--queries"):
        bench(tiny_models, parse_configs("1", "normal", "normal"), queries=queries)


def test_two_shapes_for_an_input_are_refused(tiny_models):
    """A latency is that of one size."""
    shapes = ["input=1,3,16,16", "input=1,3,32,32"]
    with pytest.raises(UserError, match="2 shapes for input"):
        bench(tiny_models, parse_configs("1", "normal", "normal"), shapes=shapes)


def test_an_interruption_leaves_nothing(tiny_models, tmp_path):
    """Ctrl-C in the middle: exit 130, no half file, and the device is free for the next."""
    command = [sys.executable, "-m", "flows", "bench", str(tiny_models[0]), "--queries", "1000000", "--json"]
    process = subprocess.Popen(
        [*command, "--samples", str(tmp_path / "s.parquet")],
        cwd=ROOT,
        env=environment(ROOT),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not (children := _benches_of(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert children
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert list(tmp_path.iterdir()) == []
    assert not any(_runs(child) for child in children)


def _benches_of(pid):
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended while we looked
            found += [child.pid] if "fleet.device.bench" in child.cmdline() else []
    return found


def _runs(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
