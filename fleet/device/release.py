"""What a release and a policy say: the two signed targets a device obeys.

A release binds model, engine, runtime config and monitor; it changes all or nothing. A policy (tiers,
upload, deny list, frame rates, rollout) has its own version and its own key, and changes without a
release and without an app. Both are canonical JSON, targets of one TUF repository
(https://theupdateframework.github.io/specification/):

    release.json                 role targets
    release-before.json          role targets: the last release that every device was offered
    policy.json                  role policy, delegated
    files/SHA256                 models and golden inputs, role targets

`parse` takes bytes from outside: whatever is not exactly such a record is one UserError. `to_bytes` writes
what `parse` would take, and nothing else.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from fleet.device.errors import UserError
from fleet.device.strict_json import json_bytes, read_json

RELEASE_TARGET, POLICY_TARGET, FILES = "release.json", "policy.json", "files/"
BEFORE_TARGET = "release-before.json"
"""What a device without any release gets that the rollout of `release.json` leaves out."""
RELEASE_SCHEMA = POLICY_SCHEMA = 1
BUCKETS = 10_000
MOST_FILE_BYTES = 2**31
Tier = Literal["high", "mid", "low"]

_Wrong = tuple[str, Any, str]
"""Where, what was got, what is allowed."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+:-]{0,199}")
_ENGINE = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}")
_BACKENDS = ("CPU", "OPENCL", "VULKAN", "METAL")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOf:
    """A file of a release, by its content."""

    sha256: str
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TierPlan:
    """What a tier runs."""

    action: Literal["run", "keep"]
    """keep: go on with the release before."""
    variant: str = ""
    model: FileOf | None = None
    preprocess: dict[str, Any] = field(default_factory=dict)
    """Record of `fleet/device/preprocess.py`."""
    preprocess_sha256: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    """Record of `RuntimeConfig`: backend, threads, precision, memory."""
    golden: FileOf | None = None
    """.npz, no pickles: `images` uint8 RGB [N, H, W, 3], `logits` float32 [N, classes] of this variant, and
    `labels` [classes], the names in the order of the logits."""
    golden_tolerance: float = 0.0
    """Most |difference| of a logit, as a share of the range of the golden logits."""
    measured: bool = False
    """Whether the tier was chosen by measurement; if not, `waiver` says who lets it go."""
    waiver: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """`release.json`."""

    schema: int
    counter: int
    """Grows with every release, a rollback included."""
    model_version: str
    engine_version: str
    """It was proven with this one."""
    engine_minimum: str
    """It runs on this one and later: a device with an older engine keeps what it has."""
    config_version: str
    monitor_version: str
    labels: tuple[str, ...]
    confidence_minimum: float
    """Below it an answer is doubtful: an anomaly, and a case for the cloud where consent allows."""
    tiers: dict[Tier, TierPlan]
    git_commit: str
    dvc_lock_sha256: str
    mlflow: dict[str, str]
    """model, version, run_id."""
    changes: tuple[str, ...]

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The release in these bytes.

        Raises:
            UserError: another schema, a field too many or too few, a wrong type, a value out of range.
        """
        release = read_json(cls, data, what=RELEASE_TARGET, schema=RELEASE_SCHEMA)
        _require(RELEASE_TARGET, _wrong_in_release(release))
        return release

    def to_bytes(self) -> bytes:
        """`release.json`.

        Raises:
            UserError: `parse` would not take it.
        """
        data = json_bytes(self)
        type(self).parse(data)
        return data

    def files_of(self, tier: Tier) -> tuple[FileOf, ...]:
        """What a device of this tier needs: model and golden inputs; nothing where it keeps what it has."""
        plan = self.tiers.get(tier)
        return () if plan is None else tuple(file for file in (plan.model, plan.golden) if file)


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadRule:
    """When windows are sent in one state of network and power."""

    network: Literal["wifi", "mobile"]
    charging: bool
    every_s: int
    share: float
    """0 to 1 of the windows; anomalous ones are always sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Denied:
    """A backend that is slower or wrong on a device model."""

    device_model: str
    """Shell pattern."""
    backend: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AnomalyLimits:
    """M5 of the requirements."""

    latency_ms: float = 200.0
    latency_times_p99: float = 2.0
    memory_mb: float = 500.0
    confidence: float = 0.3
    consecutive_failures: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class FramePolicy:
    """M8 of the requirements: what heat, battery and memory cost in frames."""

    base_fps: float = 15.0
    warm_c: float = 40.0
    """Lower frame rate."""
    hot_c: float = 45.0
    """Low-power model."""
    pause_c: float = 48.0
    hysteresis_c: float = 2.0
    low_battery_percent: float = 20.0
    memory_watermark: float = 0.7
    """Of what this process could take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """Who gets a release: devices whose bucket is below the share, and never those in `control`."""

    counter: int
    salt: str
    """Bucket of a device = SHA-256(salt ‖ device id) mod 10,000."""
    buckets: int
    """0 to 10,000."""
    stopped: bool = False
    control: int = 0
    """How many of the highest buckets are left out to the end, to compare with: 0 to 10,000."""

    def takes(self, counter: int, device_id: str) -> bool:
        """Whether a device may take the release `counter`: those before this one are out for everybody."""
        if counter != self.counter:
            return counter < self.counter
        bucket = bucket_of(self.salt, device_id)
        return not self.stopped and bucket < min(self.buckets, BUCKETS - self.control)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """`policy.json`."""

    schema: int
    version: int
    tier_of: dict[str, Tier]
    """Device model (shell pattern) to tier; the first that fits wins over the device's own guess."""
    deny: tuple[Denied, ...]
    upload: tuple[UploadRule, ...]
    anomalies: AnomalyLimits
    frames: FramePolicy
    rollout: Rollout
    cloud_fallback: bool = False

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The policy in these bytes.

        Raises:
            UserError: another schema, a field too many or too few, a wrong type, a value out of range.
        """
        policy = read_json(cls, data, what=POLICY_TARGET, schema=POLICY_SCHEMA)
        _require(POLICY_TARGET, _wrong_in_policy(policy))
        return policy

    def to_bytes(self) -> bytes:
        """`policy.json`.

        Raises:
            UserError: `parse` would not take it.
        """
        data = json_bytes(self)
        type(self).parse(data)
        return data


def bucket_of(salt: str, device_id: str) -> int:
    """0 to 9,999, evenly over devices and anew with each salt."""
    return int.from_bytes(hashlib.sha256((salt + device_id).encode()).digest(), "big") % BUCKETS


def engine_key(version: str) -> tuple[int, ...]:
    """Orders engine versions: 3.10 after 3.9, and 3.6 is 3.6.0.

    Raises:
        UserError: no version of two to four numbers.
    """
    if not _ENGINE.fullmatch(version):
        raise UserError(
            f"engine version {version!r}", allowed="two to four numbers, like 3.6.1", next_step="correct it"
        )
    numbers = tuple(int(part) for part in version.split("."))
    return numbers + (0,) * (4 - len(numbers))


def _require(what: str, wrong: Iterator[_Wrong]) -> None:
    for where, got, allowed in wrong:
        raise UserError(
            f"{what}: {where} = {ascii(got)[:80]}",
            allowed=allowed,
            next_step=f"write {what} anew with a value that is allowed",
        )


def _wrong_in_release(release: Release) -> Iterator[_Wrong]:
    if not 1 <= release.counter:
        yield "counter", release.counter, "1 or more"
    for name in ("model_version", "config_version", "monitor_version", "git_commit"):
        if not _NAME.fullmatch(getattr(release, name)):
            yield name, getattr(release, name), "a name of 1 to 200 letters, digits and ._+:-"
    for name in ("engine_version", "engine_minimum"):
        if not _ENGINE.fullmatch(getattr(release, name)):
            yield name, getattr(release, name), "two to four numbers, like 3.6.1"
            return
    if engine_key(release.engine_minimum) > engine_key(release.engine_version):
        yield "engine_minimum", release.engine_minimum, f"at most engine_version {release.engine_version}"
    if not release.labels or "" in release.labels or len(set(release.labels)) != len(release.labels):
        yield "labels", release.labels, "one or more names, each once"
    if not 0 <= release.confidence_minimum <= 1:
        yield "confidence_minimum", release.confidence_minimum, "0 to 1"
    if not _SHA256.fullmatch(release.dvc_lock_sha256):
        yield "dvc_lock_sha256", release.dvc_lock_sha256, "64 hex digits"
    if not release.tiers:
        yield "tiers", release.tiers, "at least one"
    for tier, plan in release.tiers.items():
        yield from _wrong_in_plan(f"tiers.{tier}", plan)


def _wrong_in_plan(where: str, plan: TierPlan) -> Iterator[_Wrong]:
    if plan.action == "keep":
        if plan != TierPlan(action="keep", waiver=plan.waiver, measured=plan.measured):
            yield where, "keep with a model", "keep alone"
        return
    if not _NAME.fullmatch(plan.variant):
        yield f"{where}.variant", plan.variant, "a name of 1 to 200 letters, digits and ._+:-"
    for name in ("model", "golden"):
        file: FileOf | None = getattr(plan, name)
        if file is None:
            yield f"{where}.{name}", None, "a file: sha256 and length"
        elif not _SHA256.fullmatch(file.sha256):
            yield f"{where}.{name}.sha256", file.sha256, "64 hex digits"
        elif not 1 <= file.length <= MOST_FILE_BYTES:
            yield f"{where}.{name}.length", file.length, f"1 to {MOST_FILE_BYTES} bytes"
    if not _SHA256.fullmatch(plan.preprocess_sha256):
        yield f"{where}.preprocess_sha256", plan.preprocess_sha256, "64 hex digits"
    if not 0 < plan.golden_tolerance <= 1:
        yield f"{where}.golden_tolerance", plan.golden_tolerance, "above 0, at most 1"
    if not plan.measured and not plan.waiver:
        yield f"{where}.waiver", plan.waiver, "who lets an unmeasured tier go, and why"


def _wrong_in_policy(policy: Policy) -> Iterator[_Wrong]:
    if policy.version < 1:
        yield "version", policy.version, "1 or more"
    if "" in policy.tier_of:
        yield "tier_of", policy.tier_of, "patterns that are not empty"
    for index, denied in enumerate(policy.deny):
        if not denied.device_model or denied.backend not in _BACKENDS[1:]:
            yield f"deny[{index}]", denied, f"a pattern, and one of {', '.join(_BACKENDS[1:])}"
    for index, rule in enumerate(policy.upload):
        if not 1 <= rule.every_s <= 7 * 86_400:
            yield f"upload[{index}].every_s", rule.every_s, "1 s to 7 days"
        if not 0 <= rule.share <= 1:
            yield f"upload[{index}].share", rule.share, "0 to 1"
    yield from _wrong_in_limits(policy.anomalies)
    yield from _wrong_in_frames(policy.frames)
    rollout = policy.rollout
    if rollout.counter < 0:
        yield "rollout.counter", rollout.counter, "0 or more"
    if not 0 <= rollout.buckets <= BUCKETS:
        yield "rollout.buckets", rollout.buckets, f"0 to {BUCKETS}"
    if not 0 <= rollout.control <= BUCKETS:
        yield "rollout.control", rollout.control, f"0 to {BUCKETS}"


def _wrong_in_limits(limits: AnomalyLimits) -> Iterator[_Wrong]:
    for name in ("latency_ms", "latency_times_p99", "memory_mb", "consecutive_failures"):
        if not getattr(limits, name) > 0:
            yield f"anomalies.{name}", getattr(limits, name), "above 0"
    if not 0 <= limits.confidence <= 1:
        yield "anomalies.confidence", limits.confidence, "0 to 1"


def _wrong_in_frames(frames: FramePolicy) -> Iterator[_Wrong]:
    if not 0 < frames.base_fps <= 1000:
        yield "frames.base_fps", frames.base_fps, "above 0, at most 1000"
    if not -50 <= frames.warm_c <= frames.hot_c <= frames.pause_c <= 150:
        yield "frames", (frames.warm_c, frames.hot_c, frames.pause_c), "warm <= hot <= pause, -50 to 150 °C"
    if not 0 <= frames.hysteresis_c <= 20:
        yield "frames.hysteresis_c", frames.hysteresis_c, "0 to 20"
    if not 0 <= frames.low_battery_percent <= 100:
        yield "frames.low_battery_percent", frames.low_battery_percent, "0 to 100"
    if not 0 < frames.memory_watermark <= 1:
        yield "frames.memory_watermark", frames.memory_watermark, "above 0, at most 1"
