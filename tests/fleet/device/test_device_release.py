"""Releases and policies from outside: exactly what they are, or one error."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "runtime"))
from release_rig import policy, release  # beside the tests that share it

from fleet.device.errors import UserError
from fleet.device.release import (
    BUCKETS,
    Denied,
    FileOf,
    Policy,
    Release,
    Rollout,
    TierPlan,
    UploadRule,
    bucket_of,
    engine_key,
)

PLAN = TierPlan(
    action="run",
    variant="mbv3s-p30-i8-r48",
    model=FileOf(sha256="a" * 64, length=5),
    preprocess={"size_px": 48, "mean": [0.5, 0.5, 0.5]},
    preprocess_sha256="b" * 64,
    config={"backend": "CPU", "threads": 2},
    golden=FileOf(sha256="c" * 64, length=7),
    golden_tolerance=0.01,
    waiver="lab: not measured yet",
)
RELEASE = release(7, PLAN)
POLICY = policy(
    3,
    tier_of={"b*": "low", "a*": "high"},
    deny=(Denied(device_model="x*", backend="OPENCL", why="slow"),),
    upload=(UploadRule(network="wifi", charging=True, every_s=300, share=1.0),),
)


@pytest.mark.parametrize("record", [RELEASE, POLICY], ids=["release", "policy"])
def test_bytes_and_back(record):
    """What is written is read as the same record, and writes the same bytes."""
    data = record.to_bytes()
    again = type(record).parse(data)
    assert again == record
    assert again.to_bytes() == data
    assert list(Policy.parse(POLICY.to_bytes()).tier_of) == ["b*", "a*"]  # the first that fits wins


def _set(path, value):
    def change(record):
        *parents, last = path.split(".")
        for name in parents:
            record = record[int(name)] if isinstance(record, list) else record[name]
        record[last] = value

    return change


WRONG_IN_RELEASE = {
    "counter": [0, -1, True, 1.0, "7", None, 2**53 + 1],
    "schema": [2, 0, True, "1", None],
    "engine_version": ["3", "3.6.1.0.0", "3.6.x", "", 3.6, "2.0", "3.6.1\n"],
    "engine_minimum": ["9.9"],
    "model_version": ["", "a b", "../x", ".hidden", "x" * 201, 1],
    "labels": [[], [""], ["a", "a"], "abc", [1], None],
    "confidence_minimum": [-0.1, 1.1, True, "0.3", float("nan"), float("inf")],
    "tiers": [{}, {"huge": {}}, [], None],
    "mlflow": [{"model": 1}, []],
    "changes": ["a", [None]],
    "dvc_lock_sha256": ["", "A" * 64, "g" * 64],
    "extra": [1],
    "tiers.high.variant": ["", "../../etc/passwd", "a/b", "-x", "a\0b"],
    "tiers.high.model": [None, {}, {"sha256": "a" * 64}, {"sha256": "a" * 64, "length": 5, "url": "x"}],
    "tiers.high.model.sha256": ["../" + "a" * 61, "a" * 63, 5],
    "tiers.high.model.length": [0, -5, 2**31 + 1, 5.0, True],
    "tiers.high.golden_tolerance": [0, 1.5, -1, False],
    "tiers.high.waiver": [""],
    "tiers.high.measured": [1, "yes", None],
    "tiers.high.action": ["delete", "RUN", None, []],
    "tiers.high.config": [None, [1]],
    "tiers.high.preprocess": [{"mean": float("nan")}],
    "tiers.low.action": ["keep"],  # with a model
}
WRONG_IN_POLICY = {
    "version": [0, False],
    "schema": [2],
    "tier_of": [{"": "low"}, {"a": "lowest"}, []],
    "deny": [[{"device_model": "x", "backend": "CPU", "why": ""}], [{}], None],
    "upload.0.network": ["lan", "WIFI", 1],
    "upload.0.charging": [1, None],
    "upload.0.every_s": [0, 10**9, 1.5],
    "upload.0.share": [-1, 1.01, True],
    "anomalies.latency_ms": [0, -1],
    "anomalies.confidence": [2],
    "frames.base_fps": [0, 1e9],
    "frames.warm_c": [46, -300],
    "frames.hysteresis_c": [-1],
    "frames.memory_watermark": [0, 2],
    "rollout.buckets": [-1, 10_001, 0.5],
    "rollout.control": [-1, 10_001],
    "rollout.counter": [-1],
    "rollout.salt": [None, 5],
    "cloud_fallback": [0, "false"],
}


@pytest.mark.parametrize(
    ("record", "path", "value"),
    [
        pytest.param(record, path, value, id=f"{path}={ascii(value)[:30]}")
        for record, wrong in ((RELEASE, WRONG_IN_RELEASE), (POLICY, WRONG_IN_POLICY))
        for path, values in wrong.items()
        for value in values
    ],
)
def test_a_wrong_value_is_named(record, path, value):
    """One error, which names the field that is wrong."""
    changed = json.loads(record.to_bytes())
    _set(path, value)(changed)
    with pytest.raises(UserError) as error:
        type(record).parse(json.dumps(changed).encode())
    said = str(error.value)
    assert any(name in said for name in path.split(".")) or "finite numbers" in said


@pytest.mark.parametrize("kind", [Release, Policy])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 200_000,
        b'{"schema":1,"schema":1}',
        b'{"schema":' + b"1" * 5000 + b"}",
        b'{"schema":1' + b" " * 2_000_000 + b"}",
        b'{"schema":1,"a":NaN}',
        b'{"schema":1} x',
    ],
)
def test_bytes_that_are_no_record(kind, data):
    """Nothing but a UserError comes of them, quickly."""
    with pytest.raises(UserError):
        kind.parse(data)


@pytest.mark.parametrize("record", [RELEASE, POLICY])
def test_every_field_is_needed(record):
    """A field that is missing is refused by its name, none is made up."""
    for name in json.loads(record.to_bytes()):
        changed = json.loads(record.to_bytes())
        del changed[name]
        with pytest.raises(UserError, match=name):
            type(record).parse(json.dumps(changed).encode())


def test_a_half_of_a_letter():
    """JSON can write half of a surrogate pair; no file can hold it."""
    changed = RELEASE.to_bytes().replace(b'"ant"', b'"\\ud800"')
    with pytest.raises(UserError, match="labels"):
        Release.parse(changed)


def test_nothing_is_written_that_would_not_be_read():
    """A mistake shows where it is made, not on the devices."""
    with pytest.raises(UserError, match="counter"):
        replace(RELEASE, counter=0).to_bytes()
    with pytest.raises(UserError, match="buckets"):
        policy(1, Rollout(counter=1, salt="", buckets=20_000)).to_bytes()


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_a_record_or_a_user_error(data):
    """No other exception, whatever comes."""
    for kind in (Release, Policy):
        with pytest.raises(UserError):
            kind.parse(data)


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=5), st.data())
def test_any_value_in_any_field_is_taken_or_named(value, data):
    """A field changed to anything: the same record back, or one UserError."""
    changed = json.loads(POLICY.to_bytes())
    changed[data.draw(st.sampled_from(sorted(changed)))] = value
    try:
        taken = Policy.parse(json.dumps(changed).encode())
    except UserError:
        return
    assert json.loads(taken.to_bytes()) == changed


def test_buckets_are_even_and_change_with_the_salt():
    """A tenth of the devices lies below a tenth of the buckets; another salt draws anew."""
    devices = [f"device-{n}" for n in range(20_000)]
    share = sum(bucket_of("s", device) < BUCKETS // 10 for device in devices) / len(devices)
    assert abs(share - 0.1) < 0.01
    both = sum(bucket_of(s, d) < 1000 and bucket_of("t", d) < 1000 for s in "s" for d in devices)
    assert abs(both / len(devices) - 0.01) < 0.004
    assert bucket_of("salt", "device") == 1640


def test_engines_are_ordered_by_number():
    """3.10 comes after 3.9, and 3.6 is 3.6.0."""
    assert engine_key("3.10") > engine_key("3.9.9")
    assert engine_key("3.6") == engine_key("3.6.0")
