"""What a policy decides on a device: backend, tier, and whether a release is its turn."""

from dataclasses import replace

from release_rig import IMAGES, PHONE, Rig, policy, prove, update

from fleet.device.release import Denied, Rollout, TierPlan, bucket_of


def test_a_backend_that_is_not_here(rig: Rig):
    """The GPU's release runs on the CPU, and says so truthfully."""
    config = {"backend": "VULKAN", "threads": 2, "precision": "normal", "memory": "normal"}
    rig.publish(1, tiers={"high": rig.plan(0, config=config)})
    with rig.runtime() as runtime:
        update(runtime, rig)
        assert runtime.predict(IMAGES[0]).backend == "CPU"
        running = runtime.status().running
        assert running.config_name == "cpu-t2-normal-normal"
        assert "has no VULKAN here" in running.instead
        rig.repository.publish_policy(
            policy(1, deny=(Denied(device_model="Pixel*", backend="VULKAN", why="its driver is slow"),))
        )
        assert update(runtime, rig).action == "policy"
        assert runtime.status().running.instead == "its driver is slow"


def test_a_tier_that_keeps_what_it_has(rig: Rig):
    """A release may leave a tier out."""
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        rig.publish(2, tiers={"high": TierPlan(action="keep"), "mid": rig.plan(1)})
        kept = update(runtime, rig)
        assert (kept.action, kept.reason, kept.release) == ("kept", "tier", 1)
        rig.repository.publish_policy(policy(1, tier_of={"Pixel 8": "mid"}))
        done = update(runtime, rig)
        assert (done.action, done.tier, done.release) == ("installed", "mid", 2)


def test_threads_by_rule_until_measured(rig: Rig):
    """An unmeasured tier gets the device's big cores; a measured one what was measured."""
    rig.publish(1, tiers={"high": rig.plan(0, measured=False, waiver="lab: no such phone")})
    with rig.runtime() as runtime:
        update(runtime, rig)
        assert runtime.status().running.config.threads == 4
        rig.publish(2)
        prove(runtime)
        update(runtime, rig)
        assert runtime.status().running.config.threads == 1


def test_a_policy_moves_a_device_to_another_tier(rig: Rig):
    """The same release, the other tier's model, without a release."""
    rig.publish(1, tiers={"high": rig.plan(0), "low": rig.plan(1)})
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        assert runtime.predict(IMAGES[0]).variant == "v0"
        rig.repository.publish_policy(policy(1, tier_of={"Pixel ?": "low", "*": "high"}))
        assert update(runtime, rig).action == "installed"
        assert runtime.predict(IMAGES[0]).variant == "v1"
        prove(runtime)
    with rig.runtime() as runtime:
        assert runtime.predict(IMAGES[0]).variant == "v1"


def test_a_policy_edited_on_disk_is_none(rig: Rig):
    """What nobody signed is not obeyed; the next update brings the true one."""
    rig.publish(1)
    rig.repository.publish_policy(policy(3, tier_of={"*": "low"}))
    with rig.runtime() as runtime:
        update(runtime, rig)
    path = rig.home / "policy.json"
    path.write_text(path.read_text().replace("low", "mid"))
    with rig.runtime() as runtime:
        assert runtime.status().policy_version == 0
        assert update(runtime, rig).policy_version == 3
        assert runtime.status().tier == "low"


def test_a_rollout_reaches_its_share(rig: Rig):
    """Only devices below the share take the release, and those of the control group never."""
    rig.publish(1)
    with rig.runtime() as runtime:
        update(runtime, rig)
        prove(runtime)
        rig.publish(2, model=1)
        mine = bucket_of("salt", PHONE.id)
        shares = [
            Rollout(counter=2, salt="salt", buckets=mine),
            Rollout(counter=2, salt="salt", buckets=10_000, control=10_000 - mine),
            Rollout(counter=2, salt="salt", buckets=10_000, stopped=True),
            Rollout(counter=1, salt="salt", buckets=10_000),
        ]
        for version, rollout in enumerate(shares, 1):
            rig.repository.publish_policy(policy(version, rollout))
            kept = update(runtime, rig)
            assert (kept.action, kept.reason, kept.release) == ("kept", "rollout", 1)
        rollout = Rollout(counter=2, salt="salt", buckets=mine + 1, control=9_999 - mine)
        rig.repository.publish_policy(policy(9, rollout))
        assert update(runtime, rig).release == 2
        rig.repository.publish_policy(policy(10, replace(rollout, buckets=0, stopped=True)))
        assert update(runtime, rig).release == 2  # a stop takes nothing back: a rollback is a new counter


def test_a_new_device_outside_the_rollout_gets_the_release_before(rig: Rig):
    """A device that has nothing is not left with nothing while a release is tried on others."""
    rig.publish(1)
    rig.repository.publish_policy(policy(1, Rollout(counter=1, salt="s", buckets=10_000)))
    rig.publish(2, model=1)
    rig.repository.publish_policy(policy(2, Rollout(counter=2, salt="s", buckets=0, stopped=True)))
    with rig.runtime() as runtime:
        assert update(runtime, rig).release == 1
        prove(runtime)
        rig.publish(3, model=2)
        rig.repository.publish_policy(policy(3, Rollout(counter=3, salt="s", buckets=0)))
        assert update(runtime, rig).reason == "rollout"
    rig.home = rig.folder / "newer device"
    with rig.runtime() as runtime:
        assert update(runtime, rig).release == 1  # 2 was never out for everybody
    rig.repository.publish_policy(policy(4, Rollout(counter=3, salt="s", buckets=10_000)))
    with rig.runtime() as runtime:
        assert update(runtime, rig).release == 3
