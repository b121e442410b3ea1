"""`edgeloop fleet` on a state of its own."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest
from clones import ROOT

from fleet.device.credentials import DeviceKey
from fleet.gateway import database
from flows.cli import main


def _run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["fleet", *map(str, arguments)])
    printed = capsys.readouterr()
    return ended.value.code, printed.out, printed.err


def test_tokens_and_devices(tmp_path, capsys):
    """Tokens are printed once; devices are listed, revoked, and named when there are none."""
    state = ("--folder", tmp_path / "state")
    code, printed, _ = _run(capsys, "token", "--count", 2, *state)
    assert code == 0
    assert len(set(printed.split())) == 2
    assert len(json.loads(_run(capsys, "token", "--json", *state)[1])["tokens"]) == 1
    assert "no device is enrolled" in _run(capsys, "devices", *state)[1]
    key = DeviceKey(bytes(32))
    connection = database.opened(tmp_path / "state")
    connection.execute(
        "INSERT INTO devices VALUES(1, ?, ?, 'Phone \x1b[31m', 1700000000000, NULL)", (key.device, key.public)
    )
    connection.close()
    printed = _run(capsys, "devices", *state)[1]
    assert printed.startswith(f"{key.device}  2023-11-14  enrolled  Phone")
    assert "\x1b" not in printed
    assert _run(capsys, "revoke", key.device, *state)[0] == 0
    (record,) = json.loads(_run(capsys, "devices", "--json", *state)[1])
    assert record["revoked_ms"] > 1_700_000_000_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("revoke", "nobody"), "device nobody"),
        (("token", "--count", "0"), "0 tokens"),
        (("serve", "--host", "0.0.0.0"), "without TLS"),
        (("serve", "--classifier", "no.mnn"), "classifier no.mnn"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path, capsys, arguments, said):
    """One error with exit code 2, and no traceback."""
    code, _, errors = _run(capsys, *arguments, "--folder", tmp_path / "state")
    assert code == 2
    assert said in errors
    assert "Traceback" not in errors


def test_it_serves_until_it_is_told_to_stop(tmp_path, capsys):
    """The address is the first line; nobody else takes port or state; Ctrl-C ends it without a traceback."""
    process = subprocess.Popen(
        [sys.executable, "-m", "flows", "fleet", "serve", "--port", "0", "--folder", tmp_path / "state"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    address = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline()).group()
    with urllib.request.urlopen(f"{address}healthz", timeout=30) as answer:
        assert json.load(answer) == {"ok": True}
    port, folder = address.rstrip("/").rpartition(":")[2], tmp_path / "state"
    for options, said in (
        (("--folder", folder), "served by another gateway"),
        (("--folder", tmp_path / "other", "--port", port), "Address already in use"),
    ):
        code, _, errors = _run(capsys, "serve", *options)
        assert (code, said in errors) == (2, True), errors
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    assert errors == ""
