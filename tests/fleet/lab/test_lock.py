"""The lock on a device: between processes and users, and without one left behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fleet.device.errors import UserError
from fleet.lab.local import LocalDevice
from fleet.lab.lock import exclusive, lock_path

HOLD = """
import sys, time
from pathlib import Path
from fleet.lab.lock import exclusive
with exclusive(Path(sys.argv[1]), "it"):
    print("held", flush=True)
    time.sleep(600)
"""


def hold(path):
    """A process that holds the lock."""
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    return holder


def test_kill_9_drops_the_lock(tmp_path):
    """The system, not a file's content, says who holds it."""
    path = tmp_path / "lock"
    holder = hold(path)
    entered = threading.Event()

    def enter():
        with exclusive(path, "it"):
            entered.set()

    waiting = threading.Thread(target=enter)
    waiting.start()
    assert not entered.wait(0.5)
    os.kill(holder.pid, signal.SIGKILL)
    assert entered.wait(30)
    waiting.join()
    holder.wait()


def test_waiting_is_said(tmp_path, capfd):
    """Somebody who waits for minutes is told for what."""
    path = tmp_path / "lock"
    with exclusive(path, "this host"):
        waiting = threading.Thread(target=lambda: exclusive(path, "this host").__enter__())
        waiting.start()
        said, deadline = "", time.monotonic() + 30
        while "waiting" not in said and time.monotonic() < deadline:
            said += capfd.readouterr().err
            time.sleep(0.02)
    waiting.join(30)
    assert "this host: another measurement runs there" in said


def test_the_lock_is_dropped_after_an_error(tmp_path):
    """A measurement that fails, or is interrupted, leaves the device free."""
    path = tmp_path / "lock"
    with pytest.raises(KeyboardInterrupt), exclusive(path, "it"):
        raise KeyboardInterrupt
    with exclusive(path, "it"):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("umask", [0o022, 0o077], ids=oct)
def test_another_user_takes_the_same_lock(tmp_path, umask):
    """The file of one user, whatever the umask it was made under, serves and excludes another."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for parent in (folder, *list(folder.parents)[: len(folder.parts) - 2]):
        parent.chmod(parent.stat().st_mode | 0o011)
    folder.chmod(0o1777)
    path = folder / "lock"
    old = os.umask(umask)
    try:
        with exclusive(path, "it"):
            pass
    finally:
        os.umask(old)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            with exclusive(path, "it"):
                os._exit(0)
        except UserError:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(tmp_path):
    """Cleaners of temporary folders remove files: the one that waited must not hold a lock of no name."""
    path = tmp_path / "lock"
    first = exclusive(path, "it")
    first.__enter__()
    inside = threading.Event()
    leave = threading.Event()

    def enter():
        with exclusive(path, "it"):
            inside.set()
            leave.wait(30)

    waiting = threading.Thread(target=enter)
    waiting.start()
    time.sleep(0.2)
    path.unlink()
    first.__exit__(None, None, None)
    assert inside.wait(30)
    assert path.exists()
    third = threading.Thread(target=lambda: exclusive(path, "it").__enter__())
    third.start()
    third.join(0.3)
    assert third.is_alive()  # the file that lies there is the one that is locked
    leave.set()
    waiting.join()
    third.join(30)
    assert not third.is_alive()


def _link(path):
    path.symlink_to("/etc/passwd")


def _unreadable(path):
    path.touch()
    path.chmod(0)


@pytest.mark.parametrize(
    "put", [_link, os.mkfifo, os.mkdir, _unreadable], ids=["link", "pipe", "folder", "unreadable"]
)
def test_what_lies_in_its_place_is_refused(tmp_path, put):
    """No waiting for ever at a pipe, no lock on somebody's file: what it is and how to mend it."""
    if put is _unreadable and os.getuid() == 0:
        pytest.skip("root reads everything")
    path = tmp_path / "lock"
    put(path)
    with pytest.raises(UserError, match=f"rm {path}"), exclusive(path, "it"):
        pass


def test_all_users_mean_the_same_file(monkeypatch, tmp_path):
    """TMPDIR is one's own; the device is everybody's."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert str(lock_path("local")) == "/tmp/edgeloop-device-local.lock"
    assert lock_path("board") != lock_path("local")
    with LocalDevice().lock():
        assert lock_path("local").exists()
