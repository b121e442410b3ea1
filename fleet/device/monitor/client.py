"""HTTP to the gateway: one connection that is kept, https verified, and no answer waited for too long."""

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from fleet.device.address import is_loopback
from fleet.device.errors import UserError

SILENCE_S, ANSWER_S = 15.0, 60.0
"""Longest pause within an answer, and longest time for all of it: a gateway that drips is given up."""
_MOST_ANSWER_BYTES = 64 * 1024
_KEEP_S = 20.0
"""After this long a kept connection is probably closed at the other end."""


class NoAnswerError(Exception):
    """The network, a name, a certificate or the other end failed before there was a whole answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes
    retry_after: str
    """The header, empty without."""

    def server_ms(self) -> int | None:
        """The gateway's time where it refused the request's; None otherwise."""
        try:
            error = json.loads(self.body)["error"] if self.status == 401 else {}
            server_ms = error["server_ms"] if error.get("code") == "clock" else None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return server_ms if type(server_ms) is int and 0 <= server_ms < 10**14 else None


class GatewayClient:
    """Requests to one gateway, from one thread; `abort` may be called by another."""

    def __init__(self, url: str, *, silence_s: float = SILENCE_S, answer_s: float = ANSWER_S) -> None:
        """For the gateway at `url`, which may have a path.

        Raises:
            UserError: not https, and not http to this machine.
        """
        self._parts = _checked(url)
        self.prefix = self._parts.path.rstrip("/")
        """Of every path; part of what is signed."""
        self._silence_s, self._answer_s = silence_s, answer_s
        self._connection: http.client.HTTPConnection | None = None
        self._used_s = 0.0

    def request(
        self, method: str, path: str, body: bytes | Iterable[bytes], headers: Mapping[str, str]
    ) -> Answer:
        """One request; `path` with the prefix. A body in blocks needs its Content-Length in the headers.

        Raises:
            NoAnswerError: there was no whole answer.
        """
        if time.monotonic() - self._used_s > _KEEP_S:
            self.close()
        connection = self._connection = self._connection or self._new()
        watchdog = threading.Timer(self._answer_s, self.abort)
        watchdog.daemon = True
        watchdog.start()
        try:
            connection.request(method, path, body, dict(headers))
            with connection.getresponse() as response:
                content = response.read(_MOST_ANSWER_BYTES)
                if len(content) == _MOST_ANSWER_BYTES:  # more than any answer of a gateway: leave the rest
                    self.close()
                elif response.length:  # http.client does not say that the answer was cut off
                    raise http.client.IncompleteRead(content, response.length)
                answer = Answer(response.status, content, response.headers.get("Retry-After", ""))
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise NoAnswerError(f"{type(error).__name__}: {error}") from error
        finally:
            watchdog.cancel()
        self._used_s = time.monotonic()
        return answer

    def abort(self) -> None:
        """End the request that is under way: it fails at once."""
        connection = self._connection
        sock = connection.sock if connection is not None else None
        if sock is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # under TLS too: no word to the other end

    def close(self) -> None:
        """Let go of the connection; a later request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _new(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=self._silence_s)
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=self._silence_s, context=context)


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port  # a port that is no number raises here
        host.encode("idna")  # and a name that no resolver takes
    except ValueError:
        parts, host = SplitResult("", "", "", "", ""), ""
    plain = parts.scheme == "http" and is_loopback(host)
    extra = parts.query or parts.fragment or parts.username
    if not host or extra or not (plain or parts.scheme == "https"):
        raise UserError(
            f"gateway {url}",
            allowed="https://HOST[:PORT][/PATH]; http:// for this machine only, since it is not encrypted",
            next_step="give the gateway a certificate, or a proxy that has one",
        )
    return parts
