"""uvicorn's HTTP protocol with the bounds it lacks: header bytes, slow requests, connections an address.

What it refuses gets the same JSON errors as everything else.
"""

import asyncio
from collections import Counter
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from fleet.gateway.limits import Limits
from fleet.gateway.refusal import Refusal

_GRACE_S = 5.0
"""After which a slow body's connection is cut; until then the application answers it with 408."""


def guarded(limits: Limits) -> type[HttpToolsProtocol]:
    """The protocol class that holds clients to these limits."""
    return type("Guarded", (_Guarded,), {"bounds": limits, "addresses": Counter()})


class _Guarded(HttpToolsProtocol):
    bounds: Limits
    addresses: Counter[str]
    _timer: asyncio.TimerHandle | None = None
    _address = ""
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        self.addresses[self._address] += 1
        if (
            len(self.connections) > self.bounds.connections
            or self.addresses[self._address] > self.bounds.connections_per_address
        ):
            self._refuse(
                Refusal(
                    503,
                    "connections",
                    "more connections than are served at a time",
                    allowed=f"{self.bounds.connections}, {self.bounds.connections_per_address} an address",
                    next_step="connect again later",
                    retry_after_s=30,
                )
            )
        else:
            self._allow(self.bounds.header_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._allow(None)
        self.addresses[self._address] -= 1
        if not self.addresses[self._address]:
            del self.addresses[self._address]
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # what a refused client still sends
            return
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._allow(self.bounds.header_s)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.transport.is_closing():
            return
        self._allow(self.bounds.body_s + _GRACE_S)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._allow(None)
        if self.cycle is not None and not self.transport.is_closing():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        if self.transport.is_closing():
            return
        self._refuse(
            Refusal(400, "http", msg, allowed="HTTP/1.1", next_step="speak HTTP/1.1 as RFC 9112 has it")
        )

    def _count(self, more: int) -> None:
        self._header_bytes += more
        if self._header_bytes > self.bounds.header_bytes and not self.transport.is_closing():
            self._refuse(
                Refusal(
                    431,
                    "headers",
                    f"a request line and headers of more than {self.bounds.header_bytes} bytes",
                    allowed=f"at most {self.bounds.header_bytes} bytes",
                    next_step="send fewer or shorter headers",
                )
            )

    def _allow(self, seconds: float | None) -> None:
        """Cut the connection unless the next step comes within so many seconds."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._cut)

    def _cut(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        body = refusal.body()
        head: list[Any] = [
            STATUS_LINE[refusal.status],
            b"content-type: application/json\r\nconnection: close\r\n",
            b"content-length: %d\r\n\r\n" % len(body),
        ]
        self.transport.write(b"".join([*head, body]))
        self.transport.close()
