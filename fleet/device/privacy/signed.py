"""Signed requests about raw inputs: in blocks while consent holds, and on a device with a wrong clock too."""

from collections.abc import Callable

from fleet.device.credentials import DeviceKey
from fleet.device.monitor.client import Answer, GatewayClient, NoAnswerError
from fleet.device.privacy.body import while_allowed


class SignedClient:
    """One gateway, one key, one thread."""

    def __init__(self, client: GatewayClient, key: DeviceKey, wall: Callable[[], float]) -> None:
        """`wall`: seconds since 1970."""
        self._client, self._key, self._wall = client, key, wall
        self._skew_ms = 0

    def now_ms(self) -> int:
        """The device's own time: what is told of a sample is not corrected."""
        return round(self._wall() * 1000)

    def post(self, path: str, body: bytes, allowed: Callable[[], bool]) -> Answer | None:
        """Send a body as long as it is allowed; None without an answer."""
        return self._request("POST", path, body, allowed)

    def delete(self, path: str) -> Answer | None:
        """Ask to delete; None without an answer."""
        return self._request("DELETE", path, b"", lambda: True)

    def _request(self, method: str, path: str, body: bytes, allowed: Callable[[], bool]) -> Answer | None:
        """Once, and once more with the gateway's time where it says that the device's is wrong."""
        answer = self._try(method, path, body, allowed)
        server_ms = None if answer is None else answer.server_ms()
        if server_ms is None:
            return answer
        self._skew_ms = server_ms - self.now_ms()
        return self._try(method, path, body, allowed)

    def _try(self, method: str, path: str, body: bytes, allowed: Callable[[], bool]) -> Answer | None:
        path = self._client.prefix + path
        headers = self._key.headers(method, path, body, time_ms=max(0, self.now_ms() + self._skew_ms))
        if body:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        try:
            return self._client.request(method, path, while_allowed(body, allowed) if body else b"", headers)
        except NoAnswerError:
            return None
