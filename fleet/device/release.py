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

_Check = tuple[bool, str, Any, str]
"""Whether it fits, where, what was got, what is allowed."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+:-]{0,199}")
_ENGINE = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}")
_SHA256_SAID, _NAME_SAID = "64 hex digits", "a name of 1 to 200 letters, digits and ._+:-"
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
        _require(RELEASE_TARGET, _release_checks(release))
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

    @property
    def complete(self) -> bool:
        """Whether all get it who will: the control group does not."""
        return not self.stopped and self.buckets >= BUCKETS - self.control


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
        _require(POLICY_TARGET, _policy_checks(policy))
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


def _require(what: str, checks: Iterator[_Check]) -> None:
    for fits, where, got, allowed in checks:
        if not fits:
            raise UserError(
                f"{what}: {where} = {ascii(got)[:80]}",
                allowed=allowed,
                next_step=f"write {what} anew with a value that is allowed",
            )


def _release_checks(release: Release) -> Iterator[_Check]:
    yield release.counter >= 1, "counter", release.counter, "1 or more"
    for name in ("model_version", "config_version", "monitor_version", "git_commit"):
        value = getattr(release, name)
        yield bool(_NAME.fullmatch(value)), name, value, _NAME_SAID
    for name in ("engine_version", "engine_minimum"):
        value = getattr(release, name)
        yield bool(_ENGINE.fullmatch(value)), name, value, "two to four numbers, like 3.6.1"
    ordered = engine_key(release.engine_minimum) <= engine_key(release.engine_version)
    yield (
        ordered,
        "engine_minimum",
        release.engine_minimum,
        f"at most {release.engine_version}, engine_version",
    )
    labels = release.labels
    distinct = bool(labels) and "" not in labels and len(set(labels)) == len(labels)
    yield distinct, "labels", labels, "one or more names, each once"
    yield 0 <= release.confidence_minimum <= 1, "confidence_minimum", release.confidence_minimum, "0 to 1"
    yield _is_sha256(release.dvc_lock_sha256), "dvc_lock_sha256", release.dvc_lock_sha256, _SHA256_SAID
    yield bool(release.tiers), "tiers", release.tiers, "at least one"
    for tier, plan in release.tiers.items():
        where = f"tiers.{tier}"
        if plan.action == "run":
            yield from _plan_checks(where, plan)
        else:
            alone = plan == TierPlan(action="keep", waiver=plan.waiver, measured=plan.measured)
            yield alone, where, "keep with a model", "keep alone"


def _plan_checks(where: str, plan: TierPlan) -> Iterator[_Check]:
    yield bool(_NAME.fullmatch(plan.variant)), f"{where}.variant", plan.variant, _NAME_SAID
    for name, file in (("model", plan.model), ("golden", plan.golden)):
        yield file is not None, f"{where}.{name}", None, "a file: sha256 and length"
        if file is not None:
            yield _is_sha256(file.sha256), f"{where}.{name}.sha256", file.sha256, _SHA256_SAID
            in_range = 1 <= file.length <= MOST_FILE_BYTES
            yield in_range, f"{where}.{name}.length", file.length, f"1 to {MOST_FILE_BYTES} bytes"
    digest = plan.preprocess_sha256
    yield _is_sha256(digest), f"{where}.preprocess_sha256", digest, _SHA256_SAID
    tolerance = plan.golden_tolerance
    yield 0 < tolerance <= 1, f"{where}.golden_tolerance", tolerance, "above 0, at most 1"
    answered_for = plan.measured or bool(plan.waiver)
    yield answered_for, f"{where}.waiver", plan.waiver, "who lets an unmeasured tier go, and why"


def _policy_checks(policy: Policy) -> Iterator[_Check]:
    yield policy.version >= 1, "version", policy.version, "1 or more"
    yield "" not in policy.tier_of, "tier_of", policy.tier_of, "patterns that are not empty"
    gpus = _BACKENDS[1:]
    for index, denied in enumerate(policy.deny):
        known = bool(denied.device_model) and denied.backend in gpus
        yield known, f"deny[{index}]", denied, f"a pattern, and one of {', '.join(gpus)}"
    for index, rule in enumerate(policy.upload):
        where = f"upload[{index}]"
        yield 1 <= rule.every_s <= 7 * 86_400, f"{where}.every_s", rule.every_s, "1 s to 7 days"
        yield 0 <= rule.share <= 1, f"{where}.share", rule.share, "0 to 1"
    limits = policy.anomalies
    for name in ("latency_ms", "latency_times_p99", "memory_mb", "consecutive_failures"):
        yield getattr(limits, name) > 0, f"anomalies.{name}", getattr(limits, name), "above 0"
    yield 0 <= limits.confidence <= 1, "anomalies.confidence", limits.confidence, "0 to 1"
    yield from frame_checks(policy.frames)
    rollout = policy.rollout
    yield rollout.counter >= 0, "rollout.counter", rollout.counter, "0 or more"
    for name in ("buckets", "control"):
        value = getattr(rollout, name)
        yield 0 <= value <= BUCKETS, f"rollout.{name}", value, f"0 to {BUCKETS}"


def frame_checks(frames: FramePolicy) -> Iterator[_Check]:
    """Whether a device could work by it and not flap: each bound, by name, with what is allowed."""
    yield 0 < frames.base_fps <= 1000, "frames.base_fps", frames.base_fps, "above 0, at most 1000"
    degrees = (frames.warm_c, frames.hot_c, frames.pause_c)
    rising = -50 <= degrees[0] < degrees[1] < degrees[2] <= 150
    yield rising, "frames.warm_c, hot_c, pause_c", degrees, "rising, -50 to 150 °C"
    yield 0.5 <= frames.hysteresis_c <= 20, "frames.hysteresis_c", frames.hysteresis_c, "0.5 to 20 °C"
    percent = frames.low_battery_percent
    yield 0 <= percent <= 90, "frames.low_battery_percent", percent, "0 to 90"
    watermark = frames.memory_watermark
    yield 0.1 <= watermark < 1, "frames.memory_watermark", watermark, "0.1 to below 1"


def _is_sha256(text: str) -> bool:
    return bool(_SHA256.fullmatch(text))
