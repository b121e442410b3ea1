"""What became of the windows of simulated devices, by the devices' own account."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Self


@dataclass(kw_only=True, slots=True)
class Tally:
    """Counts of one device, or of several.

    `made` = `delivered` + `waiting` + all of `lost`. For a device without a fault `delivered` = `accepted`,
    but for answers that got lost: there the gateway counts a duplicate.
    """

    devices: int = 0
    made: int = 0
    """Windows."""
    delivered: int = 0
    """Windows of which a receipt says that the gateway has them, wherever it put them."""
    waiting: int = 0
    """Windows still on the device."""
    lost: Counter[str] = field(default_factory=Counter)
    """Windows that are nowhere, by the reason."""
    requests: int = 0
    """That were answered."""
    accepted: int = 0
    """The gateway's word in all receipts, heard or not: windows stored."""
    duplicates: int = 0
    """The same: windows it had already."""
    quarantined: int = 0
    """The same: kept apart; a batch of an unknown schema is one."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests answered by a 4xx, by its code."""
    failed: Counter[str] = field(default_factory=Counter)
    """Requests without an answer, with a 5xx, or with one that is no receipt, by which of the three."""

    @classmethod
    def of(cls, tallies: Iterable["Tally"]) -> Self:
        """Together."""
        total = cls()
        for one in tallies:
            for name in cls.__slots__:
                setattr(total, name, getattr(total, name) + getattr(one, name))
        return total

    def record(self) -> dict[str, object]:
        """As JSON."""
        values = {name: getattr(self, name) for name in type(self).__slots__}
        return {
            name: dict(sorted(value.items())) if isinstance(value, Counter) else value
            for name, value in values.items()
        }
