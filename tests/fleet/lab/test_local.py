"""This host as a device: real processes, real engine."""

import os
import re

import pytest

from fleet.device.bench import RawRun
from fleet.device.engine import ENGINE_VERSION, RuntimeConfig
from fleet.device.errors import EngineError, UserError
from fleet.device.preprocess import Preprocess
from fleet.lab.devices import open_device
from fleet.lab.local import LocalDevice
from fleet.lab.schedule import Job


def bench(job, queries=30, preprocess=None):
    options = {"queries": queries, "preprocess": preprocess, "seed": 0}
    raw = LocalDevice().run("fleet.device.bench", job.options() | options, model=job.model)
    return RawRun.from_dict(raw)


def test_a_run_says_what_it_ran(model):
    """Counts, config, shapes and times come from the process itself; memory is that of the model alone."""
    got = bench(Job(model=model, config=RuntimeConfig(precision="low")), 40, Preprocess(size_px=16).to_dict())
    assert (got.engine_version, got.config["precision"]) == (ENGINE_VERSION, "low")
    assert got.inputs == {"input": [1, 3, 16, 16]}
    assert (len(got.latency_ms), len(got.end_to_end_ms)) == (40, 40)
    assert min(got.latency_ms) > 0
    assert sum(got.latency_ms) <= got.steady_s * 1e3
    assert got.warmup_queries >= 15
    assert 0 <= got.load_memory_mb <= got.peak_memory_mb < 100  # python and its libraries take more


def test_an_open_shape_is_asked_for(open_model):
    """A latency at a made-up size would be nobody's: refused with the option that says it."""
    with pytest.raises(UserError, match=r"--shape input=1,3,\?,\?"):
        bench(Job(model=open_model))
    got = bench(Job(model=open_model, shapes={"input": (1, 3, 20, 18)}))
    assert got.inputs == {"input": [1, 3, 20, 18]}


def test_an_unknown_input_is_named(model):
    """The process's user error arrives as one, with its parts."""
    with pytest.raises(UserError) as error:
        bench(Job(model=model, shapes={"images": (1, 3, 16, 16)}))
    assert "'images'" in error.value.got
    assert "'input'" in error.value.allowed


def test_a_record_for_another_size_is_refused(model):
    """Before anything is measured."""
    with pytest.raises(UserError, match=r"\(1, 3, 32, 32\)"):
        bench(Job(model=model), preprocess=Preprocess(size_px=32).to_dict())


@pytest.mark.parametrize("content", [b"not a model" * 100, b"\x00" * 4096], ids=["text", "zeros"])
def test_a_file_that_is_no_model_is_an_engine_error(tmp_path, content):
    """The engine's refusal, or its crash, is one error and no traceback."""
    path = tmp_path / "garbage.mnn"
    path.write_bytes(content)
    with pytest.raises(EngineError, match=r"garbage\.mnn") as error:
        bench(Job(model=path))
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed with SIGSEGV"),
        ("", "gave no answer"),
        ("print('[1]')", "a list is no answer"),
        ("raise MemoryError('no room')", "exited with 1\n.*\n.*no room"),
    ],
    ids=["crash", "silence", "nonsense", "bug"],
)
def test_a_program_that_fails_is_one_error(tmp_path, monkeypatch, code, said):
    """How it ended and its last words, whatever it did instead of answering."""
    (tmp_path / "broken_program.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineError) as error:
        LocalDevice().run("broken_program", {})
    assert re.search(said, str(error.value), re.DOTALL)


def test_a_folder_named_fleet_around_the_user_is_not_run(tmp_path, monkeypatch, model):
    """The programs are those of this code, wherever `edgeloop` is called."""
    (tmp_path / "fleet" / "device").mkdir(parents=True)
    (tmp_path / "fleet" / "device" / "bench.py").write_text("raise SystemExit('another')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert len(bench(Job(model=model)).latency_ms) == 30


def test_only_this_host_is_known():
    """A device of another name is refused with what to do."""
    assert open_device("local").name == "local"
    with pytest.raises(UserError, match="phone"):
        open_device("phone")


def test_identity_is_the_same_twice():
    """Stable facts only: else each build would measure again."""
    first, second = (LocalDevice().run("fleet.device.identity", {}) for _ in range(2))
    assert first == second
    assert first["engine_version"] == ENGINE_VERSION
    assert first["engine_bytes"] > 1_000_000
    assert first["cores_count"] == os.cpu_count()
