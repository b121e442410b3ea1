"""The walk as a Prefect flow: what is tried again, who measures, which server is used, what its pages get."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from clones import ROOT, environment
from mlflow.exceptions import MlflowException

from fleet.device.errors import EngineError, UserError
from flows import artifacts, device_slot, stages, walk
from flows.progress import Step, told
from flows.servers import keeper, prefect_server
from tasks.progress import track
from tasks.workspace import Workspace

NOTHING = stages.Plan(upstream={}, stale=frozenset(), always=frozenset())
GATE = {"verdict": "pass", "checks": []}


@pytest.fixture(autouse=True)
def environ():
    """What a walk sets for its process does not reach the next test."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A repository whose Prefect server is kept for the tests of this module."""
    folder = tmp_path_factory.mktemp("home")
    (folder / ".dvc").mkdir()
    with prefect_server.in_use(folder):
        yield folder


def _walk(home: Path, monkeypatch, register, plan=NOTHING) -> walk.Walked:
    monkeypatch.setattr(walk, "variants", lambda reports: [])
    steps = walk.Steps(ready=lambda: None, judge=lambda: GATE, register=register, links=lambda version: ["x"])
    return walk.walk(Workspace(name="w", path=home, repository=home), plan, "build-test", steps)


def test_a_registration_is_tried_again_while_the_store_fails(home, monkeypatch, capsys):
    """Twice the store is unavailable, then it is there: the build ends well, and said what it did."""
    monkeypatch.setattr(walk, "RETRY_AFTER_S", (0.1, 0.1))
    troubles = [MlflowException("no connection", error_code=1), ConnectionResetError("by peer")]

    def register():
        if troubles:
            raise troubles.pop(0)
        return {"name": "edgeloop-w", "version": 7}

    assert _walk(home, monkeypatch, register).registered == {"name": "edgeloop-w", "version": 7}
    assert capsys.readouterr().err.count("trying again") == 2


@pytest.mark.parametrize(
    ("error", "times"),
    [
        (ConnectionResetError("by peer"), 3),
        (UserError("the gate refused", allowed="a", next_step="b"), 1),
        (MlflowException("no such thing", error_code=1000), 1),
        (OSError(28, "No space left on device"), 1),
        (KeyError("a bug"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_retries_are_bounded_and_for_the_stores_trouble_only(home, monkeypatch, error, times):
    """What asking again cannot mend is raised at once, as it was; the store's trouble after the last try."""
    monkeypatch.setattr(walk, "RETRY_AFTER_S", (0.1, 0.1))
    asked = []

    def register():
        asked.append(1)
        raise error

    with pytest.raises(type(error)) as raised:
        _walk(home, monkeypatch, register)
    assert str(raised.value) == str(error)
    assert len(asked) == times


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ConnectionResetError("even so")])
def test_an_error_of_a_stage_stops_the_build(home, monkeypatch, error):
    """A stage fails once, for it computes the same from the same; those after it do not run."""
    ran = []

    def reproduce(workspace, stage, build_id, more):
        ran.append(stage)
        raise error

    monkeypatch.setattr(stages, "reproduce", reproduce)
    monkeypatch.setattr(stages, "locked_outs", lambda workspace: {})
    plan = stages.Plan(
        upstream={"a": frozenset(), "b": frozenset({"a"})}, stale=frozenset({"a", "b"}), always=frozenset()
    )
    with pytest.raises(OSError, match=error.args[-1]):
        _walk(home, monkeypatch, dict, plan)
    assert ran == ["a"]


def test_a_server_named_by_the_environment_is_used_or_said_to_be_missing(home, monkeypatch, tmp_path):
    """PREFECT_API_URL of a running server: no other is started; of none: one clear error."""
    url = prefect_server.running(home)
    monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
    with prefect_server.in_use(tmp_path) as server:
        assert server == prefect_server.PrefectServer(url=url, own=False)
    assert not (tmp_path / ".edgeloop").exists()
    monkeypatch.setenv("PREFECT_API_URL", "http://me:s3cret@127.0.0.1:9/api")
    with pytest.raises(UserError, match="does not answer") as raised, prefect_server.in_use(tmp_path):
        pass
    assert "s3cret" not in str(raised.value)
    for wrong in ("prefect/api", "http://127.0.0.1:port/api", "http://[::1/api"):
        monkeypatch.setenv("PREFECT_API_URL", wrong)
        with pytest.raises(UserError, match="does not answer"), prefect_server.in_use(tmp_path):
            pass


def test_a_server_that_cannot_start_is_one_error(tmp_path):
    """A damaged database: where the server says why."""
    state = tmp_path / ".edgeloop" / "prefect"
    state.mkdir(parents=True)
    (state / "prefect.db").write_bytes(b"\xff" * 5000)
    with pytest.raises(EngineError, match=r"server\.log"), prefect_server.in_use(tmp_path):
        pass
    assert b"database" in (state / keeper.LOG).read_bytes()


_HOLD = """
import sys
from pathlib import Path
from flows import device_slot
from flows.servers import prefect_server
with prefect_server.in_use(Path(sys.argv[1])) as server:
    from prefect.settings import PREFECT_API_URL, temporary_settings
    from prefect.events.worker import EventsWorker
    with temporary_settings({PREFECT_API_URL: server.api_url}):
        with device_slot.held("benchmark@local", True, None):
            print("holds", flush=True)
            sys.stdin.readline()
        EventsWorker.drain_all(timeout=10)
"""


def _holder(home: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(home)],
        env=environment(ROOT) | {"PREFECT_LOGGING_LEVEL": "CRITICAL"},  # as a build has it
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_second_to_measure_waits_and_says_so(home):
    """One slot a device: the second process has it when the first is done."""
    first, second = _holder(home), None
    try:
        assert first.stdout.readline() == "holds\n"
        second = _holder(home)
        said = iter(second.stderr.readline, "")  # Prefect may say first that its server refused
        assert any("another build measures on device local; waiting" in line for line in said)
        first.communicate("done\n")
        assert second.stdout.readline() == "holds\n"
        second.communicate("done\n")
        assert second.returncode == 0
    finally:
        for process in filter(None, (first, second)):
            process.kill()


def test_the_slot_of_a_killed_holder_is_free_again(tmp_path):
    """Killed (-9), even as the server's only user, which ends with it: the next server knows of the lease."""
    (tmp_path / ".dvc").mkdir()
    first = _holder(tmp_path)
    assert first.stdout.readline() == "holds\n"
    family = psutil.Process(first.pid).children(recursive=True)
    first.kill()
    first.wait()
    assert psutil.wait_procs(family, timeout=120)[1] == []
    second = _holder(tmp_path)
    try:
        assert second.stdout.readline() == "holds\n"
    finally:
        second.communicate("done\n")


def test_only_the_benchmark_takes_a_slot():
    """A slot a device; on a server of several machines `local` is one on each."""
    assert [device_slot.device_of(stage) for stage in ("benchmark@local", "benchmark@pixel", "prune")] == [
        "local",
        "pixel",
        None,
    ]
    assert device_slot.limit_name("local", own_server=True) == "device-local"
    assert device_slot.limit_name("local", own_server=False) != "device-local"
    assert device_slot.limit_name("pixel", own_server=False) == "device-pixel"


def test_a_key_is_valid_and_its_workspaces_own():
    """Prefect takes a-z, 0-9 and dashes; two workspaces never share a page."""
    names = ["digits", "My_shoes", "my-shoes", "my.shoes", "Ünïcode", "___"]
    keys = [artifacts.key("result", name) for name in names]
    assert keys[0] == "result-digits"
    assert keys[2] == "result-my-shoes"
    assert len(set(keys)) == len(names)
    assert all(set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789-") for key in keys)


def _check(name: str, verdict: str, **values) -> dict:
    """A check of reports/gate.json."""
    empty = {"measured": None, "threshold": None, "unit": "", "evidence": "", "required": True}
    return empty | values | {"name": name, "verdict": verdict}


def test_a_refusal_says_why_before_anything_else():
    """Verdict, reasons, variants; a bar in a name does not break the table."""
    gate = {
        "verdict": "fail",
        "checks": [
            _check("a|b", "fail", measured=0.4, unit="%", threshold=0.9, evidence="parity.json"),
            _check("needed", "not measured", evidence="no report speaks of it"),
            _check("wished for", "not measured", evidence="no continuous run", required=False),
            _check("fine", "pass", measured=1, threshold=1),
        ],
    }
    text = artifacts.result_markdown(artifacts.Result(gate=gate, variants=[], registered=None), ["here"])
    assert text.startswith("## Gate: fail")
    assert r"| a\|b | 0.4 %, threshold 0.9; parity.json |" in text
    assert "| needed | not measured; no report speaks of it |" in text
    assert "fine" not in text
    assert "wished for" not in text
    assert "Not registered." in text
    assert text.index("refused because") < text.index("variant")


def test_what_may_run_is_counted():
    """What is stale and all that reads from it, however indirectly."""
    upstream = {"a": frozenset(), "b": frozenset({"a"}), "c": frozenset({"b"}), "d": frozenset()}
    plan = stages.Plan(upstream=upstream, stale=frozenset({"b"}), always=frozenset({"d"}))
    assert walk.may_run(plan) == ["b", "c", "d"]


def test_a_long_stage_is_told_of(monkeypatch, capsys):
    """A line when it begins, and lines while it goes on, with how far its loop is."""
    monkeypatch.setattr("flows.progress.EVERY_S", 0.05)
    said, far = [], threading.Event()

    def tell(step, text):
        said.append(text)
        if "epoch 1, 1/3" in text:
            far.set()

    with told(Step(stage="train", number=3, count=11), tell) as env:
        monkeypatch.setenv(*next(iter(env.items())))
        monkeypatch.setattr("tasks.progress._TELL_EVERY_S", 0.0)
        for number, _ in enumerate(track(range(3), "epoch 1", 3)):
            assert number != 1 or far.wait(60)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[3/11] train: train the float model"
    assert any(line.startswith("[3/11] train: ") and line.endswith(" s, epoch 1, 1/3") for line in lines)
    assert Step(stage="train", number=3, count=11).percent_before == 18.2
