"""Children that crash, hang, start others or take too much end in words, and leave nothing running."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fleet.lab.child import Limits, run_child

ROOT = Path(__file__).resolve().parents[3]


def _python(code, **options):
    return run_child([sys.executable, "-c", code], **{"timeout_s": 30, **options})


def test_a_good_child_is_heard_on_both_streams(tmp_path):
    """Exit code 0 is no failure; directory and variables are the ones given, and stdin is empty."""
    code = (
        "import os, sys; print(os.getcwd(), os.environ['MARK'], repr(sys.stdin.read()));"
        "print('aside', file=sys.stderr)"
    )
    ended = _python(code, cwd=tmp_path, env={"MARK": "yes"})
    assert ended.failure == ""
    assert ended.stdout == f"{tmp_path} yes ''\n"
    assert ended.stderr == "aside\n"
    assert ended.said == ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("raise SystemExit(7)", "exited with 7"),
        ("import os; os.abort()", "crashed with SIGABRT"),
        ("import os; os.kill(os.getpid(), 40)", "crashed with signal 40"),
        ("import time; time.sleep(60)", "ran past its limit of 0.5 s"),
    ],
)
def test_failures_are_said_in_words(code, failure):
    """An exit code, a signal by its name where it has one, and a limit by its seconds."""
    assert _python(code, timeout_s=0.5 if "past" in failure else 30).failure == failure


def test_the_whole_group_is_killed(tmp_path):
    """What a hanging child has started ends with it."""
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys, time; child = subprocess.Popen(['sleep', '100']);"
        f"open({str(note)!r}, 'w').write(str(child.pid)); time.sleep(100)"
    )
    assert _python(code, timeout_s=2).failure.startswith("ran past")
    grandchild = int(note.read_text())
    for _ in range(50):
        if not psutil.pid_exists(grandchild) or psutil.Process(grandchild).status() == "zombie":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child's child lives on")


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux only")
def test_memory_and_files_are_limited(tmp_path):
    """Too much memory is an error in the child, too large a file a signal; without limits both work."""
    room = "bytearray(1 << 30)"
    file = f"open({str(tmp_path / 'f')!r}, 'wb').write(bytes(1 << 20))"
    tight = Limits(memory_bytes=1 << 29, file_bytes=1 << 16)
    assert "MemoryError" in _python(room, limits=tight).stderr
    assert "File too large" in _python(file, limits=tight).stderr
    free = Limits(memory_bytes=None, file_bytes=None)
    assert [_python(code, limits=free).failure for code in (room, file)] == ["", ""]


def test_a_tighter_limit_of_the_user_stays(tmp_path):
    """`ulimit -S` below what a child may take holds in the child, too; a looser one does not widen it."""
    code = (
        "import resource, sys; from fleet.lab.child import Limits, run_child\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))\n"
        "ask = 'import resource; print(resource.getrlimit(resource.RLIMIT_FSIZE))'\n"
        "for most in (1 << 30, 1 << 10, None):\n"
        "    limits = Limits(file_bytes=most)\n"
        "    print(run_child([sys.executable, '-c', ask], timeout_s=30, limits=limits).said, end='')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["(1048576, 1048576)", "(1024, 1024)", "(1048576, 1048576)"]
