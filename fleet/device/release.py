"""What a release and a policy say: the two signed targets a device obeys.

A release binds model, engine, runtime config and monitor; it changes all or nothing. A policy (tiers,
upload, deny list, frame rates, rollout) has its own version and its own key, and changes without a
release and without an app. Both are canonical JSON, targets of one TUF repository
(https://theupdateframework.github.io/specification/):

    release.json                 role targets
    policy.json                  role policy, delegated
    files/SHA256                 models and golden inputs, role targets
"""

from dataclasses import dataclass, field
from typing import Any, Literal

RELEASE_TARGET, POLICY_TARGET, FILES = "release.json", "policy.json", "files/"
RELEASE_SCHEMA = POLICY_SCHEMA = 1
Tier = Literal["high", "mid", "low"]


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
    """.npz, no pickles: `images` uint8 RGB [N, H, W, 3], `logits` float32 [N, classes] of this variant."""
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
