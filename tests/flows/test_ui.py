"""`edgeloop ui`: what it serves, that it leaves nothing behind, and the pages in a real browser."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from clones import ROOT, edgeloop, environment

from flows.servers.addresses import Ports, remembered
from tasks.tracking import state_folder

PICTURE = ROOT / "docs" / "images" / "prefect-run.png"
PATIENCE_S = 120


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _get(url: str, **headers: str) -> bytes:
    request = urllib.request.Request(url, headers={"Accept": "text/html"} | headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return bytes(answer.read())


def _eventually(true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


class Ui:
    """`edgeloop ui` in a clone, up."""

    def __init__(self, clone: Path, port: int | None = None) -> None:
        self.port = port or _free_port()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flows", "ui", "--port", str(self.port)],
            cwd=clone,
            env=environment(clone),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        printed = []
        while not (printed and printed[-1].startswith("Ctrl-C")):
            printed.append(self.process.stdout.readline())
            assert printed[-1], self.process.stderr.read()
        self.links = {line[:11].strip(): line[11:].strip() for line in printed}
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def part(self, word: str) -> psutil.Process | None:
        """The process with `word` in its command line, among those that run now."""
        now = psutil.Process(self.process.pid).children(recursive=True)
        self.family = list({*self.family, *now})
        with contextlib.suppress(psutil.NoSuchProcess):
            return next((p for p in now if any(word in argument for argument in p.cmdline())), None)
        return None

    def end(self, sign: signal.Signals) -> int:
        """Send a signal, and wait."""
        self.process.send_signal(sign)
        return self.process.wait(PATIENCE_S)

    def left(self) -> list[psutil.Process]:
        """The processes that outlived it."""
        return psutil.wait_procs(self.family, timeout=PATIENCE_S)[1]


@pytest.fixture
def ui(tiny_build) -> Iterator[Ui]:
    """`edgeloop ui` over the clone of the tiny build."""
    running = Ui(tiny_build.clone)
    yield running
    if running.process.poll() is None:
        running.end(signal.SIGTERM)
    assert running.left() == []


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_it_serves_until_stopped_and_leaves_no_process(tiny_build, ending):
    """All pages answer, on the loopback only; afterwards no process is there, however it ended."""
    ui = Ui(tiny_build.clone)
    assert f"http://127.0.0.1:{ui.port}/" in ui.links["runs"]
    assert b"MLflow" in _get(f"http://127.0.0.1:{ui.port}/")
    assert b"Prefect" in _get(ui.links["flow runs"])
    assert b"tiny" in _get(ui.links["all"])
    everybody = [psutil.Process(ui.process.pid), *ui.family]
    listening = [c.laddr for p in everybody for c in p.net_connections("inet") if c.status == "LISTEN"]
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert len({address.port for address in listening}) == 3
    assert ui.end(ending) == (-9 if ending == signal.SIGKILL else 0)
    assert ui.left() == []


def test_a_taken_port_is_refused(tiny_build):
    """A port somebody listens on is named, with a way out."""
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = edgeloop(tiny_build.clone, "ui", "--port", str(port))
    assert done.returncode == 2
    assert f"port {port}" in done.stderr


def test_a_second_one_names_the_pages_of_the_first(ui, tiny_build):
    """It starts nothing, and the first one's ports stay the ones that links lead to."""
    remembered = (tiny_build.clone / ".edgeloop" / "ui.json").read_bytes()
    second = edgeloop(tiny_build.clone, "ui")
    assert second.returncode == 2
    assert f"http://127.0.0.1:{ui.port}" in second.stderr
    assert ui.links["all"].rstrip("/") in second.stderr
    assert (tiny_build.clone / ".edgeloop" / "ui.json").read_bytes() == remembered


@pytest.mark.parametrize("port", [80, 0, 65536, True, "5000", None])
def test_a_damaged_record_of_ports_is_not_obeyed(tmp_path, port):
    """A port below 1024 neither: root could listen there."""
    (tmp_path / "params.yaml").touch()
    record = state_folder(tmp_path) / "ui.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"mlflow": 5001, "reports": port}), encoding="utf-8")
    assert remembered(tmp_path) == Ports()
    record.write_text(json.dumps({"mlflow": 5001, "reports": 1024}), encoding="utf-8")
    assert remembered(tmp_path) == Ports(mlflow=5001, reports=1024)


def test_no_two_pages_want_one_port(tiny_build):
    """A port asked for that the reports and Prefect had last is MLflow's; none of them fails for it."""
    state, port = tiny_build.clone / ".edgeloop", _free_port()
    (state / "ui.json").write_text(json.dumps({"mlflow": 5000, "reports": port}), encoding="utf-8")
    (state / "prefect").mkdir(exist_ok=True)
    (state / "prefect" / "server.lock").write_text(json.dumps({"port": port}), encoding="utf-8")
    ui = Ui(tiny_build.clone, port)
    pages = [f"http://127.0.0.1:{port}/", ui.links["flow runs"], ui.links["all"]]
    for page, word in zip(pages, (b"MLflow", b"Prefect", b"tiny"), strict=True):
        assert word in _get(page)
    assert ui.end(signal.SIGTERM) == 0
    assert ui.left() == []


@pytest.mark.parametrize("victim", ["mlflow", "prefect_app", "keeper"])
def test_a_server_that_dies_is_started_again(ui, victim):
    """MLflow's, Prefect's, or the keeper of the latter: it is back at its address, and it is said."""
    prefect = ui.links["flow runs"].removesuffix("/runs")
    gone = ui.part(victim)
    gone.kill()
    gone.wait(PATIENCE_S)
    assert "ended by itself" in ui.process.stderr.readline()
    assert _eventually(lambda: ui.part(victim) not in (None, gone))
    assert _eventually(lambda: _answers(f"http://127.0.0.1:{ui.port}/health"))
    assert _eventually(lambda: _answers(f"{prefect}/api/health"))
    ui.part(victim)  # the fixture sees that it ends, too


def _answers(url: str) -> bool:
    try:
        _get(url)
    except OSError:
        return False
    return True


def test_what_a_killed_one_left_does_no_harm(tiny_build):
    """Its files name servers that are gone: the next one serves, under the same address."""
    first = Ui(tiny_build.clone)
    first.end(signal.SIGKILL)
    assert first.left() == []
    prefect = tiny_build.clone / ".edgeloop" / "prefect"
    (prefect / "server.lock").write_text('{"pid": 1, "port": 4200, "url": "http://127.0.0.1:1"}', "utf-8")
    (tiny_build.clone / ".edgeloop" / "ui.json").write_text('{"mlflow": "x"', "utf-8")
    second = Ui(tiny_build.clone)
    try:
        assert b"Prefect" in _get(second.links["flow runs"])
        assert second.links["flow runs"] == first.links["flow runs"]
    finally:
        second.end(signal.SIGTERM)
    assert second.left() == []


def _raw(base: str, request: str) -> bytes:
    """What the server answers to a request line."""
    host, port = base.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as line:
        line.sendall(f"{request} HTTP/1.0\r\nHost: localhost:{port}\r\n\r\n".encode())
        return b"".join(iter(lambda: line.recv(65536), b""))


def test_it_serves_reports_and_no_other_file(ui):
    """The Data Docs open; nothing above or beside the reports does, nor under the name of another host."""
    base = ui.links["all"].rstrip("/")
    assert b"<html" in _get(f"{base}/tiny/data_docs/index.html")
    assert b"Gate" in _get(f"{base}/tiny/gate.md")
    for path in (
        "/tiny/../params.yaml",
        "/tiny/..%2fparams.yaml",
        "/tiny/data_docs/../../params.yaml",
        "/tiny/gate.json",
        "/tiny/%00",
        "/nobody/gate.md",
        "/tiny//etc/passwd",
    ):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            _get(base + path)
    assert _raw(base, "HEAD /tiny/gate.md").split(b"\r\n\r\n")[1] == b""
    assert b" 404 " in _raw(base, "GET http://[").splitlines()[0]
    with pytest.raises(urllib.error.HTTPError, match="403"):
        _get(f"{base}/tiny/gate.md", Host="evil.example:5050")


def test_the_page_of_a_flow_run(tiny_build, ui, browser):
    """Who opens the run sees its verdict, its variants and where to look further; nobody else is asked."""
    run = re.search(r"/runs/flow-run/\S+", tiny_build.stderr)[0]
    page = browser.new_page(viewport={"width": 1440, "height": 860})
    asked = []
    page.on("response", lambda response: asked.append(response.url))
    try:
        page.goto(ui.links["flow runs"].removesuffix("/runs") + run)
        page.get_by_text("Artifacts", exact=True).first.click()
        page.get_by_text("result-tiny").first.click()
        page.get_by_role("heading", name="Gate: pass").wait_for()
        text = page.inner_text("body")
        for variant in tiny_build.result["variants"]:
            assert variant["name"] in text
            assert f"{variant['top1']:.2%}" in text
        assert "edgeloop-tiny version 1" in text
        hrefs = page.eval_on_selector_all("a", "links => links.map(link => link.href)")
        assert any(re.search(r"/#/experiments/\d+/runs/[0-9a-f]{32}$", href) for href in hrefs)
        assert any(href.endswith("/#/models/edgeloop-tiny/versions/1") for href in hrefs)
        assert any(href.endswith("/tiny/data_docs/index.html") for href in hrefs)
        if os.environ.get("EDGELOOP_WRITE_SCREENSHOTS"):
            PICTURE.parent.mkdir(exist_ok=True)
            page.screenshot(path=PICTURE)
        page.goto(ui.links["flow runs"].removesuffix("/runs") + "/v2" + run)  # it calls its makers if let
        page.get_by_text("build-tiny").first.wait_for()
    finally:
        page.close()
    assert {url.split("/")[2] for url in asked if url.startswith("http")} == {
        ui.links["flow runs"].split("/")[2]
    }
