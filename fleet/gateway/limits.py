"""What one client may cost the gateway."""

from dataclasses import dataclass

from fleet.device.wire import MOST_SAMPLE_BYTES

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Every bound on a request, a device and an address."""

    body_bytes: int = MIB
    """Of a request as sent, compressed if it is."""
    batch_bytes: int = 8 * MIB
    """Of a batch after decompression."""
    sample_bytes: int = MOST_SAMPLE_BYTES
    """Of a request with a sample, as sent."""
    samples_bytes: int = 256 * MIB
    """Kept of a device's samples."""
    header_bytes: int = 16 << 10
    """Request line and headers."""
    header_s: float = 10.0
    """From the first byte awaited to the last of the headers."""
    body_s: float = 30.0
    """From the end of the headers to the end of the body."""
    keep_alive_s: int = 30
    """Of a connection without requests; devices keep theirs for 20 s."""
    connections: int = 2_000
    connections_per_address: int = 256
    waiting: int = 1_000
    """Requests that wait to be made durable; more are sent away."""
    group: int = 64
    """Requests made durable by one commit."""
    requests_per_s: float = 2.0
    requests_burst: int = 60
    """Of a device: it may catch up after having been offline."""
    enrolments_per_s: float = 0.2
    enrolments_burst: int = 20
    """From an address, failed ones included."""
    classify_per_s: float = 1.0
    classify_burst: int = 10
    """Of a device."""
    classify_waiting: int = 16
    quarantine_bytes: int = 16 * MIB
    """Kept of a device's invalid windows, compressed; beyond it reason and hash are kept alone."""
    free_bytes: int = 256 * MIB
    """Left on the disk; with less nothing is taken in."""
