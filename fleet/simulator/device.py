"""One simulated device: draws what it measures, and runs the real windows, upload policy and delivery.

Only the sources of the numbers are simulated. Records go through `WindowBuilder`, windows leave when
`UploadPolicy` says so, over `Courier` and `GatewayClient`, signed with the device's own key. There is no
thread and no file: whoever owns the device calls `step` with the time of the simulation.

Assumptions, besides those of the classes, the phone and the drift: a device is used at random times (a
Poisson process) for 100 inferences each; it is at home from eight in the evening to eight in the morning,
and has a network as NETWORK_AT_HOME and NETWORK_OUT say, drawn anew each hour; its process holds
120 to 220 MiB.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fleet.device.credentials import DeviceKey
from fleet.device.monitor.client import GatewayClient
from fleet.device.monitor.clock import Now
from fleet.device.monitor.delivery import Courier
from fleet.device.monitor.loss import LossCounter
from fleet.device.monitor.upload_policy import UploadPolicy, is_in_share
from fleet.device.monitor.uploader import send
from fleet.device.monitor.window import WindowBuilder
from fleet.device.release import AnomalyLimits
from fleet.device.sensors import Reading
from fleet.device.wall import now_ms
from fleet.device.wire import Network, Versions
from fleet.simulator.device_classes import DeviceClass
from fleet.simulator.drift import NO_DRIFT, Drift
from fleet.simulator.faults import CLOCK_AHEAD_MS, Fault
from fleet.simulator.line import Line, NoLog, Sender
from fleet.simulator.memory_spool import MemorySpool
from fleet.simulator.phone import SimulatedPhone, Temperatures
from fleet.simulator.sources import Drawn, Source
from fleet.simulator.tally import Tally

NETWORK_AT_HOME: Mapping[Network, float] = {"wifi": 0.9, "mobile": 0.08, "none": 0.02}
NETWORK_OUT: Mapping[Network, float] = {"wifi": 0.3, "mobile": 0.6, "none": 0.1}
_HOME_FROM_H, _HOME_UNTIL_H = 20, 8
_MEMORY_MB = (120.0, 220.0)


@dataclass(frozen=True, kw_only=True)
class Character:
    """What one device is."""

    number: int
    """In the fleet."""
    device_class: DeviceClass
    versions: Versions
    fault: Fault | None = None
    drift: Drift = NO_DRIFT
    windows_per_h: float = 2.0
    """100 inferences each."""
    classes: int = 10
    """That its model knows."""
    spool_windows: int = 4096


class SimulatedDevice:
    """A device; belongs to one thread at a time."""

    def __init__(
        self,
        character: Character,
        key: DeviceKey,
        temperatures: Temperatures,
        *,
        seed: int,
        start_ms: int,
        source: Source | None = None,
    ) -> None:
        """Switch it on.

        Args:
            character: What it is.
            key: Who it is.
            temperatures: Shared by the fleet.
            seed: With the number of the device it decides everything that the device measures.
            start_ms: Wall time at which the simulation begins.
            source: Of its inferences; None: drawn by its class and drift.
        """
        self.character, self.key, self.tally = character, key, Tally(devices=1)
        drawn, garbage, sensed = (
            np.random.default_rng([seed, character.number, stream]) for stream in range(3)
        )
        self._rng, self._now_s = drawn, 0.0
        ahead_ms = CLOCK_AHEAD_MS if character.fault == "clock" else 0
        self._start_ms, self._ahead_ms = start_ms + ahead_ms, ahead_ms
        self._phone = SimulatedPhone(
            temperatures, sensed, memory_mb=float(sensed.uniform(*_MEMORY_MB)), clock=lambda: self._now_s
        )
        self._sensed, self._hour = sensed, -1
        loss = LossCounter()
        boot = drawn.bytes(8).hex()
        self._source = source or Drawn(
            character.device_class,
            character.drift,
            character.versions,
            classes=character.classes,
            rng=drawn,
        )
        self._builder = WindowBuilder(
            boot=boot,
            versions=self._source.versions,
            environment=self._source.environment,
            limits=AnomalyLimits(),
            loss=loss,
            now=self._now(0.0),
        )
        self._spool = MemorySpool(loss, self.tally, most_windows=character.spool_windows)
        self._policy, self._sequence = UploadPolicy(), 0
        self._sender = Sender(key=key, fault=character.fault, rng=garbage, tally=self.tally)
        self._next_s = self._pause_s()

    def step(self, until_s: float, client: GatewayClient, wait: Callable[[float], bool]) -> None:
        """Measure and send what is due until this second of the simulation.

        Args:
            until_s: Never less than the time before.
            client: Of this thread.
            wait: Between tries: so many real seconds, True to leave it for the next turn.
        """
        self.measure(until_s)
        self._now_s = until_s
        self._turn(client, wait)

    def measure(self, until_s: float) -> None:
        """The windows that begin before; into the spool."""
        while self._next_s <= until_s:
            self._now_s = self._next_s
            reading = self._reading()
            records = self._source.records(self._now_s, reading.temperature_c)
            self._builder.change(self._source.versions, self._source.environment)
            end_s = float(records["time_ns"][-1]) / 1e9
            for window in self._builder.add(records, reading, self._now(end_s)):
                self._sequence += 1
                self.tally.made += 1
                self._spool.put(replace(window, sequence=self._sequence))
            self._next_s = end_s + self._pause_s()

    def spooled(self) -> dict[int, bytes]:
        """What waits: numbers and encoded windows, oldest first."""
        return {n: content for n in self._spool.waiting() if (content := self._spool.read(n)) is not None}

    def _turn(self, client: GatewayClient, wait: Callable[[float], bool]) -> None:
        waiting = self._spool.waiting()
        if not waiting:
            return
        turn = self._policy.turn(self._now_s, self._reading(), anomalies=any(waiting.values()))
        if turn is None:
            return
        numbers = [n for n, odd in waiting.items() if odd or is_in_share(self.key.device, n, turn.share)]
        if not numbers:
            return
        if self.character.fault == "reordered":
            numbers.reverse()
        line = Line(client, self._sender)
        sent = send(numbers, self._spool, Courier(line, self.key, NoLog(), wall_ms=self._wall_ms, wait=wait))
        if sent.through:
            self._policy.done(self._now_s, turn)
        else:
            self._policy.failed(self._now_s, turn, retry_after_s=sent.retry_after_s)

    def _reading(self) -> Reading:
        hour = int(self._now_s // 3600)
        while self._hour < hour:
            self._hour += 1
            self._phone.network = self._network_in(self._hour)
        return self._phone.read()

    def _network_in(self, hour: int) -> Network:
        of_day = (self._start_ms // 3_600_000 + hour) % 24
        home = of_day >= _HOME_FROM_H or of_day < _HOME_UNTIL_H
        likely = NETWORK_AT_HOME if home else NETWORK_OUT
        networks = tuple(likely)
        return networks[int(self._sensed.choice(len(networks), p=tuple(likely.values())))]

    def _pause_s(self) -> float:
        return float(self._rng.exponential(3600 / self.character.windows_per_h))

    def _now(self, at_s: float) -> Now:
        return Now(self._start_ms + round(at_s * 1e3), round(at_s * 1e9))

    def _wall_ms(self) -> int:
        """What a request is signed with: real time, by this device's clock."""
        return now_ms() + self._ahead_ms
