"""`edgeloop fleet simulate` beside `edgeloop fleet serve`."""

import contextlib
import json
import re
import signal
import subprocess
import sys

import pytest
from clones import ROOT

from fleet.gateway import serve
from flows.cli import main


def _run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["fleet", *map(str, arguments)])
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


@contextlib.contextmanager
def _serving(folder, *arguments):
    """The command itself, on a free port: its address."""
    command = [
        sys.executable,
        "-c",
        "from flows.cli import main; main()",
        "fleet",
        "serve",
        "--port",
        "0",
        "--folder",
        str(folder),
    ]
    process = subprocess.Popen(
        [*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    try:
        found = re.search(r"http://\S+", process.stdout.readline())
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(20)
        process.stdout.close()


def test_a_fleet_from_the_command_line(tmp_path, capsys):
    """More devices than may enrol by default; tokens made in the folder, then tokens of a file."""
    state = tmp_path / "state"
    with _serving(state, "--enrolments-per-s", "500") as url:
        first = ("simulate", "--gateway", url, "--folder", state, "--hours", 6)
        code, printed, errors = _run(capsys, *first, "--devices", 40, "--faulty", 1, "--json")
        assert code == 0, errors
        told = json.loads(printed)
        assert told["classes"] == "made up"
        assert told["groups"]["sound"]["accepted"] == told["groups"]["sound"]["delivered"] > 0
        assert told["groups"]["garbage"]["devices"] == 1
        assert not told["total"]["failed"]
        file = tmp_path / "tokens"
        file.write_text("\n".join(serve.token(state, count=5)))
        code, printed, _ = _run(
            capsys, "simulate", "--gateway", url, "--tokens", file, "--hours", 1, "--devices", 5
        )
        assert code == 0
        assert printed.splitlines()[0].startswith("device classes: made up")
        assert printed.splitlines()[-1].split()[:2] == ["all", "5"]
    assert len(serve.devices(state)) == 39 + 5  # two of the 40 have one key


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--devices", "0"), "0 devices"),
        (("--telemetry", "no.tar"), "no.tar"),
        (("--tokens", "no-file"), "no-file"),
        (("--gateway", "http://10.0.0.1:8480", "--tokens", "TOKENS"), "http://10.0.0.1:8480"),
        (("--devices", "3", "--tokens", "TOKENS"), "2 tokens for 3 devices"),
        ((), "no gateway's state folder"),
    ],
)
def test_what_cannot_be_simulated_is_said(tmp_path, capsys, arguments, said):
    """One error with exit code 2, before anything is sent."""
    (tmp_path / "tokens").write_text("one two")
    given = [str(tmp_path / "tokens") if part == "TOKENS" else part for part in arguments]
    given = given if "--devices" in given else [*given, "--devices", "2"]
    code, _, errors = _run(capsys, "simulate", "--folder", tmp_path / "state", *given)
    assert code == 2
    assert said in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "1e9"])
def test_a_rate_of_enrolments_that_is_none(tmp_path, capsys, rate):
    """One error."""
    code, _, errors = _run(capsys, "serve", "--folder", tmp_path / "state", f"--enrolments-per-s={rate}")
    assert code == 2
    assert "--enrolments-per-s" in errors
