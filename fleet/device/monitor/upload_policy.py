"""When windows are sent, and which: a state machine without clock, disk or network.

In a state of network and power its rule says how often windows are sent and which share of them. Windows with
anomalies are always sent: at once, but on a low battery with the next turn of the rule. Without a network
nothing is. A window that is outside the share stays, for a state with a larger one.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fleet.device.release import UploadRule
from fleet.device.sensors import Reading

DEFAULT_UPLOAD = (
    UploadRule(network="wifi", charging=True, every_s=300, share=1.0),
    UploadRule(network="wifi", charging=False, every_s=1800, share=0.1),
    UploadRule(network="mobile", charging=True, every_s=1800, share=0.05),
    UploadRule(network="mobile", charging=False, every_s=1800, share=0.0),
)
"""M4 of the requirements."""
LOW_BATTERY_PERCENT = 20.0
PAUSE_S, LONGEST_PAUSE_S = 60, 1800
"""How long a gateway that did not answer, or refused, is left alone by anomalies too; doubled each time."""
_State = tuple[Literal["wifi", "mobile"], bool]


@dataclass(frozen=True, slots=True)
class Turn:
    """What to send now: this share of the windows without anomalies, and all with."""

    share: float
    regular: bool
    """Whether the rule's time had come, and not only anomalies waited."""


class UploadPolicy:
    """Decides from the time and the device's state; times are seconds of a clock that only goes forward."""

    def __init__(self, rules: Sequence[UploadRule] = DEFAULT_UPLOAD) -> None:
        """With the rules of a policy; of two for one state the first counts.

        Raises:
            ValueError: a share outside 0..1, or turns less than a second apart.
        """
        self._rules = _by_state(rules)
        self._last_s = self._not_before_s = float("-inf")
        self._failures = 0

    def set_rules(self, rules: Sequence[UploadRule]) -> None:
        """Other rules from now on; turns and failures before are remembered.

        Raises:
            ValueError: as in the constructor; then the rules stay.
        """
        self._rules = _by_state(rules)

    def turn(self, now_s: float, reading: Reading, *, anomalies: bool) -> Turn | None:
        """What is due; None for nothing.

        Args:
            now_s: The time.
            reading: Network, charging and battery count.
            anomalies: Whether windows with anomalies wait.
        """
        if reading.network == "none" or now_s < self._not_before_s:
            return None
        rule = self._rules[state_of(reading)]
        if now_s - self._last_s >= rule.every_s:
            return Turn(rule.share, regular=True)
        return Turn(0.0, regular=False) if anomalies and not is_low(reading) else None

    def done(self, now_s: float, turn: Turn) -> None:
        """A turn got through. One for anomalies alone leaves the others' time as it is."""
        self._failures = 0
        if turn.regular:
            self._last_s = now_s

    def failed(self, now_s: float, turn: Turn, *, retry_after_s: float = 0.0) -> None:
        """A turn did not get through: its windows wait for the next, anomalies for the pause only."""
        pause_s = min(PAUSE_S * 2**self._failures, LONGEST_PAUSE_S)
        self._not_before_s = now_s + max(pause_s, retry_after_s)
        self._failures = min(self._failures + 1, 10)
        if turn.regular:
            self._last_s = now_s


def state_of(reading: Reading) -> _State:
    """Network and power as the rules know them.

    Ethernet costs what wifi does; an unknown network is taken for a mobile one. What has no battery and does
    not say that it is charging hangs on a cable.
    """
    network: Literal["wifi", "mobile"] = "wifi" if reading.network in ("wifi", "ethernet") else "mobile"
    charging = reading.charging if reading.charging is not None else reading.battery_percent is None
    return network, charging


def is_low(reading: Reading) -> bool:
    """Whether the device runs on a nearly empty battery."""
    battery = reading.battery_percent
    return battery is not None and battery <= LOW_BATTERY_PERCENT and not reading.charging


def is_in_share(device: str, number: int, share: float) -> bool:
    """Whether a window is in a share of all windows; if so, then each time and in each larger share."""
    digest = hashlib.sha256(f"edgeloop-share-1 {device} {number}".encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def _by_state(rules: Sequence[UploadRule]) -> dict[_State, UploadRule]:
    for rule in rules:
        if not 0 <= rule.share <= 1 or rule.every_s < 1:
            raise ValueError(f"{rule}: a share of 0 to 1, every second at most")
    by_state = {(rule.network, rule.charging): rule for rule in reversed(rules)}
    networks: tuple[Literal["wifi", "mobile"], ...] = ("wifi", "mobile")
    return {
        (network, charging): by_state.get(
            (network, charging), UploadRule(network=network, charging=charging, every_s=1800, share=0.0)
        )
        for network in networks
        for charging in (True, False)
    }
