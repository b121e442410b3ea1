"""Consent: no, unless a file of this user says yes."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest

from fleet.device.errors import UserError
from fleet.device.privacy import consent as consent_module
from fleet.device.privacy.consent import CONSENT, SAMPLES, Consent, purge


@pytest.fixture
def consent(tmp_path):
    return Consent(tmp_path / "privacy")


@pytest.fixture
def granted(consent):
    consent.grant("2026-1", 1000)
    return consent


def spooled(consent, *names):
    folder = consent.folder / SAMPLES
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"pixels")
    return folder


def test_nobody_was_asked(consent):
    """The default is no; asking writes nothing."""
    assert (consent.holds(), consent.erasure_is_due(), consent.state().why) == (
        False,
        False,
        "nobody was asked",
    )
    assert not consent.folder.exists()


def test_yes_and_no_survive_a_restart(consent):
    """Who asks later, or in another process, gets what was decided, when, and on which text."""
    consent.grant("2026-1", 1000)
    again = Consent(consent.folder).state()
    assert (again.granted, again.at_ms, again.text_version) == (True, 1000, "2026-1")
    consent.revoke(2000)
    again = Consent(consent.folder).state()
    assert (again.granted, again.at_ms, again.text_version) == (False, 2000, "2026-1")
    assert consent.folder.stat().st_mode & 0o777 == 0o700


def test_a_clock_that_goes_back_decides_nothing(granted):
    """The last decision counts, not the latest time."""
    granted.revoke(-5)
    assert not granted.holds()
    granted.grant("2026-1", -10)
    assert granted.holds()
    assert granted.state().at_ms == -10


@pytest.mark.parametrize("version", ["", "x" * 201])
def test_consent_to_no_text(consent, version):
    """Refused; nothing is granted."""
    with pytest.raises(UserError, match="version"):
        consent.grant(version, 1)
    assert not consent.holds()


YES = {"schema": 1, "granted": True, "at_ms": 1000, "text_version": "2026-1"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"true",
        b"[]",
        b"null",
        b"\xff\xfe",
        json.dumps(YES).encode()[:-1],
        json.dumps(YES | {"schema": 2}).encode(),
        json.dumps(YES | {"schema": True}).encode(),
        json.dumps(YES | {"granted": 1}).encode(),
        json.dumps(YES | {"granted": "true"}).encode(),
        json.dumps(YES | {"at_ms": "1000"}).encode(),
        json.dumps(YES | {"more": 1}).encode(),
        json.dumps({k: v for k, v in YES.items() if k != "text_version"}).encode(),
        b"[" * 4000,
        json.dumps(YES).encode() + b" " * 4096,
    ],
    ids=lambda content: ascii(content)[:24],
)
def test_a_file_that_says_anything_else_is_no(granted, content):
    """And the reason is told; what the gateway may have is to be erased only if it may have something."""
    (granted.folder / CONSENT).write_bytes(content)
    state = granted.state()
    assert not state.granted
    assert state.why.startswith("consent.json: ")
    assert not granted.erasure_is_due()
    (granted.folder / CONSENT).write_bytes(json.dumps(YES).encode())
    granted.sending()
    (granted.folder / CONSENT).write_bytes(content)
    assert granted.erasure_is_due()


def replace_by(path, how):
    elsewhere = path.with_name("elsewhere")
    elsewhere.write_bytes(path.read_bytes())
    path.unlink()
    if how == "link":
        path.symlink_to(elsewhere)
    elif how == "fifo":
        os.mkfifo(path, 0o600)
    elif how == "folder":
        path.mkdir()
    elif how == "device":
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("how", ["link", "fifo", "folder", "device", "gone"])
def test_a_file_that_is_no_file_is_no(granted, how):
    """A link, even to a good file, is not what the user wrote; nothing hangs."""
    replace_by(granted.folder / CONSENT, how)
    assert not granted.holds()


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_others_may_write_is_no(granted, what):
    """Somebody else may have said yes."""
    path = granted.folder / CONSENT if what == "file" else granted.folder
    path.chmod(path.stat().st_mode | 0o002)
    assert not granted.holds()
    assert "mode" in granted.state().why


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_file_is_no(granted):
    """It says what that user wants."""
    os.chown(granted.folder / CONSENT, 12345, 12345)
    assert not granted.holds()


def test_what_cannot_be_read_is_no(granted):
    """An error of the system is no yes."""
    code = "from fleet.device.privacy.consent import Consent; from pathlib import Path; import sys, os\n"
    code += "if os.geteuid() == 0: os.setuid(65534)\n"
    code += "print(Consent(Path(sys.argv[1])).holds())"
    (granted.folder / CONSENT).chmod(0o000)
    done = subprocess.run(
        [sys.executable, "-c", code, str(granted.folder)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "False", done.stderr


def full_disk(monkeypatch):
    """No new byte fits; removing and looking go on."""

    def refuse(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(consent_module, "write_durably", refuse)


def test_a_full_disk_grants_nothing(consent, monkeypatch):
    """One error; and an earlier no stays."""
    consent.folder.mkdir(mode=0o700)
    with monkeypatch.context() as patch:
        full_disk(patch)
        with pytest.raises(UserError, match="No space"):
            consent.grant("2026-1", 1)
    assert not consent.holds()


def test_a_full_disk_revokes_all_the_same(granted, monkeypatch):
    """To say no takes no room: consent ends, what waits goes, and the gateway will be asked to delete."""
    granted.sending()
    folder = spooled(granted, "a.json", "b.json.partial")
    full_disk(monkeypatch)
    granted.revoke(2000)
    assert not Consent(granted.folder).holds()
    assert list(folder.iterdir()) == []
    assert Consent(granted.folder).erasure_is_due()


def test_a_disk_that_takes_nothing_at_all(granted, monkeypatch):
    """The revocation cannot be written: the error says so, and this process obeys it."""
    full_disk(monkeypatch)

    def refuse(self, missing_ok=False):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(type(granted.folder), "unlink", refuse)
    with pytest.raises(UserError, match="Read-only"):
        granted.revoke(2000)
    assert not granted.holds()


def test_revoking_where_nothing_was_granted(consent):
    """No error, and no folder."""
    consent.revoke(1)
    assert not consent.holds()
    assert not consent.folder.exists()


def test_samples_that_are_a_link(granted, tmp_path):
    """The link goes, what it leads to stays: that is somebody else's."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "a.json").write_text("keep")
    (granted.folder / SAMPLES).symlink_to(precious)
    granted.revoke(1)
    assert (precious / "a.json").read_text() == "keep"
    assert not (granted.folder / SAMPLES).exists()


def test_one_file_that_cannot_be_deleted_saves_no_other(granted):
    """A folder in the way is an error; all files are gone."""
    folder = spooled(granted, "a.json", "z.json")
    (folder / "m.json").mkdir()
    with pytest.raises(OSError, match=r"m\.json"):
        purge(granted.folder)
    assert [path.name for path in folder.iterdir()] == ["m.json"]


def test_when_erasure_is_due(granted):
    """When consent ended after something may have been sent, until it was done."""
    assert not granted.erasure_is_due()
    granted.sending()
    assert not granted.erasure_is_due()
    granted.revoke(1)
    assert granted.erasure_is_due()
    granted.erased()
    assert not granted.erasure_is_due()


def test_consent_given_again_does_not_forget_what_was_to_be_erased(granted):
    """The old samples go first; then it is as after the first yes."""
    granted.sending()
    granted.revoke(1)
    granted.grant("2026-2", 2)
    assert (granted.holds(), granted.erasure_is_due()) == (True, True)
    granted.erased()
    assert (granted.holds(), granted.erasure_is_due()) == (True, False)
    granted.sending()
    granted.revoke(3)
    assert granted.erasure_is_due()


REVOKE = """
import os, signal, sys
from pathlib import Path
from fleet.device.privacy.consent import Consent
die_at, count, real = int(sys.argv[2]), 0, {}
def counted(name):
    def call(*args, **kwargs):
        global count
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real[name](*args, **kwargs)
    return call
for name in ("open", "fsync", "replace", "rename", "unlink", "mkdir", "listdir", "scandir"):
    real[name] = getattr(os, name)
    setattr(os, name, counted(name))
Consent(Path(sys.argv[1])).revoke(2000)
os._exit(0)
"""


def test_killed_anywhere_in_a_revocation(tmp_path):
    """Either it had not begun, or the next start finishes it: nothing in between lets pixels out."""
    steps, ended = 0, -signal.SIGKILL
    seen = set()
    while ended == -signal.SIGKILL:
        steps += 1
        consent = Consent(tmp_path / str(steps))
        consent.grant("2026-1", 1000)
        consent.sending()
        folder = spooled(consent, "a.json", "b.json", "c.json.partial")
        ended = subprocess.run(
            [sys.executable, "-c", REVOKE, str(consent.folder), str(steps)], check=False
        ).returncode
        left = len(list(folder.iterdir()))
        again = Consent(consent.folder)
        seen.add((again.holds(), left))
        if again.holds():
            assert left == 3
            continue
        assert again.erasure_is_due()
        purge(consent.folder)
        assert list(folder.iterdir()) == []
    assert ended == 0
    assert {(True, 3), (False, 3), (False, 0)} <= seen
    assert steps > 5
