"""Tracking: what a stage says arrives in MLflow, and MLflow's troubles do not reach the stage."""

import base64
import contextlib
import hashlib
import json
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import traceback
import types
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from mlflow import MlflowClient
from sqlalchemy import make_url

from fleet.device.errors import UserError
from tasks import tracking, tracking_writer
from tasks.mlflow_store import Store

ROOT = Path(__file__).resolve().parents[2]
STAGE = """
import sys, time
from pathlib import Path
from tasks.tracking import stage_run
with stage_run(sys.argv[1], {"epochs": 3, "augment": {"flip": True}}) as run:
    for step in range(5):
        run.metrics({"loss": 1.0 / (step + 1)}, step=step)
    Path("curve.csv").write_text("step,loss\\n")
    run.artifact(Path("curve.csv"))
    run.tags({"colour": "blue"})
    print("computing", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A folder outside any repository, whose store exists already."""
    folder = tmp_path_factory.mktemp("workspace")
    Store(tracking.tracking_uri(folder), tracking.state_folder(folder))
    return folder


@pytest.fixture(scope="module")
def finished(workspace):
    """The id of a build of one stage that has ended."""
    assert _start(workspace, "train", build="all").wait() == 0
    return "all"


def _start(
    workspace: Path, stage: str, *, build: str, seconds: float = 0.0, **more: str
) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "EDGELOOP_", "DVC_"))}
    env = kept | {"PYTHONPATH": str(ROOT), tracking.BUILD_ID: build} | more
    command = [sys.executable, "-c", STAGE, stage, str(seconds)]
    return subprocess.Popen(command, cwd=workspace, env=env, stdout=subprocess.PIPE, text=True)


def _runs(workspace: Path, build: str) -> dict:
    assert tracking.wait_until_written(tracking.spool_folder(workspace, build), 60)
    client = MlflowClient(tracking.tracking_uri(workspace))
    experiment = client.get_experiment_by_name(f"edgeloop-{workspace.name}")
    found = client.search_runs([experiment.experiment_id], f"tags.build_id = '{build}'")
    return {run.info.run_name: run for run in found}


def test_a_stage_is_a_nested_run_with_all_it_said(workspace, finished):
    """Flattened params, each step of a curve, artifact, tags and origin are in the run under its build."""
    runs = _runs(workspace, finished)
    stage, parent = runs["train"], runs[finished]
    assert stage.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert (stage.info.status, parent.info.status) == ("FINISHED", "FINISHED")
    assert stage.data.params == {"epochs": "3", "augment.flip": "True"}
    assert stage.data.tags["colour"] == "blue"
    assert stage.data.tags["engine_version"] == "3.6.1"
    client = MlflowClient(tracking.tracking_uri(workspace))
    curve = client.get_metric_history(stage.info.run_id, "loss")
    assert [(point.step, point.value) for point in curve] == [(s, 1.0 / (s + 1)) for s in range(5)]
    assert [file.path for file in client.list_artifacts(stage.info.run_id)] == ["curve.csv"]


def test_two_stages_at_once_share_one_build(workspace):
    """Two processes writing to one SQLite file lose nothing and make one parent."""
    both = [_start(workspace, stage, build="both", seconds=0.5) for stage in ("a", "b")]
    assert [process.wait() for process in both] == [0, 0]
    runs = _runs(workspace, "both")
    assert set(runs) == {"both", "a", "b"}
    assert {runs[s].data.tags["mlflow.parentRunId"] for s in "ab"} == {runs["both"].info.run_id}


def test_a_killed_stage_is_marked_killed(workspace):
    """kill -9 leaves no run that looks as if it were still going on, and keeps what was said before."""
    stage = _start(workspace, "train", build="killed", seconds=60)
    assert stage.stdout.readline() == "computing\n"
    stage.kill()
    stage.wait()
    run = _runs(workspace, "killed")["train"]
    assert run.info.status == "KILLED"
    assert run.data.metrics["loss"] == pytest.approx(0.2)


def test_a_failed_stage_says_why(workspace, monkeypatch):
    """An error raised on purpose ends the run as FAILED with its text, and goes on to the caller."""
    monkeypatch.chdir(workspace)
    monkeypatch.setenv(tracking.BUILD_ID, "failed")
    error = UserError("no images", allowed="some", next_step="add them")
    with pytest.raises(UserError, match="no images"), tracking.stage_run("prepare", {}):
        raise error
    run = _runs(workspace, "failed")["prepare"]
    assert run.info.status == "FAILED"
    assert run.data.tags["error"] == str(error)


def test_an_unreachable_server_is_an_error_before_the_work(workspace, monkeypatch):
    """A store that does not answer is told at once, not after an hour of training."""
    with contextlib.closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.chdir(workspace)
        with (
            pytest.raises(UserError, match=r"MLflow at http://127\.0\.0\.1"),
            tracking.stage_run("train", {}),
        ):
            pytest.fail("the work has started")


def test_what_was_not_delivered_is_sent_by_a_later_build(workspace):
    """A spool left behind by a writer that could not deliver is emptied by the next build's writer."""
    left = tracking.spool_folder(workspace, "left")
    left.mkdir(parents=True)
    opening = {"stage": "gate", "params": {}, "build_id": "left", "workspace": str(workspace), "address": ""}
    lines = [
        opening | {"process": [0, 0.0], "time_ms": 1000},
        {"metrics": {"checks": 7.0}, "step": 0, "time_ms": 1500},
    ]
    lines.append({"status": "FINISHED", "time_ms": 2000})
    (left / "gate-1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert _start(workspace, "train", build="next").wait() == 0
    run = _runs(workspace, "left")["gate"]
    assert run.data.metrics == {"checks": 7.0}
    assert (run.info.start_time, run.info.end_time) == (1000, 2000)


def test_a_store_that_fails_keeps_the_spool(tmp_path):
    """When the store stays away after the build has ended, the writer gives up and deletes nothing."""
    folder = tmp_path / "spool" / "build"
    folder.mkdir(parents=True)
    opening = {
        "stage": "s",
        "params": {},
        "build_id": "b",
        "workspace": str(tmp_path),
        "address": "",
        "time_ms": 1,
    }
    file = folder / "s-1.jsonl"
    file.write_text(json.dumps(opening | {"process": [0, 0.0]}) + "\n", encoding="utf-8")
    (tmp_path / "file").touch()
    missing = f"sqlite:///{tmp_path}/file/mlflow.db"  # below a file there is no folder
    tracking_writer.carry(tracking_writer.Spool(folder), missing, [0, 0.0], grace_s=0.0)
    assert file.exists()


def test_what_is_told_is_what_was_there_then(tmp_path, monkeypatch):
    """Files are copied when told, origin is taken when the stage begins; a later delivery changes neither."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_STAGE", raising=False)
    monkeypatch.setenv(tracking.BUILD_ID, "then")
    monkeypatch.setattr(tracking, "start_writer", lambda folder, owner, uri: None)
    report = tmp_path / "report.json"
    (tmp_path / "dvc.lock").write_text("then", encoding="utf-8")
    with tracking.stage_run("gate", {}) as run:
        report.write_text("first", encoding="utf-8")
        run.artifact(report)
        report.write_text("then", encoding="utf-8")
        run.artifact(report)
    report.write_text("now", encoding="utf-8")
    (tmp_path / "dvc.lock").write_text("now", encoding="utf-8")
    (file,) = tracking.spool_folder(tmp_path, "then").glob("*.jsonl")
    client = _Client()
    assert tracking_writer.StageFile(file).deliver(_store(client))
    assert client.artifacts == [("report.json", "first"), ("report.json", "then")]
    assert client.tags["dvc_lock_sha256"] == hashlib.sha256(b"then").hexdigest()
    assert list(file.parent.glob("gate-*")) == []  # nothing is left of it


class _Client:
    """MLflow's client, as far as the writer uses it: keeps what it is given."""

    def __init__(self, *, failures: int = 0) -> None:
        """The first `failures` artifacts are not taken."""
        self.failures, self.artifacts, self.ends, self.tags = failures, [], [], {}

    def create_run(self, experiment, *, start_time, tags, run_name):
        self.tags = tags
        return SimpleNamespace(info=SimpleNamespace(run_id=run_name))

    def log_batch(self, run_id, metrics=(), params=(), tags=()):
        pass

    def log_artifact(self, run_id, path):
        if self.failures:
            self.failures -= 1
            raise OSError("the upload broke off")
        self.artifacts.append((Path(path).name, Path(path).read_text(encoding="utf-8")))

    def set_terminated(self, run_id, status, end_time):
        self.ends.append((run_id, status, end_time))


def _store(client: _Client) -> SimpleNamespace:
    return SimpleNamespace(
        client=client,
        call=lambda action: action(),
        experiment=lambda workspace: "e",
        parent_run=lambda workspace, build_id, started_ms: "build",
    )


def _ended_stage(folder: Path, name: str, **more) -> Path:
    """The spool file of a stage that finished."""
    opening = {"stage": name, "params": {}, "build_id": "b", "workspace": str(folder), "address": ""}
    lines = [opening | {"process": [0, 0.0], "time_ms": 1}, more, {"status": "FINISHED", "time_ms": 2}]
    file = folder / f"{name}-1.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


def test_a_finished_run_stays_finished_when_an_upload_fails(tmp_path):
    """What is sent again ends as the stage did, by the same writer or by a later one."""
    (tmp_path / "curve.csv").touch()
    file, client = _ended_stage(tmp_path, "train", artifact=str(tmp_path / "curve.csv")), _Client(failures=2)
    writer = tracking_writer.StageFile(file)
    for _ in range(client.failures):
        with pytest.raises(OSError, match="broke off"):
            writer.deliver(_store(client))
    assert tracking_writer.StageFile(file).deliver(_store(client))
    assert client.ends == [("train", "FINISHED", 2), ("build", "FINISHED", 2)]
    assert [name for name, _ in client.artifacts] == ["curve.csv"]


def test_a_stage_that_fails_to_arrive_does_not_bring_back_the_one_before(tmp_path):
    """A delivered file is done with, whatever happens to the next one in the same round."""
    _ended_stage(tmp_path, "a")
    (tmp_path / "curve.csv").touch()
    _ended_stage(tmp_path, "b", artifact=str(tmp_path / "curve.csv"))
    client, spool = _Client(failures=1), tracking_writer.Spool(tmp_path)
    with pytest.raises(OSError, match="broke off"):
        spool.deliver(_store(client))
    spool.deliver(_store(client))
    assert [run for run, _, _ in client.ends] == ["a", "build", "b", "build"]
    assert spool.pending() == []


def test_a_store_s_password_is_on_no_command_line(tmp_path, monkeypatch):
    """What `ps` shows to everybody has no URI; the child finds it in its environment."""
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: started.append((command, more)))
    uri = "postgresql://me:s3cret@db.example.org/runs"
    tracking.start_writer(tmp_path, psutil.Process(), uri)
    ((command, more),) = started
    assert not any("s3cret" in word for word in command)
    assert more["env"]["MLFLOW_TRACKING_URI"] == uri


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("http://me:s3cret@host:5000/x", "http://***@host:5000/x"),
        ("postgresql://db/runs?user=me&password=s3cret", "postgresql://db/runs"),
        ("postgresql://me:s3#cret@db/runs", "postgresql://***@db/runs"),
        ("postgresql://me:s3/cret@db", "postgresql://***@db"),
        ("postgresql://me:s3?cret@db/runs", "postgresql://***@db/runs"),
        ("postgresql://me:s3@cret@db/runs?x=1", "postgresql://***@db/runs"),
        ("postgresql://db/runs?user=me&password=s3@cret", "postgresql://***"),
        ("http://[me:s3cret@host", "http://***@host"),
        ("me:s3cret@host", "***@host"),
        ("sqlite:////tmp/a b/mlflow.db", "sqlite:////tmp/a b/mlflow.db"),
        ("sqlite:////tmp/a@b/mlflow.db", "sqlite:////tmp/a@b/mlflow.db"),
    ],
)
def test_a_password_is_not_printed(uri, said):
    """Errors and warnings name the store without user, password and query."""
    assert tracking.shown(uri) == said


@pytest.mark.parametrize("answers", [True, False])
def test_a_server_is_asked_as_the_user_of_its_uri(answers):
    """As MLflow's own client does it; when it does not answer, the error is one, and tells no password."""
    asked = []

    class Health(BaseHTTPRequestHandler):
        """Keeps what it is asked."""

        def do_GET(self):
            asked.append((self.path, self.headers["Authorization"], self.headers["Host"]))
            self.send_response(200 if answers else 403)
            self.end_headers()

        def log_message(self, *words):
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_port}"
        with contextlib.nullcontext() if answers else pytest.raises(UserError, match="403") as refused:
            tracking.check_store(f"http://me:s3%23cret@{place}/mlflow/")
        server.shutdown()
    assert asked == [("/mlflow/health", "Basic " + base64.b64encode(b"me:s3#cret").decode(), place)]
    assert answers or "s3" not in str(refused.value)


@pytest.mark.parametrize(
    "uri",
    [
        "http://me:s3cret@127.0.0.1:9",
        "http://me:s3cret@127.0.0.1:port",
        "http://me:#s3cret@127.0.0.1",
        "http://me:/s3cret@127.0.0.1",
        "http://127.0.0.1/s3cret s3cret@127.0.0.1",
        "http://[me:s3cret@127.0.0.1",
        "http://me:s3cret\u2100@127.0.0.1",
        "http://me:s3cret@" + "x" * 70,
        "s3cret@127.0.0.1",
    ],
)
def test_a_store_that_cannot_be_asked_is_an_error_without_its_password(uri):
    """Nothing listens there, or it is no address at all; neither the text nor its cause has the password."""
    with pytest.raises(UserError, match="MLflow at") as refused:
        tracking.check_store(uri)
    assert "s3cret" not in "".join(traceback.format_exception(refused.value))


def test_what_is_no_web_server_is_an_error():
    """A port that speaks something else, as a database does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].sendall(b"SSH-2.0\r\n"), daemon=True).start()
        with pytest.raises(UserError, match="no web server"):
            tracking.check_store(f"http://127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("sqlite:///runs.db", "sqlite:///{here}/runs.db"),
        ("sqlite:///sub/runs.db?timeout=9", "sqlite:///{here}/sub/runs.db?timeout=9"),
        ("sqlite:////var/runs.db", "sqlite:////var/runs.db"),
        ("http://runs.db", "http://runs.db"),
    ],
)
def test_a_relative_file_counts_from_here(tmp_path, monkeypatch, given, meant):
    """Whatever workspace is asked for, so that all who ask mean one file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    assert tracking.tracking_uri(ROOT) == meant.format(here=tmp_path)


@pytest.mark.parametrize("name", ["a b", "what?", "#1", "100%", "a%20b"])
def test_a_repository_s_folder_may_have_any_name(tmp_path, monkeypatch, name):
    """The checks look at the file that MLflow opens: `?` and `%` mean something in a URI."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = tracking.tracking_uri(tmp_path / name)
    file = tmp_path / name / ".edgeloop" / "mlflow.db"
    assert Path(make_url(uri).database) == tracking.sqlite_file(uri) == file
    file.parent.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("create table t(x)")
    tracking.check_store(uri)
    with tracking.reading(file) as connection:
        assert connection.execute("select name from sqlite_master").fetchall() == [("t",)]
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            connection.execute("drop table t")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_writer_ends_with_its_build(workspace, finished):
    """When all is written and the build has ended, no writer and no spool folder is left."""
    folder = tracking.spool_folder(workspace, finished)
    deadline = time.monotonic() + 60
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not folder.exists()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(
        str(folder) in " ".join(p.info["cmdline"] or ()) for p in _all()
    ):
        time.sleep(0.1)
    assert not any(str(folder) in " ".join(p.info["cmdline"] or ()) for p in _all())


def _all() -> list[psutil.Process]:
    return list(psutil.process_iter(["cmdline"]))


def test_only_the_first_process_of_torchrun_speaks(workspace, monkeypatch):
    """Ranks above 0 track nothing, so a training on several machines is one run."""
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(tracking.BUILD_ID, "ranks")
    with tracking.stage_run("train", {}) as run:
        run.metrics({"loss": 1.0})
    assert not tracking.spool_folder(workspace, "ranks").exists()


def test_a_build_id_must_be_a_file_name(monkeypatch):
    """EDGELOOP_BUILD_ID becomes a folder's name; a path in it is refused."""
    monkeypatch.setenv(tracking.BUILD_ID, "../../etc")
    with pytest.raises(UserError, match="EDGELOOP_BUILD_ID"):
        tracking.current_build()


def test_a_stage_alone_is_a_build_of_its_own(monkeypatch):
    """Without DVC and without a given id, the build is this process."""
    monkeypatch.delenv(tracking.BUILD_ID, raising=False)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    build, owner = tracking.current_build()
    assert owner.pid == os.getpid()
    assert build.startswith("stage-")
    assert build.endswith(f"-{os.getpid()}")


@pytest.mark.parametrize(
    ("does", "code"), [("time.sleep(60)", -9), ("sys.exit(3)", 3), ("print('{}')", None)]
)
def test_the_child_that_hashes_inputs_ends_with_its_stage(tmp_path, monkeypatch, does, code):
    """Killed at the limit, and what went wrong is in the log; the end is told only then."""
    children, real = [], subprocess.Popen

    def start(command, **more):
        assert "tasks.provenance" in command
        told = "import sys, time; print('hashing', file=sys.stderr, flush=True); "
        children.append(real([sys.executable, "-c", told + does], **more))
        return children[0]

    for name, value in {"DVC_STAGE": "dvc.yaml:gate", tracking.BUILD_ID: "hashes"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(tracking.INPUTS, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "start_writer", lambda folder, owner, uri: None)
    monkeypatch.setattr(tracking.provenance, "origin", lambda workspace: {})
    monkeypatch.setattr(tracking, "_INPUTS_LIMIT_S", 60.0 if code != -9 else 2.0)
    monkeypatch.setattr(subprocess, "Popen", start)
    real_tell = tracking.Run.tell

    def tell(run, **message):
        assert "status" not in message or children[0].returncode is not None
        real_tell(run, **message)

    monkeypatch.setattr(tracking.Run, "tell", tell)
    with tracking.stage_run("gate", {}):
        pass
    log = (tracking.spool_folder(tmp_path, "hashes") / "writer.log").read_text(encoding="utf-8")
    assert log.startswith("hashing\n")
    assert (f"ended with {code}" in log) == (code is not None)


def test_a_torn_file_does_not_hold_back_the_others(tmp_path, capsys):
    """A spool file that a full disk tore is set aside by name; the next one is taken up."""
    (tmp_path / "prune-1.jsonl").write_bytes(b'{"stage": "pru\n')
    opening = {"stage": "train", "address": "", "workspace": str(tmp_path), "process": [0, 0], "time_ms": 1}
    (tmp_path / "train-2.jsonl").write_text(json.dumps(opening) + "\n", encoding="utf-8")
    spool = tracking_writer.Spool(tmp_path)
    spool.take_up()
    assert [path.name for path in spool.pending()] == ["train-2.jsonl"]
    assert (tmp_path / "prune-1.bad").exists()
    assert "prune-1.jsonl cannot be read" in capsys.readouterr().out


@pytest.mark.parametrize("uri", ["sqlite:///{folder}/garbage.db", "bogus://x"])
def test_a_store_that_is_none_is_refused_before_the_work(tmp_path, uri):
    """A damaged database and an unknown scheme are one clear error, not a traceback after an hour."""
    (tmp_path / "garbage.db").write_bytes(b"garbage" * 1000)
    with pytest.raises(UserError, match=r"mlflow\.db back from a copy"):
        tracking.check_store(uri.format(folder=tmp_path))


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("postgresql+psycopg2://me:s3cret@127.0.0.1/runs", "driver `psycopg2` is not installed"),
        ("mssql+pyodbc://me:s3cret@place", "driver `pyodbc` is not installed"),
        ("mysql+nothing://me:s3cret@127.0.0.1/runs", "cannot be read, or SQLAlchemy knows no such"),
        ("mysql://me:s3cret@127.0.0.1:port/runs", "cannot be read"),
    ],
)
def test_a_database_that_cannot_be_asked_is_an_error_without_its_password(uri, said):
    """No driver, an unknown one, no address: one error before the work, which does not quote the URI."""
    with pytest.raises(UserError, match=said) as refused:
        tracking.check_store(uri)
    assert "s3cret" not in str(refused.value)


def test_a_database_that_does_not_listen_is_an_error(monkeypatch):
    """With its driver installed, what is asked is whether anything listens at that address."""
    monkeypatch.setitem(sys.modules, "psycopg2", types.ModuleType("psycopg2"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        tracking.check_store(f"postgresql+psycopg2://me:s3cret@127.0.0.1:{port}/runs")
    with pytest.raises(UserError, match=r"127\.0\.0\.1.*refused"):
        tracking.check_store(f"postgresql+psycopg2://me:s3cret@127.0.0.1:{port}/runs")
