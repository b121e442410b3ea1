"""Reading a request within its bounds, and finding out which device sent it."""

import asyncio
import time
from dataclasses import replace

from starlette.requests import ClientDisconnect, Request

from fleet.device.address import is_loopback
from fleet.device.credentials import (
    DEVICE,
    MOST_SKEW_MS,
    NONCE,
    SIGNATURE,
    TIME,
    SignedRequest,
    is_signed_by,
    signed_request,
)
from fleet.device.wall import now_ms
from fleet.gateway import devices
from fleet.gateway.buckets import Buckets
from fleet.gateway.devices import Device
from fleet.gateway.limits import Limits
from fleet.gateway.refusal import Refusal, shown, too_large
from fleet.gateway.store import Store

_OF_PROXIES = ("forwarded", "via", "x-forwarded-", "x-real-ip")
"""What headers that a proxy adds begin with."""
_DRAINED_BYTES, _DRAINED_S = 4 << 20, 2.0
"""Read and thrown away before an early answer: a client that is still sending would not see it otherwise."""


def address(request: Request) -> str:
    """Where it comes from."""
    return request.client.host if request.client else ""


def is_local(request: Request) -> bool:
    """Whether it comes from this machine, and not through a proxy on it."""
    return is_loopback(address(request)) and not any(h.startswith(_OF_PROXIES) for h in request.headers)


async def body_of(request: Request, *, most: int, within_s: float) -> bytes:
    """The body as sent.

    Raises:
        Refusal: 413 or 408.
        ClientDisconnect: the client went away.
    """
    said = request.headers.get("content-length", "")
    if said.isdecimal() and int(said[:18]) > most:
        raise too_large("a body", most)
    body = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    raise too_large("a body", most)
    except TimeoutError as error:
        raise Refusal(
            408,
            "slow",
            f"{len(body)} bytes of a body in {within_s:g} s",
            allowed=f"the whole body within {within_s:g} s",
            next_step="send smaller batches",
        ) from error
    return bytes(body)


async def drain(request: Request) -> None:
    """Read on for a moment what an early answer made superfluous."""
    if request._stream_consumed:  # noqa: SLF001  # starlette has no other way to ask
        return
    left = _DRAINED_BYTES
    try:
        async with asyncio.timeout(_DRAINED_S):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except (TimeoutError, ClientDisconnect):
        return


class Authenticator:
    """Holds requests against the keys of the devices and their rates."""

    def __init__(self, store: Store, limits: Limits) -> None:
        """Read keys from `store`."""
        self._store = store
        self._rate = Buckets(per_s=limits.requests_per_s, burst=limits.requests_burst)

    def announced(self, request: Request) -> tuple[Device, SignedRequest]:
        """Whose request it claims to be, before its body is read.

        Raises:
            Refusal: 401: no signed request, unknown or revoked device, another clock.
        """
        scope = request.scope
        query = scope["query_string"]
        path = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        described = signed_request(request.method, path, request.headers, b"")
        if described is None:
            raise _unsigned("headers that are missing or malformed")
        device = devices.find(self._store.read, described.device)
        if device is None:
            raise Refusal(
                401,
                "device",
                f"device {shown(described.device)}, which is not enrolled here",
                allowed="a device that is enrolled",
                next_step="enrol it: POST /v1/enrol with a token",
            )
        if device.revoked_ms is not None:
            raise devices.revoked()
        server_ms = now_ms()
        if abs(described.time_ms - server_ms) > MOST_SKEW_MS:
            raise Refusal(
                401,
                "clock",
                f"{TIME} {described.time_ms}, {described.time_ms - server_ms} ms from the gateway's",
                allowed=f"at most {MOST_SKEW_MS} ms from it",
                next_step="correct the time by `server_ms` and sign again",
                server_ms=server_ms,
            )
        return device, described

    def verify(self, device: Device, described: SignedRequest, body: bytes, signature: str) -> None:
        """Hold the signature against the body, then the device against its rate.

        Raises:
            Refusal: 401 or 429.
        """
        if not is_signed_by(device.public_key, replace(described, body=body), signature):
            raise _unsigned("a signature that is not this device's over this request")
        limited(self._rate, device.device)


def signature_of(request: Request) -> str:
    """Its signature header, empty when absent."""
    return request.headers.get(SIGNATURE, "")


def limited(rate: Buckets, key: str) -> None:
    """Take one from the key's bucket.

    Raises:
        Refusal: 429.
    """
    if wait_s := rate.wait_s(key, time.monotonic()):
        raise Refusal(
            429,
            "rate",
            "more requests than are allowed",
            allowed=f"the next one in {wait_s} s",
            next_step="wait, and send more windows in one batch",
            retry_after_s=wait_s,
        )


def _unsigned(got: str) -> Refusal:
    return Refusal(
        401,
        "signature",
        got,
        allowed=f"{DEVICE}, {TIME}, {NONCE} and {SIGNATURE} over method, path and body as sent",
        next_step="sign the request with the enrolled key",
    )
