"""The runtime of a device: signed releases in, answers out.

`Runtime` is what an app embeds; docs/runtime.md shows it.
"""

from fleet.device.runtime.cascade import Cascade, CascadeAnswer
from fleet.device.runtime.fetch import Patience
from fleet.device.runtime.loaded import Answer
from fleet.device.runtime.refusal import AbnormalOutputError, UpdateRefusedError
from fleet.device.runtime.runtime import NO_MONITOR, Monitor, Runtime, Status
from fleet.device.runtime.tiers import DeviceInfo
from fleet.device.runtime.update import Update

__all__ = [
    "NO_MONITOR",
    "AbnormalOutputError",
    "Answer",
    "Cascade",
    "CascadeAnswer",
    "DeviceInfo",
    "Monitor",
    "Patience",
    "Runtime",
    "Status",
    "Update",
    "UpdateRefusedError",
]
