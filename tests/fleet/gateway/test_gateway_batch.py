"""Reading a batch: bounds on its size, faults window by window, floats as they were."""

import gzip
import json
import struct
import zlib

import gateway_kit as kit
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.device.wire import MOST_WINDOWS
from fleet.gateway import batch
from fleet.gateway.refusal import Refusal

MOST = 1 << 20
NOW_MS = kit.now_ms()


def _refused(call, *arguments, **named):
    with pytest.raises(Refusal) as caught:
        call(*arguments, **named)
    return caught.value.status, caught.value.code


def test_a_bomb_is_refused_before_it_grows():
    """256 MiB in 256 KiB are refused, and no more than the ceiling is ever made of them."""
    packer = zlib.compressobj(9, wbits=31)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()
    assert len(bomb) < 0.3 * MOST
    assert _refused(batch.decompressed, bomb, "gzip", most=MOST) == (413, "too_large")


@pytest.mark.parametrize(
    ("body", "encoding", "expected"),
    [
        (b"not gzip", "gzip", (400, "gzip")),
        (gzip.compress(b"{}")[:-4], "gzip", (400, "gzip")),
        (gzip.compress(b"{}") * 2, "gzip", (400, "gzip")),
        (b"", "gzip", (400, "gzip")),
        (b"{}", "br", (415, "encoding")),
        (bytes(MOST + 1), "", (413, "too_large")),
    ],
)
def test_a_body_that_cannot_be_read_is_refused(body, encoding, expected):
    """Broken, cut, doubled, otherwise encoded or too large: each is told apart."""
    assert _refused(batch.decompressed, body, encoding, most=MOST) == expected


def test_a_body_at_the_ceiling_is_read():
    """The ceiling itself is allowed."""
    assert batch.decompressed(gzip.compress(bytes(MOST)), "gzip", most=MOST) == bytes(MOST)
    assert batch.decompressed(bytes(MOST), "identity", most=MOST) == bytes(MOST)


def test_an_invalid_window_takes_no_other_with_it():
    """Each window is judged alone; the invalid ones keep their bytes and get their reason."""
    record = json.loads(kit.batch_of([kit.window(k) for k in range(5)]))
    record["windows"][1]["sequence"] = -4
    record["windows"][3] = {"hello": [1, 2]}
    arrived = batch.read(json.dumps(record).encode(), server_ms=NOW_MS)
    assert [(index, window.sequence) for index, window in arrived.windows] == [(0, 0), (2, 2), (4, 4)]
    assert [(f.index, json.loads(f.raw) == record["windows"][f.index]) for f in arrived.faults] == [
        (1, True),
        (3, True),
    ]
    assert arrived.faults[0].reason == "sequence is -4"
    assert "missing required field" in arrived.faults[1].reason


@pytest.mark.parametrize(
    "content",
    [
        kit.batch_of([kit.window(1)], schema=2),
        b'{"schema": 9, "entirely": ["different"]}',
        b'{"schema": 0, "sent_ms": 1, "windows": []}',
    ],
)
def test_an_unknown_schema_is_kept_whole(content):
    """Nothing that a newer or older device sends is dropped, even when its windows look like ours."""
    arrived = batch.read(content, server_ms=NOW_MS)
    assert arrived.windows == []
    assert [(f.index, f.raw) for f in arrived.faults] == [(batch.WHOLE, content)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", (400, "batch")),
        (b"[]", (400, "batch")),
        (b'{"schema": "1"}', (400, "batch")),
        (b'{"schema": 1}', (400, "batch")),
        (b"\xff\xfe", (400, "batch")),
        (kit.batch_of([]), (400, "windows")),
        (
            b'{"schema":1,"sent_ms":1,"windows":[' + b",".join([b"1"] * (MOST_WINDOWS + 1)) + b"]}",
            (413, "windows"),
        ),
        (b'{"schema":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", (400, "depth")),
        (
            b'{"schema":1,"sent_ms":1,"windows":[' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"]}",
            (400, "depth"),
        ),
    ],
)
def test_what_is_no_batch_is_refused(content, expected):
    """The same bytes would be refused again: the device learns that from the status."""
    assert _refused(batch.read, content, server_ms=NOW_MS) == expected


@given(st.floats(1e-300, 1e14))
def test_floats_are_bit_exact(value):
    """A float in JSON comes out with the same 64 bits."""
    window = msgspec.to_builtins(kit.window(1))
    window["performance"]["throughput_hz"] = value
    content = json.dumps({"schema": 1, "sent_ms": 1, "windows": [window]}).encode()
    ((_, read),) = batch.read(content, server_ms=NOW_MS).windows
    assert struct.pack("d", read.performance.throughput_hz) == struct.pack("d", value)


def _with_throughput(number):
    return kit.batch_of([kit.window(1)]).replace(b'"throughput_hz":14.9', b'"throughput_hz":' + number)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_what_json_does_not_have_is_refused(number):
    """NaN and infinity are no JSON."""
    assert _refused(batch.read, _with_throughput(number), server_ms=NOW_MS) == (400, "batch")


@pytest.mark.parametrize("number", [b"1e999", b"-1e999"])
def test_a_number_that_is_no_double_is_kept_apart(number):
    """JSON can write numbers that no double holds: their window goes to quarantine."""
    arrived = batch.read(_with_throughput(number), server_ms=NOW_MS)
    assert arrived.windows == []
    assert "out of range" in arrived.faults[0].reason
