"""The publisher's side: keys, versions, what is refused before devices would, and kills between files."""

import signal
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tuf.api.metadata import Metadata

RIG = Path(__file__).resolve().parents[1] / "fleet/device/runtime"
sys.path.insert(0, str(RIG))
from release_rig import PREPROCESS, QUICK, policy, release, serving  # noqa: E402  # beside the tests that share it

from fleet.device.errors import UserError  # noqa: E402
from fleet.device.release import FileOf, Rollout, TierPlan  # noqa: E402
from fleet.device.runtime.updater import Updater  # noqa: E402
from tasks.release_repository import ReleaseRepository, file_of  # noqa: E402


@pytest.fixture
def files(tmp_path):
    """Two files, standing for a model and its golden inputs."""
    made = [tmp_path / "model", tmp_path / "golden"]
    for path in made:
        path.write_bytes(path.name.encode() * 100)
    return made


@pytest.fixture
def repository(tmp_path):
    """A new one."""
    return ReleaseRepository.create(tmp_path / "repository", tmp_path / "keys")


def _release(counter, files):
    plan = TierPlan(
        action="run",
        variant="v",
        model=file_of(files[0]),
        golden=file_of(files[1]),
        preprocess=PREPROCESS.to_dict(),
        preprocess_sha256=PREPROCESS.digest(),
        golden_tolerance=0.1,
        measured=True,
    )
    return release(counter, plan)


def _device(repository, tmp_path, server):
    """A device that has verified the newest metadata."""
    updater = Updater(tmp_path / "device", server.url, repository.root, patience=QUICK)
    updater.refresh()
    return updater


def test_keys_are_for_their_owner(repository, tmp_path):
    """Mode 600 in a folder of mode 700; a key that others may read does not sign."""
    keys = tmp_path / "keys"
    assert keys.stat().st_mode & 0o777 == 0o700
    found = sorted(path.name for path in keys.iterdir())
    assert found == ["policy.pem", "root.pem", "snapshot.pem", "targets.pem", "timestamp.pem"]
    assert {path.stat().st_mode & 0o777 for path in keys.iterdir()} == {0o600}
    (keys / "timestamp.pem").chmod(0o640)
    with pytest.raises(UserError, match="mode 640"):
        repository.sign_timestamp()


def test_the_root_key_may_be_away(repository, tmp_path, files):
    """Everything but a new root is signed without it."""
    (tmp_path / "keys/root.pem").rename(tmp_path / "in a safe")
    repository.publish_release(_release(1, files), files)
    repository.publish_policy(policy(1))
    repository.sign_timestamp()
    assert repository.release().counter == 1
    assert repository.policy().version == 1


def test_devices_verify_what_is_published(repository, tmp_path, files):
    """Release and policy come through python-tuf's client, by their own roles."""
    repository.publish_release(_release(1, files), {file_of(path).sha256: path for path in files})
    repository.publish_policy(policy(4))
    with serving(tmp_path / "repository") as server:
        device = _device(repository, tmp_path, server)
        assert device.sealed("release.json").content.encode() == _release(1, files).to_bytes()
        sealed = device.sealed("policy.json")
        assert sealed.content.encode() == policy(4).to_bytes()
        assert [signer.role for signer in sealed.signers] == ["targets", "policy"]
        assert not device.is_demo()


def test_timestamps_are_for_days_and_the_rest_for_a_year(repository):
    """What has to be fresh is signed daily; what is rare is not."""
    metadata = repository.folder / "metadata"
    expiry = {
        name: Metadata.from_file(str(metadata / name)).signed.expires
        for name in ("timestamp.json", "1.snapshot.json", "1.targets.json", "1.policy.json", "1.root.json")
    }
    first = expiry.pop("timestamp.json")
    assert {(end - first).days for end in expiry.values()} <= {357, 358}


def test_a_timestamp_alone_changes_nothing_else(repository):
    """Signing daily costs one file."""
    before = {path: path.read_bytes() for path in repository.folder.rglob("*.json")}
    repository.sign_timestamp()
    after = {path: path.read_bytes() for path in repository.folder.rglob("*.json")}
    assert [path.name for path in after if after[path] != before.get(path)] == ["timestamp.json"]


def test_numbers_grow(repository, files):
    """What devices would refuse is not published."""
    repository.publish_release(_release(5, files), files)
    repository.publish_policy(policy(3))
    for counter in (5, 4):
        with pytest.raises(UserError, match="above 5"):
            repository.publish_release(_release(counter, files), files)
        with pytest.raises(UserError, match="above 3"):
            repository.publish_policy(policy(counter - 2))
    assert repository.release().counter == 5


def test_files_are_what_the_release_says(repository, files, tmp_path):
    """A missing file, and one that changed since, leave the repository as it was."""
    made = _release(1, files)
    with pytest.raises(UserError, match="no file"):
        repository.publish_release(made, files[:1])
    changed = {
        made.tiers["high"].model.sha256: tmp_path / "model",
        made.tiers["high"].golden.sha256: files[0],
    }
    with pytest.raises(UserError, match="names by hash and length"):
        repository.publish_release(made, changed)
    longer = replace(made.tiers["high"], model=FileOf(sha256=file_of(files[0]).sha256, length=3))
    with pytest.raises(UserError, match="3 bytes"):
        repository.publish_release(replace(made, tiers={"high": longer}), files)
    assert repository.release() is None
    repository.publish_release(made, files)
    repository.publish_release(_release(2, files), [])  # the repository has them already
    assert repository.release().counter == 2


def test_two_signatures(tmp_path, files):
    """With a threshold of two a release needs the reviewer's key; a policy does not."""
    ReleaseRepository.create(
        tmp_path / "repository", tmp_path / "keys", threshold=2, reviewer_keys=tmp_path / "reviewer"
    )
    pipeline = ReleaseRepository(tmp_path / "repository", tmp_path / "keys")
    with pytest.raises(UserError, match=r"reviewer\.pem"):
        pipeline.publish_release(_release(1, files), files)
    assert pipeline.release() is None
    pipeline.publish_policy(policy(1))
    both = ReleaseRepository(tmp_path / "repository", tmp_path / "keys", reviewer_keys=tmp_path / "reviewer")
    both.publish_release(_release(1, files), files)
    with serving(tmp_path / "repository") as server:
        assert _device(both, tmp_path, server).sealed("release.json") is not None


def test_the_release_before_is_one_that_was_out_for_all(repository, files):
    """A release whose rollout was stopped is not what new devices fall back on."""
    repository.publish_policy(policy(1, Rollout(counter=1, salt="s", buckets=10_000)))
    repository.publish_release(_release(1, files), files)
    repository.publish_release(_release(2, files), files)
    repository.publish_policy(policy(2, Rollout(counter=2, salt="s", buckets=10_000, stopped=True)))
    repository.publish_release(_release(3, files), files)
    current = repository._read()
    before = repository._content(current.targets, "release-before.json")
    assert before == _release(1, files).to_bytes()


def test_wrong_places(tmp_path, repository):
    """A repository is created once, with keys of its own, and found or not."""
    with pytest.raises(UserError, match="new folder"):
        ReleaseRepository.create(tmp_path / "repository", tmp_path / "others")
    with pytest.raises(UserError, match="exists"):
        ReleaseRepository.create(tmp_path / "second", tmp_path / "keys")
    with pytest.raises(UserError, match="threshold 3"):
        ReleaseRepository.create(tmp_path / "third", tmp_path / "third-keys", threshold=3)
    with pytest.raises(UserError, match="is no repository"):
        ReleaseRepository(tmp_path / "nowhere", tmp_path / "keys").release()
    ReleaseRepository.create(tmp_path / "fourth", tmp_path / "fourth-keys")
    with pytest.raises(UserError, match="do not sign"):
        ReleaseRepository(tmp_path / "fourth", tmp_path / "keys").sign_timestamp()


def test_two_publishers(repository, files):
    """They take turns: no version is signed twice, no release is lost."""
    failures = []

    def publish(start):
        mine = ReleaseRepository(repository.folder, repository.folder.parent / "keys")
        for version in range(start, 20, 2):
            try:
                mine.publish_policy(policy(version))
            except UserError as error:
                failures.append(error)  # the other one is ahead

    threads = [threading.Thread(target=publish, args=(start,)) for start in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert repository.policy().version >= 18
    assert repository._read().policy.signed.version == 1 + 19 - len(failures)


def test_a_publisher_that_is_killed(repository, tmp_path, files):
    """Whichever write it dies at, devices see the old release or the new one, the next publisher goes on."""
    repository.publish_release(_release(1, files), files)
    code = textwrap.dedent(f"""
        import os, signal, sys, pathlib
        sys.path[:0] = [{str(RIG)!r}, {str(Path(__file__).parent)!r}]
        from test_release_repository import _release
        from tasks.release_repository import ReleaseRepository
        folder = pathlib.Path({str(tmp_path)!r})
        new = [folder / "new model", folder / "golden"]
        new[0].write_bytes(sys.argv[2].encode() * 99)
        sync, left = os.fsync, [int(sys.argv[1])]
        def fsync(descriptor):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(descriptor)
        os.fsync = fsync
        repository = ReleaseRepository(folder / "repository", folder / "keys")
        repository.publish_release(_release(int(sys.argv[2]), new), new)
    """)
    kill_at, seen = 1, [1]
    with serving(tmp_path / "repository") as server:
        while True:
            counter = seen[-1] + 1
            arguments = [sys.executable, "-c", code, str(kill_at), str(counter)]
            done = subprocess.run(arguments, capture_output=True, text=True, check=False)
            seen.append(repository.release().counter)
            assert (
                f'"counter":{seen[-1]},'
                in _device(repository, tmp_path, server).sealed("release.json").content
            )
            if done.returncode == 0:
                break
            assert done.returncode == -signal.SIGKILL, done.stderr
            kill_at += 1
    assert seen[-1] == counter
    assert kill_at > 8
    repository.publish_policy(policy(1))
