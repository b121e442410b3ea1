"""The doctor in set-ups that were broken on purpose: packages, engine, locks, stores and servers."""

import base64
import contextlib
import fcntl
import json
import os
import pty
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from dvc.fs import localfs
from dvc.rwlock import rwlock as dvc_rwlock

from fleet.device.errors import EngineError, UserError
from fleet.lab import lock
from flows.doctor import engine, environment, locks, report, repository, services
from flows.doctor.finding import Finding, guarded, in_child
from flows.doctor.table import print_findings
from tasks.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]


def only(findings):
    """The one finding of a check."""
    (finding,) = findings
    return finding


def test_a_check_that_breaks_is_a_finding_and_keeps_what_it_found():
    """Whatever a broken environment raises; an engine's error in its own words."""

    def check(error):
        yield Finding(check="first", status="ok", found="seen")
        raise error

    for error, words in (
        (AttributeError("half a module"), "AttributeError: half a module"),
        (SyntaxError("torn file"), "SyntaxError: torn file"),
        (EngineError("no session"), "no session"),
        (UserError("a", allowed="b", next_step="c"), "a; allowed: b"),
    ):
        first, second = guarded("second", lambda error=error: check(error))
        assert first.found == "seen"
        assert (second.check, second.status, second.found) == ("second", "problem", words)
        assert second.next_step


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import os; os.kill(os.getpid(), 11)", "crashed with SIGSEGV"),
        ("import no_such_package_at_all", "No module named 'no_such_package_at_all'"),
        ("import time; time.sleep(60)", "ran past its limit"),
        ("print('hello')", "ended without a word of what it found"),
    ],
)
def test_a_check_that_crashes_or_hangs_takes_nobody_with_it(tmp_path, monkeypatch, body, words):
    """As a torn engine library does when it is imported."""
    (tmp_path / "broken_check.py").write_text(body, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = only(in_child("engine", "broken_check", timeout_s=5))
    assert finding.status == "problem"
    assert words in finding.found


def test_the_doctor_itself_needs_only_python(tmp_path):
    """Without any package, as after a pip that was killed, it still says what is missing."""
    copy = tmp_path / "repository"
    for name in ("flows", "fleet", "tasks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / ".dvc").mkdir()
    (copy / "requirements.lock").write_text("numpy==1.0.0\n", encoding="utf-8")
    done = subprocess.run(
        # -S: no site-packages
        [sys.executable, "-S", "-m", "flows.doctor", "--json"],
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(copy), "PYTHONNOUSERSITE": "1"},
    )
    assert done.returncode == 2, done.stderr
    found = {f["check"]: f for f in json.loads(done.stdout)["findings"]}
    assert "numpy" in found["packages"]["found"]
    assert found["engine wheel"]["status"] == "problem"
    assert found["disk"]["found"]


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages with one in it, found before all others."""
    info = tmp_path / "edgeloop_probe-1.0.dist-info"
    info.mkdir()
    (tmp_path / "edgeloop_probe.py").write_text("x = 1\n", encoding="utf-8")
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: edgeloop-probe\nVersion: 1.0\n", encoding="utf-8"
    )
    digest = "sha256=xTyKIPSTt6pBFPyBw5cW6i3Zx2y9QiqyZ3N3Bf3hKXQ"
    record = f"edgeloop_probe.py,{digest},6\nedgeloop_probe-1.0.dist-info/METADATA,,\n"
    (info / "RECORD").write_text(record, encoding="utf-8")
    (tmp_path / "requirements.lock").write_text("edgeloop-probe==1.0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_half_installed_package_is_named(site):
    """Complete; a file gone; the list of files gone; the version gone."""

    def files():
        return {f.check: f for f in environment.check_packages(site)}

    assert files()["packages"].status == files()["package files"].status == "ok"
    (site / "edgeloop_probe.py").unlink()
    assert files()["package files"].status == "problem"
    assert "lacks edgeloop_probe.py" in files()["package files"].found
    info = site / "edgeloop_probe-1.0.dist-info"
    (info / "RECORD").unlink()
    assert "lacks its RECORD" in files()["package files"].found
    (info / "METADATA").unlink()
    assert "half installed" in files()["packages"].found


def test_byte_code_that_is_gone_is_no_finding(site):
    """pip lists it in RECORD, and Python makes it again."""
    with (site / "edgeloop_probe-1.0.dist-info" / "RECORD").open("a", encoding="utf-8") as record:
        record.write("__pycache__/edgeloop_probe.cpython-311.pyc,,\n")
    found = {f.check: f for f in environment.check_packages(site)}["package files"]
    assert found.status == "ok"


def test_an_engine_file_that_is_gone_is_named(site, monkeypatch):
    """Also where a package loads importlib_metadata, whose list of files leaves out what is missing."""
    pytest.importorskip("importlib_metadata")
    monkeypatch.setattr(engine, "_ENGINE", "edgeloop-probe")
    (site / "edgeloop_probe.py").unlink()
    finding = only(engine.check_engine_wheel())
    assert "1 of 1 files missing or changed: edgeloop_probe.py" in finding.found


def test_an_engine_file_that_changed_is_named(site, monkeypatch):
    """Held against the hash of RECORD; a package without RECORD is half installed."""
    monkeypatch.setattr(engine, "_ENGINE", "edgeloop-probe")
    finding = only(engine.check_engine_wheel())
    assert finding.status == "problem"
    assert "1 of 1 files missing or changed: edgeloop_probe.py" in finding.found
    assert "MNN==1.0" in finding.next_step
    (site / "edgeloop_probe-1.0.dist-info" / "RECORD").unlink()
    assert "half installed" in only(engine.check_engine_wheel()).found


def test_an_installed_log_client_is_a_warning(tmp_path, monkeypatch):
    """Here it lets the wheel's logger run; in another Python on PATH it shows that it did run."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert only(engine.check_phone_home()).status == "ok"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pip").write_text("", encoding="utf-8")
    other = tmp_path / "lib" / "python3.9" / "site-packages" / "aliyun"
    other.mkdir(parents=True)
    finding = only(engine.check_phone_home())
    assert finding.status == "warning"
    assert str(other) in finding.found
    (tmp_path / "aliyun").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "installed here" in only(engine.check_phone_home()).found


def test_what_steers_pip_is_named_without_its_value(monkeypatch):
    """An index URL may hold a password."""
    monkeypatch.setenv("PIP_INDEX_URL", "https://me:s3cret@example.org/simple")
    found = only(environment.check_pip()).found
    assert "PIP_INDEX_URL" in found
    assert "s3cret" not in found


def test_a_held_lock_names_its_holder_and_a_left_file_does_not(tmp_path):
    """A lock file that only lies there blocks nobody; one that a process holds is told with the process."""
    workspace = Workspace(name="digits", path=tmp_path, repository=tmp_path)
    path = tmp_path / ".edgeloop" / "train.lock"
    path.parent.mkdir()
    path.write_text("", encoding="utf-8")

    def of_train():
        return [f for f in locks.check_locks(workspace) if f.check == "lock train.lock"]

    assert of_train() == []
    with path.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        finding = only(of_train())
        assert finding.status == "warning"
        assert f"process {os.getpid()} " in finding.found
    assert of_train() == []


def test_the_device_lock_is_looked_at_where_it_lies(tmp_path, monkeypatch):
    """A measurement that runs is told, whatever this user's TMPDIR is."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(lock, "_SHARED", tmp_path / "shared")  # not the lock that a real measurement holds
    (tmp_path / "shared").mkdir()
    workspace = Workspace(name="digits", path=tmp_path, repository=tmp_path)
    with lock.exclusive(lock.lock_path("local"), "this host"):
        finding = only(f for f in locks.check_locks(workspace) if f.status == "warning")
    assert finding.check == "lock edgeloop-device-local.lock"
    assert str(tmp_path / "shared") in finding.found


def test_children_that_cannot_start_take_no_other_finding_away(tmp_path, monkeypatch):
    """No folder for what a child prints: two problems, and all that was looked at here is still said."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    found = report.examine(Workspace(name="digits", path=tmp_path, repository=tmp_path))
    broken = {f.check for f in found if f.status == "problem" and "No such file or directory" in f.found}
    assert {"engine", "workspace"} <= broken
    assert {"python", "git", "locks"} <= {f.check for f in found}


def test_dvc_entries_of_living_and_killed_processes(tmp_path):
    """A process id in DVC's list: one that runs is in the way, one that was killed is not."""
    workspace = Workspace(name="digits", path=tmp_path, repository=tmp_path)
    path = tmp_path / ".dvc" / "tmp" / "rwlock"
    path.parent.mkdir(parents=True)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid, status, words in ((os.getpid(), "warning", "works on"), (gone.pid, "ok", "was killed")):
        with dvc_rwlock(str(path.parent), localfs, "dvc repro", [], ["models"], hardlink=False):
            written = path.read_text(encoding="utf-8")  # as DVC has it
        path.write_text(written.replace(f'"pid": {os.getpid()}', f'"pid": {pid}'), encoding="utf-8")
        finding = only(f for f in locks.check_locks(workspace) if f.check == "dvc rwlock")
        assert (finding.status, words in finding.found) == (status, True)
    path.write_text("{torn", encoding="utf-8")
    torn = only(f for f in locks.check_locks(workspace) if f.check == "dvc rwlock")
    assert torn.status == "problem"
    assert f"rm {path}" in torn.next_step


def test_messages_that_wait_for_mlflow_are_counted(tmp_path):
    """What an ended build could not deliver is not lost, and the next build brings it."""
    assert only(locks.check_undelivered(tmp_path)).status == "ok"
    spool = tmp_path / ".edgeloop" / "spool" / "build-1"
    spool.mkdir(parents=True)
    (spool / "train-1.jsonl").write_text("", encoding="utf-8")
    finding = only(locks.check_undelivered(tmp_path))
    assert finding.status == "warning"
    assert "1 stages of build-1" in finding.found


def test_dvc_settings_that_do_not_parse_are_a_problem(tmp_path):
    """Of remotes a folder is looked at; a network is not called and its URL, a key perhaps, not shown."""
    (tmp_path / ".dvc").mkdir()
    config = tmp_path / ".dvc" / "config"
    config.write_text("analytics = false\n", encoding="utf-8")
    assert only(repository.check_dvc(tmp_path)).status == "problem"
    config.write_text(
        "[core]\n    analytics = false\n['remote \"far\"']\n    url = s3://key:s3cret@bucket\n"
        "['remote \"near\"']\n    url = ../store\n",
        encoding="utf-8",
    )
    found = {f.check: f for f in repository.check_dvc(tmp_path)}
    assert found["dvc"].status == "ok"
    assert "not called" in found["dvc remote far"].found
    assert "s3cret" not in found["dvc remote far"].found
    assert str(tmp_path / "store") in found["dvc remote near"].found


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An embedded store with the tables' revision alone."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    database = tmp_path / ".edgeloop" / "mlflow.db"
    database.parent.mkdir()
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("create table alembic_version(version_num text)")
        connection.execute("insert into alembic_version values ('unknown1')")
    return database


def of_store(database):
    """Findings about the store, by name."""
    return {f.check: f for f in services.check_mlflow(database.parents[1])}


def test_the_store_s_schema_is_held_against_the_installed_mlflow(store):
    """The newest revision is right, an older one wants an upgrade, an unknown one is of a newer MLflow."""
    revisions, heads = services._revisions()
    assert len(heads) == 1
    assert len(revisions) > 20
    for revision, status in (
        (next(iter(heads)), "ok"),
        (min(revisions - heads), "warning"),
        ("x", "problem"),
    ):
        with contextlib.closing(sqlite3.connect(store)) as connection, connection:
            connection.execute("update alembic_version set version_num = ?", (revision,))
        assert of_store(store)["mlflow schema"].status == status


def test_a_store_that_somebody_writes_is_locked(store):
    """Found without writing to it."""
    before = store.read_bytes()
    assert of_store(store)["mlflow lock"].status == "ok"
    with contextlib.closing(sqlite3.connect(store)) as writer:
        writer.execute("begin immediate")
        found = of_store(store)
    assert found["mlflow"].status == "ok"
    assert found["mlflow lock"].status == "warning"
    assert store.read_bytes() == before


class _Handler(BaseHTTPRequestHandler):
    """A server whose health anybody may ask, and whose interface wants a password."""

    def do_GET(self):
        wanted = base64.b64encode(b"me:s3cret").decode()
        allowed = self.headers.get("Authorization") == f"Basic {wanted}"
        login = self.path.startswith("/login")
        code = 302 if login else 200 if allowed or "health" in self.path else 401
        self.send_response(code)
        if login:
            self.send_header("Location", "/welcome")
        self.end_headers()
        if code == 200:
            self.wfile.write(b"{}")

    def log_message(self, *arguments):
        pass


@pytest.fixture
def server():
    """Its host and port."""
    with HTTPServer(("127.0.0.1", 0), _Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{made.server_port}"
        made.shutdown()


@pytest.mark.parametrize(
    ("variable", "check"),
    [("MLFLOW_TRACKING_URI", services.check_mlflow), ("PREFECT_API_URL", services.check_prefect)],
)
def test_a_refused_password_is_not_an_absent_server(tmp_path, monkeypatch, server, variable, check):
    """401 asks for credentials, nothing there asks for a server, and a password is shown in no case."""
    secrets = {"MLFLOW_TRACKING_PASSWORD": "s3cret", "PREFECT_API_AUTH_STRING": "me:s3cret"}
    for name in (*secrets, "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_TOKEN", "PREFECT_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    rows = [
        (f"http://{server}", "refuses us: HTTP 401"),
        (f"http://me:wr0ng@{server}", "refuses us: HTTP 401"),
        (f"http://me:s3cret@{server}", "answers"),
        (f"http://{server}/login", "login page"),
        ("http://me:s3cret@127.0.0.1:9", "is absent"),
        ("http://me:s3cret@no-such-host.invalid", "is absent"),
        ("http://me:s3#cret@127.0.0.1:9", "cannot be read"),
    ]
    for uri, words in rows:
        monkeypatch.setenv(variable, uri)
        finding = only(check(tmp_path))
        assert words in finding.found, (uri, finding)
        assert (finding.status == "ok") is words.endswith("answers")
        assert not {"s3cret", "wr0ng", "cret"} & set(finding.found.replace("@", " ").split())
        assert "cret" not in finding.found + finding.next_step
    monkeypatch.setenv(variable, f"http://{server}")
    for name, value in (secrets | {"MLFLOW_TRACKING_USERNAME": "me"}).items():
        monkeypatch.setenv(name, value)
    assert only(check(tmp_path)).status == "ok"


LONG = Finding(
    check="workspace",
    status="problem",
    found=f"/{'very-long-folder-name/' * 12}params.yaml: [torn]",
    next_step="mend it",
)


def test_long_paths_are_whole_in_a_pipe(capsys):
    """One line, nothing cut, nothing taken for markup."""
    print_findings([LONG])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(LONG.found)
    assert lines[1].strip() == "next: mend it"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_long_paths_wrap_in_a_terminal(columns):
    """However narrow it is, every letter is there and no line is wider than it."""
    script = (
        "from flows.doctor.table import print_findings; from tests.flows.test_doctor_broken import LONG;"
        "print_findings([LONG])"
    )
    reader, writer = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, stdout=writer, env=environment, check=True
    )
    os.close(writer)
    shown = b""
    with contextlib.suppress(OSError):  # Linux: the terminal is gone
        while part := os.read(reader, 1 << 16):
            shown += part
    os.close(reader)
    lines = shown.decode().splitlines()
    assert done.returncode == 0
    assert max(map(len, lines)) <= columns
    assert LONG.found.replace(" ", "") in "".join("".join(lines).split())
