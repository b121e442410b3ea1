"""What a device tells of its inferences, and at what cost: docs/telemetry.md."""

from fleet.device.monitor.monitor import Monitor
from fleet.device.monitor.upload_log import Request, read_log
from fleet.device.monitor.upload_policy import DEFAULT_UPLOAD

__all__ = ["DEFAULT_UPLOAD", "Monitor", "Request", "read_log"]
