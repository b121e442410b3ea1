"""Salted hashed ids."""

import hashlib
import os
import threading

import pytest

from fleet.device.errors import UserError
from fleet.device.privacy.ids import HashedIds

RAW = "imei-490154203237518"


def test_an_id_stays_on_a_device_and_differs_on_another(tmp_path):
    """The same after a restart; under another salt another one."""
    here = HashedIds.load(tmp_path / "a").hashed("user", RAW)
    assert HashedIds.load(tmp_path / "a").hashed("user", RAW) == here
    assert HashedIds.load(tmp_path / "b").hashed("user", RAW) != here
    assert len(here) == 32
    assert set(here) <= set("0123456789abcdef")


def test_kinds_are_apart():
    """The same text as another kind, and what one could confuse by joining, are other ids."""
    ids = HashedIds(b"s" * 32)
    texts = [("user", RAW), ("session", RAW), ("userx", RAW), ("user", "x" + RAW), ("", "user" + RAW)]
    assert len({ids.hashed(*pair) for pair in texts}) == len(texts)
    assert ids.hashed("user", RAW.encode()) == ids.hashed("user", RAW)


def test_it_is_hmac_sha256_under_the_salt():
    """Recomputed from RFC 2104's definition; without the salt nobody finds the raw id by trying."""
    salt, block = b"s" * 32, 64
    pads = [bytes(byte ^ pad for byte in salt.ljust(block, b"\0")) for pad in (0x36, 0x5C)]
    message = b"edgeloop-id-1" + (4).to_bytes(8) + b"user" + RAW.encode()
    inner = hashlib.sha256(pads[0] + message).digest()
    assert HashedIds(salt).hashed("user", RAW) == hashlib.sha256(pads[1] + inner).hexdigest()[:32]


def test_the_salt_is_the_users_alone(tmp_path):
    """32 bytes, mode 600, and nothing left beside it."""
    HashedIds.load(tmp_path)
    salt = tmp_path / "salt"
    assert (salt.stat().st_size, salt.stat().st_mode & 0o777) == (32, 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["salt"]


def spoil(path, how):
    if how == "readable":
        path.chmod(0o644)
    elif how == "short":
        path.write_bytes(b"x" * 31)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    elif how == "dangling":
        path.unlink()
        path.symlink_to("nowhere")
    else:
        path.unlink()
        os.mkfifo(path, 0o600) if how == "fifo" else path.mkdir()


@pytest.mark.parametrize("how", ["readable", "short", "empty", "link", "dangling", "fifo", "folder"])
def test_a_salt_that_is_none(tmp_path, how):
    """Refused with its path: a hash under a salt that others know says who the user is."""
    HashedIds.load(tmp_path)
    spoil(tmp_path / "salt", how)
    with pytest.raises(UserError, match="salt"):
        HashedIds.load(tmp_path)


def test_many_at_once_get_one_salt(tmp_path):
    """Processes that start together agree."""
    found, barrier = [], threading.Barrier(8)

    def load():
        barrier.wait()
        found.append(HashedIds.load(tmp_path).hashed("user", RAW))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
