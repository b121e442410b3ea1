"""Hostile and broken repositories: what is refused, why, and that what ran goes on."""

import datetime as dt
import json
import shutil
import ssl
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from release_rig import IMAGES, Rig, prove, serving, update

from fleet.device.release import Rollout
from fleet.device.runtime import Patience, UpdateRefusedError
from tasks.release_repository import ReleaseRepository


@pytest.fixture
def running(rig: Rig):
    """A device on release 1."""
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        yield runtime


def _refused(runtime, rig: Rig) -> str:
    """The reason of a refused update, after which release 1 still answers."""
    with pytest.raises(UpdateRefusedError) as refused:
        update(runtime, rig)
    assert runtime.predict(IMAGES[0]).release == 1
    return refused.value.reason


def _tamper(part: str, change):
    """Serve files whose path contains `part` changed."""
    return lambda path, content: change(content) if part in path else content


def test_a_rolled_back_repository(running, rig: Rig, tmp_path):
    """Metadata older than what the device has seen is refused, though it is signed and fresh."""
    shutil.copytree(rig.folder / "repository", tmp_path / "old")
    rig.publish(2, model=1)
    update(running, rig)
    rig.server.folder = tmp_path / "old"
    with pytest.raises(UpdateRefusedError) as refused:
        update(running, rig)
    assert refused.value.reason == "rollback"
    assert running.predict(IMAGES[0]).release == 2


def test_an_older_counter_signed_anew(running, rig: Rig):
    """A release whose counter does not grow is refused by the device, whoever signed it."""
    rig.publish(3, model=1)
    update(running, rig)
    prove(running)
    repository = rig.repository
    repository._require_newer = lambda *_: None  # a publisher that does not look
    rig.publish(2, model=0)
    with pytest.raises(UpdateRefusedError) as refused:
        update(running, rig)
    assert refused.value.reason == "counter"
    rig.publish(3, model=2)  # the same counter for something else
    with pytest.raises(UpdateRefusedError) as refused:
        update(running, rig)
    assert refused.value.reason == "counter"
    assert running.predict(IMAGES[0]).release == 3


def test_a_frozen_repository(running, rig: Rig):
    """A timestamp that is over is reported, and the release goes on; a fresh one mends it."""
    rig.repository.sign_timestamp(days=-1)
    assert _refused(running, rig) == "expired"
    rig.repository.sign_timestamp()
    assert update(running, rig).action == "nothing"


def test_mixed_states_of_the_repository(running, rig: Rig, tmp_path):
    """An old snapshot under a new timestamp, and an old targets file under a new snapshot, are refused."""
    old = tmp_path / "old"
    shutil.copytree(rig.folder / "repository", old)
    rig.publish(2, model=1)
    metadata = rig.folder / "repository" / "metadata"
    newest = {name: _newest(metadata, name) for name in ("snapshot", "targets")}
    for name, path in newest.items():
        older = _newest(old / "metadata", name).read_bytes()
        rig.server.tamper = _tamper(f"/{path.name}", lambda _, older=older: older)
        assert _refused(running, rig) == "hash"
    rig.server.tamper = None
    assert update(running, rig).release == 2


def _newest(folder, role):
    return max(folder.glob(f"*.{role}.json"), key=lambda path: int(path.name.split(".")[0]))


def test_another_repositorys_signatures(running, rig: Rig, tmp_path):
    """Metadata signed by keys that the app's root does not name."""
    ReleaseRepository.create(tmp_path / "evil", tmp_path / "evil-keys")
    rig.server.folder = tmp_path / "evil"
    evil = ReleaseRepository(tmp_path / "evil", tmp_path / "evil-keys")
    for _ in range(10):  # newer than all the device has seen
        evil.sign_timestamp()
    assert _refused(running, rig) == "signature"


def test_a_policy_key_signs_no_release(rig: Rig):
    """The policy's role may sign policies only, though its key is in the repository."""
    rig.publish(1)
    repository = rig.repository
    current = repository._read()
    release = current.targets.signed.targets.pop("release.json")
    current.policy.signed.targets["release.json"] = release
    repository._sign(current, "targets", "policy")
    with rig.runtime() as runtime:
        assert update(runtime, rig).action == "nothing"


def test_a_release_that_needs_two_signatures(tmp_path, built, monkeypatch):
    """With a threshold of two the pipeline's key alone makes no release."""
    reviewer = tmp_path / "reviewer"
    ReleaseRepository.create(tmp_path / "repository", tmp_path / "keys", threshold=2, reviewer_keys=reviewer)
    with serving(tmp_path / "repository") as server:
        rig = Rig(tmp_path, *built, server)
        rig.repository = ReleaseRepository(tmp_path / "repository", tmp_path / "keys", reviewer_keys=reviewer)
        rig.publish(1)
        with rig.runtime() as runtime:
            update(runtime, rig)
            prove(runtime)
            server.tamper = _tamper(".targets.json", _without_one_signature)
            monkeypatch.setattr(rig.repository, "_sign", _sign_leniently(rig.repository))
            rig.publish(2, model=1)
            assert _refused(runtime, rig) == "signature"


def _without_one_signature(content: bytes) -> bytes:
    record = json.loads(content)
    record["signatures"] = record["signatures"][:1]
    return json.dumps(record).encode()


def _sign_leniently(repository):
    """Sign so that the snapshot does not know the hash of the targets file, as many repositories do."""
    signed = type(repository)._sign

    def sign(current, *roles, **others):
        signed(repository, current, *roles, **others)
        again = repository._read()
        for meta in again.snapshot.signed.meta.values():
            meta.hashes = meta.length = None
        data = repository._signed(again.snapshot, "snapshot", repository._root_now(), 7)
        (repository._metadata / f"{again.snapshot.signed.version}.snapshot.json").write_bytes(data)
        again.timestamp.signed.snapshot_meta.version = again.snapshot.signed.version
        again.timestamp.signed.snapshot_meta.hashes = again.timestamp.signed.snapshot_meta.length = None
        data = repository._signed(again.timestamp, "timestamp", repository._root_now(), 7)
        (repository._metadata / "timestamp.json").write_bytes(data)

    return sign


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "hash"),
        (lambda content: content + b"x", "length"),
        (lambda content: content[:-1], "length"),
        (lambda content: b"", "length"),
        (lambda content: None, "network"),
    ],
    ids=["bit-flip", "longer", "shorter", "empty", "missing"],
)
def test_a_model_that_is_not_what_was_signed(running, rig: Rig, change, reason):
    """A changed download never gets its name; the true one does, next time."""
    rig.publish(2, model=1)
    rig.server.tamper = _tamper("/files/", change)
    assert _refused(running, rig) == reason
    rig.server.tamper = None
    assert update(running, rig).release == 2


@pytest.mark.parametrize("part", ["timestamp.json", ".snapshot.json", ".targets.json", "release.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[" * 100_000, b"\xff\xfe", b'{"signed": {"_type": "root"}, "signatures": []}']
)
def test_garbage_for_metadata(running, rig: Rig, part, content):
    """Whatever comes instead of metadata is one refusal."""
    rig.publish(2, model=1)
    rig.server.tamper = _tamper(part, lambda _: content)
    assert _refused(running, rig) in {"metadata", "hash", "length", "signature"}
    rig.server.tamper = None
    assert update(running, rig).release == 2


def test_metadata_without_end(running, rig: Rig):
    """A body longer than metadata may be is not read to its end."""
    rig.server.tamper = _tamper("timestamp.json", lambda content: content + b" " * 5_000_000)
    assert _refused(running, rig) == "length"


def test_a_cut_download_goes_on_where_it_ended(running, rig: Rig):
    """The second try asks for the rest only."""
    made = rig.publish(2, model=1)
    rig.server.cut_after = 1000  # metadata is longer: let that through
    rig.server.tamper = None
    cut = rig.server.cut_after
    rig.server.cut_after = None
    rig.server.tamper = _CutFiles(rig.server, cut)
    assert _refused(running, rig) == "network"
    rig.server.tamper, rig.server.cut_after = None, None
    rig.server.requests.clear()
    assert update(running, rig).action == "installed"
    model = made.tiers["high"].model
    asked = [wanted for path, wanted in rig.server.requests if model.sha256 in path]
    assert asked == [f"bytes={cut}-"]
    assert running.predict(IMAGES[0]).release == 2


class _CutFiles:
    """Lets the server cut the bodies of files, not of metadata."""

    def __init__(self, server, cut_after):
        self._server, self._cut = server, cut_after

    def __call__(self, path, content):
        self._server.cut_after = self._cut if "/files/" in path else None
        return content


def test_a_server_that_drips(running, rig: Rig):
    """A body that comes a byte at a time is ended by the clock, not by patience between bytes."""
    rig.server.stall_s = 0.2
    with pytest.raises(UpdateRefusedError) as refused:
        running.update(rig.server.url, patience=Patience(silence_s=1, metadata_s=0.5))
    assert refused.value.reason == "network"
    assert running.predict(IMAGES[0]).release == 1


def test_a_redirect_is_not_followed(running, rig: Rig, tmp_path):
    """The device talks to no other host than it was told to."""
    with serving(tmp_path) as other:
        rig.server.redirect_to = other.url.rstrip("/")
        assert _refused(running, rig) == "network"
        assert other.requests == []


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/",
        "http://127.0.0.1.example.org/",
        "ftp://127.0.0.1/",
        "file:///etc/",
        "https://user:secret@example.org/",
        "http://127.0.0.1/a/?b=c",
        "http://[::1/",
        "",
    ],
)
def test_urls_that_a_device_does_not_talk_to(running, rig: Rig, url):
    """Plain http is for loopback, and a URL holds no secrets."""
    with pytest.raises(UpdateRefusedError) as refused:
        running.update(url)
    assert refused.value.reason == "url"


def test_https_without_a_trusted_certificate(running, rig: Rig):
    """TLS is not talked into plain text."""
    with pytest.raises(UpdateRefusedError) as refused:
        running.update(rig.server.url.replace("http:", "https:"), tls=ssl.create_default_context())
    assert refused.value.reason == "network"


def test_a_server_that_is_not_there(running, rig: Rig):
    """No network is no reason to stop."""
    with pytest.raises(UpdateRefusedError) as refused:
        running.update("http://127.0.0.1:9/")
    assert refused.value.reason == "network"
    assert running.predict(IMAGES[0]).release == 1


@pytest.mark.parametrize(("days_before", "said"), [(20_000, ["clock"]), (91, ["clock"]), (89, [])])
def test_a_clock_that_is_behind(rig: Rig, tmp_path, days_before, said):
    """A device that does not know the date cannot tell a frozen repository from a fresh one: it waits."""
    rig.publish(1)
    rig.runtime().close()
    timestamp = json.loads((rig.folder / "repository/metadata/timestamp.json").read_text())
    expires = dt.datetime.fromisoformat(timestamp["signed"]["expires"])
    early = expires - dt.timedelta(days=days_before)
    code = textwrap.dedent(f"""
        import datetime as dt, sys, pathlib
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        class Early(dt.datetime):
            @classmethod
            def now(cls, tz=None):
                return cls.fromtimestamp({early.timestamp()}, tz)
        dt.datetime = Early
        import fleet.device.runtime.updater as updater
        from fleet.device.runtime import Runtime, UpdateRefusedError
        from release_rig import PHONE
        root = pathlib.Path({str(rig.folder / "repository/metadata/1.root.json")!r}).read_bytes()
        with Runtime(pathlib.Path({str(rig.home)!r}), PHONE, root=root) as runtime:
            try:
                runtime.update({rig.server.url!r})
            except UpdateRefusedError as refused:
                print(refused.reason)
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == said
    with rig.runtime() as runtime:
        assert update(runtime, rig).action == ("installed" if said else "nothing")


def test_a_full_disk(running, rig: Rig, tmp_path):
    """A file that does not fit is one refusal, leaves nothing behind, and release 1 goes on."""
    made = rig.publish(2, model=1)
    running.close()
    script = textwrap.dedent(f"""
        import resource, sys, pathlib
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from release_rig import IMAGES, PHONE
        from fleet.device.runtime import Runtime, UpdateRefusedError
        root = pathlib.Path({str(rig.folder / "repository/metadata/1.root.json")!r}).read_bytes()
        with Runtime(pathlib.Path({str(rig.home)!r}), PHONE, root=root) as runtime:
            resource.setrlimit(resource.RLIMIT_FSIZE, ({made.tiers["high"].model.length - 1},) * 2)
            try:
                runtime.update({rig.server.url!r})
            except UpdateRefusedError as refused:
                print(refused.reason, runtime.predict(IMAGES[0]).release)
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["disk", "1"]
    assert not list((rig.home / "files").glob("*.part"))
    with rig.runtime() as runtime:
        assert update(runtime, rig).release == 2


def test_a_link_in_the_place_of_a_download(running, rig: Rig, tmp_path):
    """A download is not written through a link that somebody laid."""
    made = rig.publish(2, model=1)
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    (rig.home / "files" / f"{made.tiers['high'].model.sha256}.part").symlink_to(precious)
    assert update(running, rig).release == 2
    assert precious.read_bytes() == b"mine"


def test_a_newer_root_is_followed(running, rig: Rig):
    """The root hands over to new keys; a device follows, and what it has stays proven after a restart."""
    repository = rig.repository
    new = repository._keys._folder / "targets.pem"
    new.unlink()
    key = repository._keys.make("targets")
    from tuf.api.metadata import Metadata

    root = Metadata.from_file(str(rig.folder / "repository/metadata/1.root.json"))
    root.signed.version = 2
    root.signed.revoke_key(root.signed.roles["targets"].keyids[0], "targets")
    root.signed.add_key(key, "targets")
    root.sign(repository._keys.signer("root"))
    root.to_file(str(rig.folder / "repository/metadata/2.root.json"))
    rig.publish(2, model=1)
    assert update(running, rig).release == 2
    prove(running)
    running.close()
    with rig.runtime(root=(rig.folder / "repository/metadata/1.root.json").read_bytes()) as runtime:
        assert runtime.predict(IMAGES[0]).release == 2


def test_policies_have_versions_of_their_own(running, rig: Rig):
    """A policy arrives without a release; an older one is refused."""
    from release_rig import policy

    rig.repository.publish_policy(policy(5, tier_of={"Pixel*": "low", "*": "mid"}))
    done = update(running, rig)
    assert (done.policy_version, done.tier) == (5, "low")
    rig.repository._require_newer = lambda *_: None
    rig.repository.publish_policy(policy(4, Rollout(counter=9, salt="t", buckets=1)))
    assert _refused(running, rig) == "counter"
    assert running.status().policy_version == 5
