"""Two releases on a device: what fails falls back, and a kill at any moment leaves something that runs."""

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from release_rig import IMAGES, LABELS, Rig, logits_of, policy, prove, update

from fleet.device.release import Denied
from fleet.device.runtime import UpdateRefusedError
from fleet.device.runtime.golden import Golden

_CHILD = """
import os, pathlib, signal, sys
sys.path.insert(0, {tests!r})
from release_rig import IMAGES, PHONE, QUICK
from fleet.device.runtime import Runtime, UpdateRefusedError
root = pathlib.Path({root!r}).read_bytes()
{patch}
with Runtime(pathlib.Path({home!r}), PHONE, root=root, trial_inferences=3) as runtime:
    {body}
"""
_KILL_AT_SYNC = """
sync, left = os.fsync, [int(sys.argv[1])]
def fsync(descriptor):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    sync(descriptor)
os.fsync = fsync
"""
_CRASH_IN_ENGINE = """
import fleet.device.runtime.loaded as loaded
opened = loaded.Session
def crash(path, **others):
    if "{sha256}" in str(path):
        os.kill(os.getpid(), signal.SIGSEGV)
    return opened(path, **others)
loaded.Session = crash
"""


def _child(rig: Rig, body: str, patch: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = _CHILD.format(
        tests=str(Path(__file__).parent),
        root=str(rig.folder / "repository/metadata/1.root.json"),
        home=str(rig.home),
        patch=patch,
        body=textwrap.indent(textwrap.dedent(body), "    ").strip(),
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )


def _on_release_1(rig: Rig) -> None:
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)


def test_kill_9_at_every_step_of_an_update(rig: Rig):
    """Whichever write it is killed at, the next process answers with release 1 or 2, whole, and gets to 2."""
    _on_release_1(rig)
    rig.publish(2, model=1)
    body = f"""
    runtime.update({rig.server.url!r}, patience=QUICK)
    for _ in range(4): runtime.predict(IMAGES[0])
    """
    seen, kill_at = set(), 1
    while _child(rig, body, _KILL_AT_SYNC, str(kill_at)).returncode == -signal.SIGKILL:
        with rig.runtime() as runtime:
            answer = runtime.predict(IMAGES[0])
            np.testing.assert_allclose(answer.logits, rig.expected(answer.release - 1), rtol=1e-6)
            seen.add(answer.release)
            assert runtime.status().bad == {}
        _forget_release_2(rig)
        kill_at += 1
    assert seen == {1, 2}
    assert kill_at > 5
    with rig.runtime() as runtime:
        update(runtime, rig)
        assert runtime.predict(IMAGES[0]).release == 2


def _forget_release_2(rig: Rig) -> None:
    """Back to a device that has release 1 only, for the next kill."""
    state = json.loads((rig.home / "state.json").read_text())
    state |= {"active": {"counter": 1, "tier": "high"}, "previous": None, "status": "good"}
    state |= {"starts": 0, "served": 0, "highest": 1, "highest_sha256": ""}
    (rig.home / "state.json").write_text(json.dumps(state))
    (rig.home / "slots/2.json").unlink(missing_ok=True)
    with rig.runtime() as runtime:
        runtime.load()
        runtime._home.tidy()


def test_a_model_that_crashes_the_engine(rig: Rig):
    """Native code that dies takes the process along a few times, not for ever: then release 1 runs again."""
    _on_release_1(rig)
    made = rig.publish(2, model=1)
    crash = _CRASH_IN_ENGINE.format(sha256=made.tiers["high"].model.sha256)
    body = f"""
    if sys.argv[1] == "update": runtime.update({rig.server.url!r}, patience=QUICK)
    print(runtime.predict(IMAGES[0]).release)
    """
    ends = [_child(rig, body, crash, "update")] + [_child(rig, body, crash, "run") for _ in range(3)]
    assert [done.returncode for done in ends] == [-signal.SIGSEGV] * 3 + [0]
    assert ends[-1].stdout.split() == ["1"]
    with rig.runtime() as runtime:
        kept = update(runtime, rig)
        assert (kept.action, kept.reason, kept.release) == ("kept", "bad", 1)
        assert "crash" in runtime.status().bad["2/high"]
        rig.publish(3, model=2)
        assert update(runtime, rig).release == 3


def test_processes_that_end_in_order_do_not_count_as_crashes(rig: Rig):
    """A tool that asks for one answer at a time lets a release become good."""
    rig.publish(1)
    with rig.runtime(trial_inferences=6) as runtime:
        update(runtime, rig)
    for _ in range(6):
        with rig.runtime(trial_inferences=6) as runtime:
            runtime.predict(IMAGES[0])
            trying = runtime.status().trying
    assert not trying


def test_what_is_no_crash_does_not_count_as_one(rig: Rig):
    """Policies during a trial, and starts with a damaged file, cost a release nothing."""
    _on_release_1(rig)
    made = rig.publish(2, model=1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        for version in range(1, 6):
            deny = (Denied(device_model="*", backend="VULKAN", why=f"since {version}"),)
            rig.repository.publish_policy(policy(version, deny=deny))
            update(runtime, rig)
        assert runtime.predict(IMAGES[0]).release == 2
    rig.stored(made.tiers["high"].model).write_bytes(b"damaged")
    for _ in range(5):
        with rig.runtime() as runtime:
            assert runtime.predict(IMAGES[0]).release == 1
    with rig.runtime() as runtime:
        assert update(runtime, rig).action == "repaired"
        prove(runtime)
        assert (runtime.predict(IMAGES[0]).release, runtime.status().bad) == (2, {})


def test_a_state_that_cannot_be_read(rig: Rig):
    """The newest release on the device is tried again, the one before it is what to fall back on."""
    _on_release_1(rig)
    rig.publish(2, model=1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
    for content in (b"", b'{"schema": 99}', b"\x00" * 100):
        (rig.home / "state.json").write_bytes(content)
        with rig.runtime() as runtime:
            assert runtime.status().trying
            assert runtime.status().previous.counter == 1


def test_a_failed_self_test_leaves_the_old_release_running(rig: Rig):
    """A model that answers otherwise than where it was proven is never asked, and never tried again."""
    _on_release_1(rig)
    wrong = rig.plan(1, golden=rig.plan(0).golden)
    rig.publish(2, tiers={"high": wrong})
    with rig.runtime() as runtime:
        runtime.predict(IMAGES[0])
        with pytest.raises(UpdateRefusedError) as refused:
            update(runtime, rig)
        assert refused.value.reason == "golden"
        assert runtime.predict(IMAGES[0]).release == 1
        again = update(runtime, rig)
        assert (again.action, again.reason) == ("kept", "bad")
    with rig.runtime() as runtime:
        assert runtime.predict(IMAGES[0]).release == 1


@pytest.mark.parametrize(("tolerance", "runs"), [(0.02, True), (0.005, False)])
def test_a_tolerance_decides_the_self_test(rig: Rig, tolerance, runs):
    """A logit that is off by 1 % of their range passes at 2 % and fails at half a percent."""
    logits = logits_of(rig.models[0])
    logits[1, 2] += 0.01 * (logits.max() - logits.min())
    off = rig.folder / "off.npz"
    off.write_bytes(Golden(images=IMAGES, logits=logits, labels=LABELS).to_bytes())
    rig.goldens = [off]
    rig.publish(1, tiers={"high": rig.plan(0, golden_tolerance=tolerance)})
    with rig.runtime() as runtime:
        if runs:
            assert update(runtime, rig).release == 1
        else:
            with pytest.raises(UpdateRefusedError, match=r"golden.*is 0.01 of the range"):
                update(runtime, rig)


def test_a_release_that_fails_in_its_first_inferences(rig: Rig, trap):
    """The request that failed is answered by the release before; the failed one is bad."""
    _on_release_1(rig)
    model, golden = trap
    rig.models, rig.goldens = [*rig.models, model], [*rig.goldens, golden]
    rig.publish(2, model=len(rig.models) - 1)
    dark = np.zeros_like(IMAGES[0])
    with rig.runtime() as runtime:
        assert update(runtime, rig).release == 2
        assert runtime.predict(IMAGES[0]).release == 2
        answer = runtime.predict(dark)
        assert answer.release == 1
        np.testing.assert_allclose(answer.logits, rig.expected(0, dark), rtol=1e-6)
        assert "not finite" in runtime.status().bad["2/high"]
        assert update(runtime, rig).reason == "bad"


def test_a_failure_after_the_trial_is_the_callers(rig: Rig, trap):
    """A release that is good stays; the app hears of the one inference that failed."""
    from fleet.device.runtime import AbnormalOutputError

    model, golden = trap
    rig.models, rig.goldens = [model], [golden]
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        with pytest.raises(AbnormalOutputError, match="5 of them not finite"):
            runtime.predict(np.zeros_like(IMAGES[0]))
        assert runtime.predict(IMAGES[0]).release == 1


def test_a_disk_that_cannot_be_written_stops_no_request(rig: Rig):
    """The trial cannot be noted as passed; answers come all the same, and it is noted later."""
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        body = runtime._home.slots
        file, body._file = body._file, rig.home / "gone" / "state.json"
        prove(runtime)
        assert runtime.status().trying
        assert any("disk" in refusal for refusal in runtime.status().refusals)
        body._file = file
        prove(runtime)
        assert not runtime.status().trying


def test_a_release_on_trial_is_no_fallback(rig: Rig):
    """2 was never proven when 3 came: 3 fails, and 1 answers."""
    _on_release_1(rig)
    rig.publish(2, model=1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        runtime.predict(IMAGES[0])
        rig.publish(3, model=2)
        update(runtime, rig)
        assert runtime.status().previous.counter == 1
