"""A batch as it comes in: decompressed within bounds, decoded, sound windows told from others."""

import zlib
from dataclasses import dataclass, field

import msgspec

from fleet.device.wire import MOST_WINDOWS, SCHEMA, Batch, Window
from fleet.gateway.refusal import Refusal, shown, too_large
from fleet.gateway.validate import fault

WHOLE = -1
"""Index of a fault that is the batch's, not a window's."""
_GZIP = 31


class _Envelope(msgspec.Struct):
    schema: int
    sent_ms: int
    windows: list[msgspec.Raw]


class _Schema(msgspec.Struct):
    schema: int


_whole_batch = msgspec.json.Decoder(Batch)
_envelope = msgspec.json.Decoder(_Envelope)
_schema = msgspec.json.Decoder(_Schema)
_window = msgspec.json.Decoder(Window)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What goes to quarantine."""

    index: int
    reason: str
    raw: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """What a batch holds."""

    windows: list[tuple[int, Window]] = field(default_factory=list)
    """Index in the batch, and the window: those that are sound."""
    faults: list[Fault] = field(default_factory=list)


def decompressed(body: bytes, encoding: str, *, most: int) -> bytes:
    """A body's content.

    Raises:
        Refusal: 413 above `most` bytes, whatever it would have become; 415 another encoding; 400 no gzip.
    """
    if encoding in ("", "identity"):
        if len(body) > most:
            raise too_large("content", most)
        return body
    if encoding != "gzip":
        raise Refusal(
            415,
            "encoding",
            f"Content-Encoding {shown(encoding)}",
            allowed="gzip, or none",
            next_step="compress with gzip",
        )
    stream = zlib.decompressobj(_GZIP)
    try:
        content = stream.decompress(body, most + 1)
    except zlib.error:
        content = None
    if content is not None and len(content) > most:
        raise too_large("decompressed content", most)
    if content is None or not stream.eof or stream.unused_data:
        raise Refusal(
            400, "gzip", "a body that is not one gzip member", allowed="gzip", next_step="compress it anew"
        )
    return content


def read(content: bytes, *, server_ms: int) -> Arrived:
    """The windows of a batch.

    Raises:
        Refusal: 400, it is no batch at all; 413, too many windows.
    """
    try:
        batch = _whole_batch.decode(content)
    except RecursionError as error:
        raise _deep() from error
    except msgspec.DecodeError:
        return _read_each(content, server_ms)
    if batch.schema != SCHEMA:
        return _unknown(content, batch.schema)
    _check_count(len(batch.windows))
    reasons = [fault(window, server_ms=server_ms) for window in batch.windows]
    if not any(reasons):
        return Arrived(windows=list(enumerate(batch.windows)))
    return _read_each(content, server_ms)


def window_at(content: bytes, index: int) -> bytes:
    """The bytes of one window of a batch that was read."""
    return bytes(_envelope.decode(content).windows[index])


def decode_windows(content: bytes, indexes: list[int]) -> list[Window]:
    """The windows at these places of a batch that was stored."""
    raws = _envelope.decode(content).windows
    return [_window.decode(raws[index]) for index in indexes]


def _read_each(content: bytes, server_ms: int) -> Arrived:
    try:
        envelope = _envelope.decode(content)
    except RecursionError as error:
        raise _deep() from error
    except msgspec.DecodeError as error:
        return _unreadable(content, error)
    if envelope.schema != SCHEMA:
        return _unknown(content, envelope.schema)
    _check_count(len(envelope.windows))
    arrived = Arrived()
    for index, raw in enumerate(envelope.windows):
        try:
            window = _window.decode(raw)
            reason = fault(window, server_ms=server_ms)
        except (msgspec.DecodeError, RecursionError) as error:
            reason = shown(str(error))
        if reason is None:
            arrived.windows.append((index, window))
        else:
            arrived.faults.append(Fault(index=index, reason=reason, raw=bytes(raw)))
    return arrived


def _unreadable(content: bytes, error: msgspec.DecodeError) -> Arrived:
    """A batch of a schema that we do not know may look like anything."""
    try:
        schema = _schema.decode(content).schema
    except (msgspec.DecodeError, RecursionError):
        schema = SCHEMA
    if schema != SCHEMA:
        return _unknown(content, schema)
    raise Refusal(
        400,
        "batch",
        shown(str(error)),
        allowed=f"a JSON batch: schema ({SCHEMA}), sent_ms, windows",
        next_step="mend what serialises it; the same bytes would be refused again",
    ) from error


def _unknown(content: bytes, schema: int) -> Arrived:
    reason = f"schema {schema} is unknown to this gateway, it knows {SCHEMA}"
    return Arrived(faults=[Fault(index=WHOLE, reason=reason, raw=content)])


def _check_count(windows: int) -> None:
    if not 1 <= windows <= MOST_WINDOWS:
        raise Refusal(
            413 if windows else 400,
            "windows",
            f"{windows} windows in a batch",
            allowed=f"1 to {MOST_WINDOWS}",
            next_step="split it into several batches",
        )


def _deep() -> Refusal:
    return Refusal(
        400,
        "depth",
        "JSON that is nested too deeply",
        allowed="a batch as the schema has it",
        next_step="mend what serialises it",
    )
