"""The ledger: only appended to, whole after a crash, and every edit of it found."""

import json
import resource
import signal
import subprocess
import sys
import time

import pytest

from fleet.device.errors import UserError
from tasks.review import ledger as ledger_module
from tasks.review.ledger import Draft, Ledger
from tasks.workspace import CODE, disk_full


def _draft(version: int = 1, why: str = "good") -> Draft:
    return Draft(action="approved", name="edgeloop-x", version=version, by="Ada", by_source="--by", why=why)


@pytest.fixture
def ledger(tmp_path):
    made = Ledger(tmp_path)
    made.append([_draft(1), _draft(2), _draft(3)])
    return made


def test_an_entry_says_who_what_when_why_and_what_came_before(tmp_path):
    """Each line carries the hash of the line before; the first one carries zeros."""
    ledger = Ledger(tmp_path)
    first, second = ledger.append([_draft(1, 'a "quoted"\nreason, ü')])[0], ledger.append([_draft(2)])[0]
    lines = [json.loads(line) for line in ledger.path.read_text(encoding="utf-8").splitlines()]
    assert [line["sequence"] for line in lines] == [1, 2]
    assert lines[0]["why"] == 'a "quoted"\nreason, ü'
    assert lines[0]["previous_sha256"] == "0" * 64
    assert lines[1]["previous_sha256"] == lines[0]["sha256"] == first.sha256
    assert (lines[1]["action"], lines[1]["by"], lines[1]["version"]) == ("approved", "Ada", 2)
    assert lines[1]["time"].endswith("Z")
    assert ledger.read().entries == (first, second)


def _edit_a_field(lines):
    lines[1] = lines[1].replace('"Ada"', '"Eve"')


def _edit_and_hash_again(lines):
    record = json.loads(lines[1]) | {"by": "Eve"}
    lines[1] = json.dumps(record | {"sha256": ledger_module._hash(record)}, sort_keys=True)


def _put_a_key_in_front(lines):
    lines[0] = '{"by": "Mallory", ' + lines[0][1:]


TAMPERED = {
    "a field edited": (_edit_a_field, "line 2 was changed"),
    "a field edited and the line hashed again": (_edit_and_hash_again, "line 3 says"),
    "a line taken out": (lambda lines: lines.pop(1), "line 2 says"),
    "the first line taken out": (lambda lines: lines.pop(0), "line 1 says"),
    "two lines swapped": (lambda lines: lines.insert(0, lines.pop(1)), "line 1 says"),
    "a line twice": (lambda lines: lines.insert(1, lines[1]), "line 3 says"),
    "other line ends": (lambda lines: lines.__setitem__(1, lines[1] + "\r"), "line 2 was changed"),
    "a second author in front": (_put_a_key_in_front, "line 1 was changed"),
    "no JSON": (lambda lines: lines.insert(1, "hello"), "line 2 cannot be read"),
    "no entry": (lambda lines: lines.insert(1, "[1]"), "line 2 cannot be read"),
    "an empty line": (lambda lines: lines.insert(1, ""), "line 2 cannot be read"),
}


@pytest.mark.parametrize(("edit", "named"), TAMPERED.values(), ids=TAMPERED)
def test_tampering_is_found_and_the_line_named(ledger, edit, named):
    """Reading refuses, and so does writing: nothing is decided on a ledger somebody edited."""
    lines = ledger.path.read_text(encoding="utf-8").splitlines()
    edit(lines)
    ledger.path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    before = ledger.path.read_bytes()
    with pytest.raises(UserError, match=named):
        ledger.read()
    with pytest.raises(UserError, match=named):
        ledger.append([_draft()])
    assert ledger.path.read_bytes() == before


def test_lines_cut_off_at_the_end_are_found_by_what_mlflow_was_told(ledger):
    """The chain alone cannot tell that its end is missing; the mark in MLflow can."""
    reading = ledger.read()
    mark = ledger_module.full_mark(reading, reading.entries[-1])
    ledger.require_marked(mark, reading)
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(b"".join(lines[:2]))
    with pytest.raises(UserError, match="line 3 is missing"):
        ledger.require_marked(mark, ledger.read())
    ledger.require_marked("another00000:3:cafe", ledger.read())  # of another ledger: says nothing of this one


@pytest.mark.parametrize(
    "torn", [b'{"action": "appr', b"\xff\xfe", b"{}"], ids=["half", "no text", "no newline"]
)
def test_an_unfinished_last_line_is_cut_off_and_said(ledger, torn):
    """What stood before it stays; the next writer writes down what he cut off."""
    before = ledger.path.read_bytes()
    ledger.path.write_bytes(before + torn)
    assert len(ledger.read().entries) == 3
    assert ledger.append([_draft(4)])[0].sequence == 5
    assert ledger.path.read_bytes().startswith(before)
    recovered, written = ledger.read().entries[3:]
    assert (recovered.action, written.version) == ("recovered", 4)
    assert f"{len(torn)} bytes" in recovered.why


_WRITER = """
import sys, itertools
from pathlib import Path
from tasks.review.ledger import Draft, Ledger
ledger = Ledger(Path(sys.argv[1]))
for number in itertools.count():
    if number == int(sys.argv[2]):
        break
    ledger.append([Draft(action="approved", name=sys.argv[3], version=number, why="x" * 3000)])
    print(number, flush=True)
"""


def _writer(folder, count: int, name: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", _WRITER, str(folder), str(count), name]
    return subprocess.Popen(command, cwd=CODE, stdout=subprocess.PIPE, text=True)


def test_what_was_acknowledged_survives_kill_9(tmp_path):
    """A writer killed in the middle of anything: every entry it was told is written is there."""
    for _ in range(3):
        before = len(Ledger(tmp_path).read().entries)
        writer = _writer(tmp_path, -1, "killed")
        told = int(writer.stdout.readline())
        time.sleep(0.05)
        writer.send_signal(signal.SIGKILL)
        told += len(writer.stdout.readlines())
        writer.wait()
        kept = [e for e in Ledger(tmp_path).read().entries[before:] if e.action != "recovered"]
        assert [e.version for e in kept][: told + 1] == list(range(told + 1))
    Ledger(tmp_path).append([_draft()])


def test_two_writers_share_one_chain(tmp_path):
    """Both write at once: numbers without gap, none lost."""
    writers = [_writer(tmp_path, 25, name) for name in ("ada", "bob")]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    entries = Ledger(tmp_path).read().entries
    assert len(entries) == 50
    for name in ("ada", "bob"):
        assert [e.version for e in entries if e.name == name] == list(range(25))


def test_a_clock_that_goes_backwards_changes_no_order(ledger, monkeypatch):
    """The number decides; the time is written as the clock had it."""
    monkeypatch.setattr(ledger_module.time, "gmtime", lambda: (1999, 1, 1, 0, 0, 0, 4, 1, 0))
    assert ledger.append([_draft(4)])[0].time == "1999-01-01T00:00:00Z"
    assert [e.version for e in ledger.read().entries] == [1, 2, 3, 4]


def test_a_full_disk_leaves_the_ledger_as_it_was(ledger):
    """A write that does not fit is an error that names the disk, and no part of it stays."""
    before = ledger.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"No space|too large") as raised:
            ledger.append([_draft(4), _draft(5)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert disk_full(raised.value, ledger.path.parent)
    assert ledger.path.read_bytes() == before
    assert ledger.append([_draft(4)])[0].sequence == 4


def test_a_ledger_of_nothing(tmp_path):
    """No file is no entry, and reading makes none."""
    assert Ledger(tmp_path).read().entries == ()
    assert list(tmp_path.glob("*.jsonl")) == []
