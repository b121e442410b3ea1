"""Tokens, devices and their keys: who may speak, from when until when."""

import base64
import binascii
import hashlib
import secrets
import sqlite3
from dataclasses import dataclass

from fleet.device.credentials import device_id
from fleet.device.wire import Enrolment
from fleet.gateway.refusal import Refusal

_TOKEN_BYTES, _KEY_BYTES = 24, 32
_MODEL_CHARACTERS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device as it is enrolled."""

    number: int
    """Short for its id, in this gateway."""
    device: str
    public_key: bytes
    model: str
    enrolled_ms: int
    revoked_ms: int | None


_COLUMNS = "number, device, public_key, model, enrolled_ms, revoked_ms"


def _device(row: tuple[int, str, bytes, str, int, int | None]) -> Device:
    number, device, public_key, model, enrolled_ms, revoked_ms = row
    return Device(
        number=number,
        device=device,
        public_key=public_key,
        model=model,
        enrolled_ms=enrolled_ms,
        revoked_ms=revoked_ms,
    )


def find(connection: sqlite3.Connection, device: str) -> Device | None:
    """The device with this id."""
    row = connection.execute(f"SELECT {_COLUMNS} FROM devices WHERE device = ?", (device,)).fetchone()  # noqa: S608  # constants
    return _device(row) if row else None


def every(connection: sqlite3.Connection) -> list[Device]:
    """All devices, in the order of enrolment."""
    rows = connection.execute(f"SELECT {_COLUMNS} FROM devices ORDER BY number")  # noqa: S608  # constants
    return [_device(row) for row in rows]


def make_tokens(connection: sqlite3.Connection, count: int, *, expires_ms: int) -> list[str]:
    """New tokens, each for one enrolment; only their hashes are stored."""
    made = [secrets.token_urlsafe(_TOKEN_BYTES) for _ in range(count)]
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(
        "INSERT INTO tokens VALUES(?, ?, NULL)", [(_hash(token), expires_ms) for token in made]
    )
    connection.execute("COMMIT")
    return made


def revoke(connection: sqlite3.Connection, device: str, *, now_ms: int) -> bool:
    """Refuse this device from now on; False when there is none. Repeating it changes nothing."""
    done = connection.execute(
        "UPDATE devices SET revoked_ms = coalesce(revoked_ms, ?) WHERE device = ?", (now_ms, device)
    )
    return done.rowcount == 1


def enrol(connection: sqlite3.Connection, enrolment: Enrolment, *, now_ms: int) -> str:
    """Take a device in; its id. The same device may repeat it with its token: the answer can get lost.

    Raises:
        Refusal: 401 for a token that is unknown, used or expired, or a device that was revoked; 400 for a key
            that is none.
    """
    key = _public_key(enrolment.public_key)
    device = device_id(key)
    token = connection.execute(
        "SELECT expires_ms, device FROM tokens WHERE hash = ?", (_hash(enrolment.token),)
    ).fetchone()
    # One answer for all three: it does not say which tokens there have been.
    if token is None or token[1] not in (None, device) or (token[1] is None and token[0] < now_ms):
        raise Refusal(
            401,
            "token",
            "a token that is unknown, used or expired",
            allowed="a token that the operator made for this device",
            next_step="ask for one: `edgeloop fleet token`",
        )
    known = find(connection, device)
    if known is not None and known.revoked_ms is not None:
        raise revoked()
    model = "".join(c if c.isprintable() else "?" for c in enrolment.device_model[:_MODEL_CHARACTERS])
    connection.execute("UPDATE tokens SET device = ? WHERE hash = ?", (device, _hash(enrolment.token)))
    connection.execute(
        "INSERT INTO devices(device, public_key, model, enrolled_ms) VALUES(?, ?, ?, ?)"
        " ON CONFLICT(device) DO NOTHING",
        (device, key, model, now_ms),
    )
    return device


def revoked() -> Refusal:
    """401 for a device that was revoked."""
    return Refusal(
        401,
        "revoked",
        "a device that was revoked",
        allowed="a device that is enrolled",
        next_step="make a new key and enrol with a new token",
    )


def claim(connection: sqlite3.Connection, device: int, time_ms: int, nonce: str) -> None:
    """Use a request's nonce up.

    Raises:
        Refusal: 409, it was used before.
    """
    done = connection.execute(
        "INSERT OR IGNORE INTO nonces VALUES(?, ?, ?)", (time_ms, device, bytes.fromhex(nonce))
    )
    if done.rowcount == 0:
        raise Refusal(
            409,
            "replay",
            "a request that was sent before",
            allowed="a nonce that was never used",
            next_step="sign the request again, with a new nonce",
        )


def has_nonces(connection: sqlite3.Connection, *, before_ms: int) -> bool:
    """Whether there are any to forget: an idle gateway writes nothing."""
    return (
        connection.execute("SELECT 1 FROM nonces WHERE time_ms < ? LIMIT 1", (before_ms,)).fetchone()
        is not None
    )


def forget_nonces(connection: sqlite3.Connection, *, before_ms: int) -> None:
    """Of requests that are too old to be taken whatever their nonce."""
    connection.execute("DELETE FROM nonces WHERE time_ms < ?", (before_ms,))


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _public_key(text: str) -> bytes:
    try:
        key = base64.b64decode(text.encode(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise Refusal(
            400,
            "public_key",
            f"a public key of {len(key)} bytes",
            allowed="an Ed25519 public key: 32 bytes in base64",
            next_step="send the public half of the device's key",
        )
    return key
