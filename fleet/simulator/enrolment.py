"""Enrolling many devices, at the pace that the gateway allows."""

import base64
import json
import threading
from collections.abc import Callable, Sequence
from contextlib import closing

from fleet.device.errors import UserError
from fleet.device.monitor.client import Answer, GatewayClient, NoAnswerError
from fleet.simulator.device import SimulatedDevice

_TRIES = 5
"""When there is no answer, or a 5xx; 429 is waited for."""
_PAUSE_S = 0.5


class Enrolment:
    """Enrols devices, from several threads at once."""

    def __init__(self, url: str, token: Callable[[], str], stop: threading.Event) -> None:
        """At this gateway; `token` is called from one thread at a time; `stop` ends the waiting."""
        self._url, self._token, self._stop = url, token, stop
        self._lock = threading.Lock()
        self.done = 0
        """Devices that are enrolled."""

    def enrol(self, devices: Sequence[SimulatedDevice]) -> None:
        """All of them.

        Raises:
            UserError: the gateway does not take one, or does not answer.
        """
        with closing(GatewayClient(self._url)) as client:
            for device in devices:
                if not self._stop.is_set():
                    self._one(client, self._body(device))
                    with self._lock:
                        self.done += 1

    def _body(self, device: SimulatedDevice) -> bytes:
        with self._lock:
            token = self._token()
        public_key = base64.b64encode(device.key.public).decode()
        model = device.character.device_class.name
        return json.dumps({"token": token, "public_key": public_key, "device_model": model}).encode()

    def _one(self, client: GatewayClient, body: bytes) -> None:
        path, tries = f"{client.prefix}/v1/enrol", 0
        while not self._stop.is_set():
            said: Answer | NoAnswerError
            try:
                said = client.request("POST", path, body, {"Content-Type": "application/json"})
            except NoAnswerError as error:
                said = error
            if isinstance(said, Answer) and said.status == 201:
                return
            too_fast = isinstance(said, Answer) and said.status == 429
            tries += not too_fast
            final = isinstance(said, Answer) and said.status < 500 and not too_fast
            if final or tries == _TRIES:
                raise self._refused(said)
            asked = said.retry_after if isinstance(said, Answer) else ""
            self._stop.wait(float(asked) if asked.isdigit() else _PAUSE_S)

    def _refused(self, said: Answer | NoAnswerError) -> UserError:
        got = (
            f"{said.status} {said.body[:200].decode(errors='replace')}" if isinstance(said, Answer) else said
        )
        return UserError(
            f"gateway {self._url} answered an enrolment with {got}",
            allowed="201",
            next_step="check that `edgeloop fleet serve` runs there; new tokens: `edgeloop fleet token`",
        )
