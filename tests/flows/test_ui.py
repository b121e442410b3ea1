"""`edgeloop ui`: serves on this machine, and leaves nothing behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import psutil
import pytest
from clones import edgeloop, environment


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "terminated"])
def test_it_serves_until_stopped_and_leaves_no_process(tiny_build, ending):
    """The page is there under the printed address, on the loopback only; afterwards no process is."""
    port = _free_port()
    command = [sys.executable, "-m", "flows", "ui", "--port", str(port)]
    env = environment(tiny_build.clone)
    ui = subprocess.Popen(command, cwd=tiny_build.clone, env=env, stdout=subprocess.PIPE, text=True)
    line = ui.stdout.readline()
    assert f"http://127.0.0.1:{port}/" in line
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as page:
        assert b"MLflow" in page.read()
    family = [*psutil.Process(ui.pid).children(recursive=True)]
    listening = {c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == "LISTEN"}
    assert listening == {"127.0.0.1"}
    os.kill(ui.pid, ending)
    assert ui.wait(120) == 0
    _, alive = psutil.wait_procs(family, timeout=5)
    assert alive == []


def test_a_taken_port_is_refused(tiny_build):
    """A port somebody listens on is named, with a way out."""
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = edgeloop(tiny_build.clone, "ui", "--port", str(port))
    assert done.returncode == 2
    assert f"port {port}" in done.stderr
