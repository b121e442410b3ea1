"""Files that are there whole or not at all: what reaches the disk in which order, and what stays."""

import os
from pathlib import Path

import pytest

from fleet.device import durable


@pytest.fixture
def calls(monkeypatch):
    """What is synced, renamed and linked, in order, by name."""
    seen = []

    def watched(name, real, of):
        def call(*arguments, **named):
            seen.append((name, of(*arguments)))
            return real(*arguments, **named)

        return call

    def name_of(descriptor):
        return Path(f"/proc/self/fd/{descriptor}").readlink().name.split(".")[0]

    monkeypatch.setattr(os, "fsync", watched("fsync", os.fsync, name_of))
    monkeypatch.setattr(os, "link", watched("link", os.link, lambda _source, target: Path(target).name))
    real = Path.replace
    monkeypatch.setattr(Path, "replace", watched("rename", real, lambda _source, target: target.name))
    return seen


def test_a_file_is_on_the_disk_before_its_name_is(tmp_path, calls):
    """Content, then the name, then the folder: a power cut leaves the old file or the new one."""
    durable.write_durably(tmp_path / "kept", b"1")
    assert calls == [("fsync", "kept"), ("rename", "kept"), ("fsync", tmp_path.name)]
    assert (tmp_path / "kept").read_bytes() == b"1"
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o600


def test_a_file_made_once_is_on_the_disk_before_its_name_is(tmp_path, calls):
    """The same; and the one that was first stays."""
    assert durable.make_once(tmp_path / "key", b"first")
    assert calls == [("fsync", "key"), ("link", "key"), ("fsync", tmp_path.name)]
    assert not durable.make_once(tmp_path / "key", b"second")
    assert (tmp_path / "key").read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [tmp_path / "key"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, error):
    """Nothing new, nothing beside it."""
    (tmp_path / "kept").write_bytes(b"old")

    def write():
        with durable.replacing(tmp_path / "kept") as file:
            file.write(b"new")
            raise error

    with pytest.raises(error):
        write()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"kept": b"old"}


def test_the_mode_is_the_one_asked_for(tmp_path):
    """What others serve they have to read."""
    durable.write_durably(tmp_path / "public", b"", mode=0o644)
    assert (tmp_path / "public").stat().st_mode & 0o777 == 0o644


def test_leftovers_of_killed_writers_go(tmp_path):
    """And nothing else does."""
    (tmp_path / "kept.x1.partial").touch()
    (tmp_path / "kept").touch()
    durable.remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
