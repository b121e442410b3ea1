"""What Prometheus reads of the gateway: its own counts, nothing of a device."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class Metrics:
    """The gateway's numbers since it started."""

    def __init__(self) -> None:
        """All at zero."""
        self.registry = CollectorRegistry()
        self.windows = Counter(
            "edgeloop_gateway_windows",
            "Windows by where they went: accepted, duplicate, quarantined",
            ["outcome"],
            registry=self.registry,
        )
        self.accepted, self.duplicates, self.quarantined = (
            self.windows.labels(outcome) for outcome in ("accepted", "duplicate", "quarantined")
        )
        self.refused = Counter(
            "edgeloop_gateway_refused",
            "Requests that were refused, by the code of the error",
            ["code"],
            registry=self.registry,
        )
        self.acknowledged_s = Histogram(
            "edgeloop_gateway_acknowledge_seconds",
            "From the headers of a batch to its durable answer",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.waiting = Gauge(
            "edgeloop_gateway_waiting_requests",
            "Requests that wait to be made durable",
            registry=self.registry,
        )
        self.commits = Gauge(
            "edgeloop_gateway_commits", "Transactions since the start", registry=self.registry
        )
        self.pending = Gauge(
            "edgeloop_gateway_pending_batches", "Batches that are not in Parquet yet", registry=self.registry
        )
        self.devices = Gauge("edgeloop_gateway_devices", "Devices enrolled", registry=self.registry)
        self.free_bytes = Gauge(
            "edgeloop_gateway_free_bytes", "Free on the disk of the state", registry=self.registry
        )
        self.compactions = Counter(
            "edgeloop_gateway_compactions",
            "Compactions by how they ended",
            ["outcome"],
            registry=self.registry,
        )

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)
