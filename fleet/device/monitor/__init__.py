"""What a device tells of its inferences, and at what cost: docs/telemetry.md."""

from fleet.device.monitor.monitor import Monitor
from fleet.device.monitor.upload_log import Request, read_log
from fleet.device.monitor.upload_policy import DEFAULT_UPLOAD

MONITOR_VERSION = "1"
"""Bound to a release: what is recorded, how it is aggregated and when it is sent."""

__all__ = ["DEFAULT_UPLOAD", "MONITOR_VERSION", "Monitor", "Request", "read_log"]
