"""Who a device is to the gateway, and how a request proves it.

A device makes an Ed25519 key (RFC 8032) of its own; its id is a hash of the public half, so that no
hardware id leaves it. What is signed follows the idea of HTTP message signatures (RFC 9421), in one fixed
form: method, path, device, time, nonce and the hash of the body as sent.
"""

import base64
import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fleet.device.durable import make_once
from fleet.device.errors import UserError

DEVICE, TIME, NONCE, SIGNATURE = "Edgeloop-Device", "Edgeloop-Time", "Edgeloop-Nonce", "Edgeloop-Signature"
"""The headers of a signed request: device id; ms since 1970; 32 hex digits, never used twice; base64."""
MOST_SKEW_MS = 300_000
"""How far a request's time may be from the gateway's; its answer to another names its own time."""
_KEY_BYTES, _ID_DIGITS = 32, 32


@dataclass(frozen=True, kw_only=True)
class SignedRequest:
    """What of a request is signed."""

    method: str
    path: str
    """With the query, as sent."""
    device: str
    time_ms: int
    nonce: str
    body: bytes
    """As sent: compressed, if it is."""

    def message(self) -> bytes:
        """The bytes under the signature."""
        parts = ("edgeloop-request-1", self.method, self.path, self.device, str(self.time_ms), self.nonce)
        return "\n".join((*parts, hashlib.sha256(self.body).hexdigest())).encode()


def device_id(public_key: bytes) -> str:
    """Name of the device with this public key (32 bytes): 32 hex digits."""
    return hashlib.sha256(b"edgeloop-device-1" + public_key).hexdigest()[:_ID_DIGITS]


class DeviceKey:
    """A device's private key."""

    def __init__(self, private: bytes) -> None:
        """From its 32 bytes."""
        self._private = Ed25519PrivateKey.from_private_bytes(private)
        self.public = self._private.public_key().public_bytes_raw()
        self.device = device_id(self.public)

    @classmethod
    def load(cls, path: Path) -> "DeviceKey":
        """The key in a file of mode 0600, made when there is none.

        Raises:
            UserError: the file is no key, or others may read it.
        """
        if not path.exists():
            make_once(path, secrets.token_bytes(_KEY_BYTES))  # where another was faster, its key holds
        return cls._read(path)

    @classmethod
    def _read(cls, path: Path) -> "DeviceKey":
        private = path.read_bytes()
        if len(private) != _KEY_BYTES or path.stat().st_mode & 0o077:
            raise UserError(
                f"{path}: {len(private)} bytes, mode {path.stat().st_mode & 0o777:o}",
                allowed=f"a key of {_KEY_BYTES} bytes that only its owner may read (mode 600)",
                next_step=f"chmod 600 {path}, or remove it and enrol the device again",
            )
        return cls(private)

    def headers(self, method: str, path: str, body: bytes, *, time_ms: int) -> dict[str, str]:
        """The headers that make this a signed request, with a fresh nonce."""
        nonce = secrets.token_hex(16)
        request = SignedRequest(
            method=method, path=path, device=self.device, time_ms=time_ms, nonce=nonce, body=body
        )
        signature = base64.b64encode(self._private.sign(request.message())).decode()
        return {DEVICE: self.device, TIME: str(time_ms), NONCE: nonce, SIGNATURE: signature}


def is_signed_by(public_key: bytes, request: SignedRequest, signature: str) -> bool:
    """Whether the holder of the key with this public half signed exactly this request."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(
            base64.b64decode(signature, validate=True), request.message()
        )
    except (InvalidSignature, ValueError):
        return False
    return True


def signed_request(method: str, path: str, headers: Mapping[str, str], body: bytes) -> SignedRequest | None:
    """What the headers (any case) say was signed; None when one is missing or none of ours."""
    given = {name.lower(): value for name, value in headers.items()}
    device, time_ms, nonce = (given.get(name.lower(), "") for name in (DEVICE, TIME, NONCE))
    well_formed = (
        len(device) == _ID_DIGITS
        and len(nonce) == 32
        and set(device + nonce) <= set("0123456789abcdef")
        and time_ms.isascii()
        and time_ms.isdigit()
        and len(time_ms) <= 15
    )
    if not well_formed:
        return None
    return SignedRequest(
        method=method, path=path, device=device, time_ms=int(time_ms), nonce=nonce, body=body
    )
