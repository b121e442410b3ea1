"""`edgeloop build` on the preset `tiny`: the whole graph, run tree, registered version, what re-runs."""

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from clones import edgeloop, environment
from mlflow import MlflowClient

# What measures cannot be the same twice; all else is.
MEASURING = {"probe@local", "benchmark@local", "gate"}
STAGES = {"prepare", "validate", "train", "prune", "quantize", "export", "convert", "parity"} | MEASURING


def _client(clone: Path) -> MlflowClient:
    return MlflowClient(f"sqlite:///{clone}/.edgeloop/mlflow.db")


def _outs(workspace: Path) -> dict[str, dict[str, str]]:
    stages = yaml.safe_load((workspace / "dvc.lock").read_text(encoding="utf-8"))["stages"]
    kept = {name: entry for name, entry in stages.items() if name not in MEASURING}
    return {name: {out["path"]: out["md5"] for out in entry["outs"]} for name, entry in kept.items()}


def _ran(stderr: str) -> list[str]:
    return [line.split("'")[1] for line in stderr.splitlines() if line.startswith("Running stage")]


def test_the_build_prints_its_json(tiny_build):
    """One command takes images to registered models, and says of each what the contract asks."""
    result = tiny_build.result
    assert set(result) == {"preset", "seconds", "variants", "gate", "registered"}
    assert result["preset"] == "tiny"
    assert result["gate"]["verdict"] == "pass"
    assert result["registered"] == {"name": "edgeloop-tiny", "version": 1}
    precisions = {variant["name"].split("-")[2] for variant in result["variants"]}
    assert precisions == {"fp32", "fp16", "w8", "i8"}
    for variant in result["variants"]:
        model = tiny_build.workspace / "models" / "mnn" / variant["name"] / "model.mnn"
        assert variant["size_bytes"] == model.stat().st_size
        assert 0 < variant["latency_ms"]["p50"] <= variant["latency_ms"]["p99"]
        assert variant["macs"] > 0
        assert 0 <= variant["top1"] <= 1
        assert set(variant) == {
            "name", "top1", "size_bytes", "macs", "latency_ms", "parity_max_rel_error", "agreement", "flags"
        }  # fmt: skip


def test_every_stage_ran_once_and_nothing_left_a_traceback(tiny_build):
    """The graph is walked in order, without a server, and ends without a traceback."""
    assert set(_ran(tiny_build.stderr)) == STAGES
    assert len(_ran(tiny_build.stderr)) == len(STAGES)
    assert "Traceback" not in tiny_build.stderr


def test_the_build_says_what_it_does(tiny_build):
    """Piped, it says which stage of how many begins, in order, and where to follow it."""
    begun = re.findall(r"^\[(\d+)/11\] (\S+): [a-z]", tiny_build.stderr, re.MULTILINE)
    assert [int(number) for number, _ in begun] == list(range(1, 12))
    assert {stage for _, stage in begun} == STAGES
    assert re.search(
        r"^flow run: http://127\.0\.0\.1:\d+/runs/flow-run/\S+$", tiny_build.stderr, re.MULTILINE
    )


def _artifacts(clone: Path, key: str) -> list[str]:
    """What Prefect keeps under a key, oldest first."""
    with contextlib.closing(sqlite3.connect(clone / ".edgeloop" / "prefect" / "prefect.db")) as database:
        rows = database.execute("select data from artifact where key = ? order by created", (key,)).fetchall()
    return [str(json.loads(row[0])) for row in rows]


def test_every_file_of_the_workspace_is_an_out(tiny_build):
    """No stage writes files into models, data or reports that dvc.yaml does not know."""
    workspace = tiny_build.workspace
    stages = yaml.safe_load((workspace / "dvc.lock").read_text(encoding="utf-8"))["stages"]
    outs = [workspace / out["path"] for entry in stages.values() for out in entry.get("outs", ())]
    folders = [workspace / name for name in ("data", "models", "reports")]
    unknown = [
        str(file.relative_to(workspace))
        for folder in folders
        for file in folder.rglob("*")
        if file.is_file() and not any(file == out or file.is_relative_to(out) for out in outs)
    ]
    no_outs = ("reports/measured/", "reports/release.html")  # times; drawn after the last stage
    assert [name for name in unknown if not name.startswith(no_outs)] == []


def test_data_docs_that_are_gone_come_back_and_are_then_left_alone(tiny_build, tmp_path):
    """A clone has the report in git and no pages: the next build makes them, the one after it nothing."""
    clone = tmp_path / "copy"
    shutil.copytree(tiny_build.clone, clone, symlinks=True)
    workspace = clone / "presets" / "tiny"
    docs, lock = workspace / "reports" / "data_docs", (workspace / "dvc.lock").read_bytes()
    index = (docs / "index.html").read_bytes()
    shutil.rmtree(docs)
    digest = _outs(workspace)["validate"]["reports/data_docs"]
    (clone / ".dvc" / "cache" / "files" / "md5" / digest[:2] / digest[2:]).unlink()  # nor has DVC them
    done = edgeloop(clone, "build", "--preset", "tiny")
    assert done.returncode == 0, done.stderr
    assert _ran(done.stderr) == ["validate", "probe@local"]  # the last runs in every walk
    assert (docs / "index.html").read_bytes() == index
    assert (workspace / "dvc.lock").read_bytes() == lock
    written = (docs / "index.html").stat().st_mtime_ns
    assert _ran(edgeloop(clone, "build", "--preset", "tiny").stderr) == []
    assert (docs / "index.html").stat().st_mtime_ns == written


def test_the_run_tree(tiny_build):
    """One run for the build, below it one a stage, tagged with code, data, lock and engine."""
    client = _client(tiny_build.clone)
    experiment = client.get_experiment_by_name("edgeloop-tiny")
    build_id = client.get_model_version("edgeloop-tiny", "1").tags["build_id"]
    runs = client.search_runs([experiment.experiment_id], f"tags.build_id = '{build_id}'")
    (parent,) = [run for run in runs if run.data.tags["kind"] == "build"]
    children = {run.data.tags["dvc_stage"]: run for run in runs if run.data.tags["kind"] == "stage"}
    assert set(children) == STAGES
    for stage, run in children.items():
        tags = run.data.tags
        assert tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.info.status == "FINISHED"
        assert len(tags["git_commit"]) == 40
        assert tags["engine_version"] == "3.6.1"
        link = f"stage_run/{stage.replace('@', '-')}"
        assert parent.data.tags[link] == run.info.run_id
    lock = yaml.safe_load((tiny_build.workspace / "dvc.lock").read_text(encoding="utf-8"))["stages"]
    prepared = next(dep["md5"] for dep in lock["train"]["deps"] if dep["path"] == "data/prepared")
    assert children["train"].data.tags["data_digest"] == prepared
    assert client.get_metric_history(children["train"].info.run_id, "val_top1")
    assert children["train"].data.params["epochs"] == "4"


def test_the_registered_version(tiny_build):
    """The version waits for review with the gate's table, its tags and the files themselves."""
    client = _client(tiny_build.clone)
    assert client.get_registered_model("edgeloop-tiny").aliases == {"candidate": 1}
    version = client.get_model_version("edgeloop-tiny", "1")
    tags = version.tags
    assert (tags["gate"], tags["review_state"], tags["engine_version"]) == ("pass", "pending", "3.6.1")
    assert set(tags["variants"].split(",")) == {v["name"] for v in tiny_build.result["variants"]}
    links, table = version.description.split("\n\n", 1)
    assert links.startswith("[release report](#/experiments/")
    assert table.startswith("**Gate: pass**")
    release = Path(version.source.removeprefix("file://"))
    for variant in tiny_build.result["variants"]:
        registered = release / "models" / variant["name"] / "model.mnn"
        built = tiny_build.workspace / "models" / "mnn" / variant["name"] / "model.mnn"
        assert registered.read_bytes() == built.read_bytes()
    assert (release / "dvc.lock").read_bytes() == (tiny_build.workspace / "dvc.lock").read_bytes()


def test_a_second_build_has_nothing_to_do(tiny_build):
    """Nothing changed: no stage runs, nothing is registered anew."""
    before = (tiny_build.workspace / "dvc.lock").read_bytes()
    done = edgeloop(tiny_build.clone, "build", "--preset", "tiny")
    assert done.returncode == 0, done.stderr
    assert "nothing to do" in done.stdout
    assert "edgeloop-tiny version 1" in done.stdout
    assert _ran(done.stderr) == []
    assert "flow run" not in done.stderr  # Prefect is not even asked
    assert (tiny_build.workspace / "dvc.lock").read_bytes() == before


def test_bare_dvc_repro_finds_the_build_up_to_date(tiny_build):
    """As the README shows it, from the root or inside: the probe runs, as it always does, and no more."""
    before = (tiny_build.workspace / "dvc.lock").read_bytes()
    for folder, targets in ((tiny_build.clone, ["presets/tiny/dvc.yaml"]), (tiny_build.workspace, [])):
        command = [sys.executable, "-m", "dvc", "repro", *targets]
        env = environment(tiny_build.clone)
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert [stage.rpartition(":")[2] for stage in _ran(done.stdout)] == ["probe@local"]
    assert (tiny_build.workspace / "dvc.lock").read_bytes() == before


@pytest.fixture
def params(tiny_build):
    """The tiny workspace's params.yaml, put back afterwards, with what the stages made of it."""
    saved = {}
    for name in ("params.yaml", "dvc.lock", "reports/gate.json", "reports/gate.md"):
        saved[name] = (tiny_build.workspace / name).read_bytes()
    yield tiny_build.workspace / "params.yaml"
    for name, content in saved.items():
        (tiny_build.workspace / name).write_bytes(content)


def test_an_edit_of_the_gate_runs_the_gate_and_a_refusal_registers_nothing(tiny_build, params):
    """A stricter gate re-runs the gate (and the probe, which always runs), refuses, and exits 1."""
    params.write_text(params.read_text(encoding="utf-8").replace("min_top1: 0.05", "min_top1: 1.0"), "utf-8")
    done = edgeloop(tiny_build.clone, "build", "--preset", "tiny", "--json")
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert result["gate"]["verdict"] == "fail"
    assert result["registered"] is None
    assert _ran(done.stderr) == ["probe@local", "gate"]
    first, *_, last = _artifacts(tiny_build.clone, "result-tiny")
    assert first.startswith("## Gate: pass")
    assert last.startswith("## Gate: fail")
    assert "accuracy floor" in last.partition("| variant |")[0]
    assert "/#/experiments/" in last
    versions = _client(tiny_build.clone).search_model_versions("name = 'edgeloop-tiny'")
    assert [int(version.version) for version in versions] == [1]


def test_a_misspelt_parameter_ends_the_build_with_exit_2(tiny_build, params):
    """The stage's own error and exit code reach the user and the JSON, without a traceback."""
    params.write_text(params.read_text(encoding="utf-8").replace("min_top1", "min_topp1"), "utf-8")
    done = edgeloop(tiny_build.clone, "build", "--preset", "tiny", "--json")
    assert done.returncode == 2
    answer = json.loads(done.stdout)
    assert answer["exit_code"] == 2
    assert "min_topp1" in answer["error"]
    assert done.stderr.count("min_topp1") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "content",
    ["root: [", "- 1\n", "devices: local\n", b"\xff", None],
    ids=["YAML", "list", "type", "bytes", "none"],
)
def test_a_broken_workspace_stops_no_other(tiny_build, content):
    """Someone's broken workspaces/NAME is its own trouble: another one's build goes on, `doctor` names it."""
    broken = tiny_build.clone / "workspaces" / "broken"
    broken.mkdir(parents=True)
    (broken / "dvc.yaml").symlink_to("../../dvc.yaml")
    if content is None:
        (broken / "params.yaml").mkdir()
    else:
        (broken / "params.yaml").write_bytes(content.encode() if isinstance(content, str) else content)
    try:
        done = edgeloop(tiny_build.clone, "build", "--preset", "tiny")
        assert done.returncode == 0, done.stderr
        assert "nothing to do" in done.stdout
        own = edgeloop(tiny_build.clone, "build", "--preset", "broken", "--json")
        assert own.returncode == 2, own.stderr
        assert "broken/params.yaml" in json.loads(own.stdout)["error"]
    finally:
        shutil.rmtree(tiny_build.clone / "workspaces")


def test_killed_builds_and_a_second_clone_come_to_the_same_bytes(tiny_build, make_clone):
    """Killed twice (-9) in the middle of a stage, a build in a second clone ends with the same hashes."""
    clone = make_clone()
    workspace = clone / "presets" / "tiny"
    for stage in ("prepare", "train"):
        build = _started(stage, clone)
        servers = [p for p in psutil.Process(build.pid).children() if "flows.servers.keeper" in p.cmdline()]
        servers += servers[0].children(recursive=True)
        assert any("uvicorn" in server.cmdline() for server in servers)
        os.killpg(build.pid, signal.SIGKILL)
        build.wait()
        assert psutil.wait_procs(servers, timeout=60)[1] == []
    done = edgeloop(clone, "build", "--preset", "tiny", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert _outs(workspace) == _outs(tiny_build.workspace)
    client = _client(clone)
    runs = client.search_runs([client.get_experiment_by_name("edgeloop-tiny").experiment_id])
    assert [
        r.data.tags["stage"] for r in runs if r.info.status == "KILLED" and r.data.tags["kind"] == "stage"
    ]


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_build_leaves_no_process(make_clone, ending):
    """A signal to the build alone, from a service manager or closed terminal, ends its stage and server."""
    clone = make_clone()
    build = _started("train", clone)
    started = psutil.Process(build.pid).children(recursive=True)
    assert any("uvicorn" in process.cmdline() for process in started)
    build.send_signal(ending)
    assert build.wait(60) == 130
    _, alive = psutil.wait_procs(started, timeout=60)
    assert alive == []
    shutil.rmtree(clone)


def _started(stage: str, clone: Path) -> subprocess.Popen[bytes]:
    """A build in a process group of its own that is computing `stage`."""
    build = subprocess.Popen(
        [sys.executable, "-m", "flows", "build", "--preset", "tiny"],
        cwd=clone,
        env=environment(clone),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while not list((clone / ".edgeloop" / "spool").glob(f"*/{stage}-*.jsonl")):
        assert build.poll() is None, f"the build ended before {stage}"
        time.sleep(0.05)
    return build


def test_a_missing_source_is_named(make_clone):
    """A preset whose image set is not there says where it was looked for."""
    clone = make_clone()
    done = edgeloop(clone, "build", "--preset", "grocery")
    assert done.returncode == 2
    assert "grocery256.tar" in done.stderr
    shutil.rmtree(clone)


def test_an_unknown_preset_is_refused(tiny_build):
    """The names there are stand in the error."""
    done = edgeloop(tiny_build.clone, "build", "--preset", "grocerry")
    assert done.returncode == 2
    assert "grocerry" in done.stderr
    assert "grocery" in done.stderr.split("allowed:")[1]
