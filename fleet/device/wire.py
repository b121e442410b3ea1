"""What a device tells the gateway: the schema of a window and of a request, version by version.

Floats are exact over the wire: JSON numbers as Python and every correct parser round-trip them. Times are
milliseconds since 1970 on the device's clock. What a system does not expose is null, never a made-up
number.

    POST   /v1/enrol      Enrolment -> Enrolled               one-time token
    POST   /v1/windows    Batch, gzip allowed -> Receipt      signed
    POST   /v1/samples    Sample -> SampleReceipt             signed, with consent, over TLS
    DELETE /v1/samples    all it ever sent -> SamplesDeleted  signed
    POST   /v1/classify   Sample -> Classified                signed, with consent, over TLS
    GET    /repository/…  metadata and targets of releases and policies (TUF), by ETag

Signed requests carry the headers of `fleet/device/credentials.py`. Errors are `{"error": {"code", "got",
"allowed", "next_step"}}`.
"""

from dataclasses import dataclass, field
from typing import Literal

from fleet.device.histogram import Histogram

SCHEMA = 1
"""Of windows. A gateway keeps what it does not know in quarantine and drops nothing."""
INFERENCES_PER_WINDOW = 100
MOST_WINDOWS = 256
"""In one batch."""
MOST_SAMPLE_BYTES = 8 << 20
"""Of a request with a raw input, as sent."""

Network = Literal["wifi", "ethernet", "mobile", "none", "unknown"]
Anomaly = Literal["latency", "memory", "confidence", "failures"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """What ran: the four bound by a release, the release itself, and the app around them."""

    release: int
    """Counter of the release; 0 before the first."""
    model: str
    engine: str
    config: str
    monitor: str
    app: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Performance:
    """How fast."""

    inferences: int
    """That were tried, failed ones included: 100, fewer in the last window of a process."""
    failures: int
    skipped_frames: int
    """Answered by the last result or a tracker in between."""
    throughput_hz: float | None
    latency_ms: Histogram | None
    """Of inferences that did not fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """What it cost."""

    memory_mb: Histogram | None = None
    cpu_percent: Histogram | None = None
    temperature_c: Histogram | None = None
    power_w: Histogram | None = None
    battery_percent: Histogram | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """How good, as far as a device without labels can know."""

    confidence: Histogram | None = None
    """Largest softmax probability."""
    input_mean: Histogram | None = None
    """Of an image's pixels, 0 to 255."""
    input_std: Histogram | None = None
    classes: dict[str, int] = field(default_factory=dict)
    """Index of the predicted class to how often."""
    abnormal_outputs: int = 0
    """Not finite, or of another shape than the release says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """Where."""

    device_model: str
    os: str
    network: Network
    charging: bool | None
    backend: str
    """The one that really computed."""
    driver: str
    """Of the backend; empty for the CPU."""
    tier: str
    variant: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What was measured and is not in any window; counted since the last window."""

    overwritten_records: int = 0
    """The ring buffer was full."""
    dropped_windows: int = 0
    """The spool was full or could not be written, a file was broken, or the gateway refused it for good."""
    not_finite: int = 0
    """Values NaN or infinite, left out of the histograms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """One window of at most 100 inferences."""

    sequence: int
    """Counts the windows of a device, over restarts; with the device it names the window for good."""
    boot: str
    """Names the process that measured: 16 random hex digits."""
    start_ms: int
    end_ms: int
    uptime_ms: int
    """Of the monotonic clock at the end: tells order within a boot when the wall clock is wrong."""
    clock_jump_ms: int = 0
    """How far the wall clock moved against the monotonic one within the window."""
    versions: Versions
    performance: Performance
    resource: Resource
    quality: Quality
    environment: Environment
    loss: Loss
    anomalies: dict[Anomaly, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Body of `POST /v1/windows`."""

    schema: int
    sent_ms: int
    windows: tuple[Window, ...]
    """1 to MOST_WINDOWS, any order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """A window that is kept apart; sending it again is of no use."""

    index: int
    """Its place in the batch; -1: the whole batch, of a schema that the gateway does not know."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """Answer to a batch: everything in it is durable, wherever it was put."""

    accepted: int
    duplicates: int
    quarantined: tuple[Quarantined, ...]
    server_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Enrolment:
    """Body of `POST /v1/enrol`."""

    token: str
    """Works once."""
    public_key: str
    """Ed25519, 32 bytes in base64. The private key never leaves the device."""
    device_model: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Enrolled:
    """Its answer."""

    device: str
    server_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Body of `POST /v1/samples` (kept) and `POST /v1/classify` (answered, not kept): one raw input."""

    schema: int
    consent: bool
    """The user's, when it is sent; without it nothing is taken."""
    taken_ms: int
    image_png: bytes
    """In JSON: base64."""
    versions: Versions
    environment: Environment
    predicted: int | None = None
    """Index of the class the device found."""
    confidence: float | None = None
    reason: str = ""
    """Why this one: low confidence, drift, chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleReceipt:
    """Answer to a kept sample."""

    sha256: str
    """Of the image: its name."""
    server_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplesDeleted:
    """Answer to `DELETE /v1/samples`: none is left."""

    samples: int
    """That there were."""
    server_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Classified:
    """Answer to `POST /v1/classify`."""

    index: int
    label: str
    confidence: float
    model: str
    server_ms: int
