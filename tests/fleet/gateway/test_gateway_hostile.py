"""Clients that mean harm, and a disk that takes no more: refused, bounded, nothing acknowledged is lost."""

import contextlib
import gzip
import json
import resource
import socket

import gateway_kit as kit
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.gateway.limits import Limits

TIGHT = Limits(
    requests_per_s=1e4,
    requests_burst=100_000,
    enrolments_per_s=1e4,
    enrolments_burst=100_000,
    body_bytes=64 << 10,
    batch_bytes=1 << 20,
    header_bytes=4 << 10,
    header_s=1.0,
    body_s=1.0,
    keep_alive_s=1,
    connections=40,
    connections_per_address=30,
)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with kit.gateway(
        tmp_path_factory.mktemp("hostile") / "state", limits=TIGHT, compact_every_s=0
    ) as started:
        yield started


def _raw(port, data, *, hold_s=20.0):
    """What the server says to these bytes until it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=hold_s) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(data)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(1 << 16):
                said += chunk
        return said


def _status_and_code(said):
    head, _, body = said.partition(b"\r\n\r\n")
    return int(head[9:12]), json.loads(body)["error"]["code"]


def test_a_client_that_dribbles_its_headers_is_cut(running):
    """A connection whose headers do not come is closed; one that says nothing at all, too."""
    for begun in (b"", b"POST /v1/windows HTTP/1.1\r\nHost: x\r\n"):
        assert _raw(running.port, begun) == b""


def test_a_client_that_dribbles_its_body_is_answered(running):
    """A body that does not come ends in 408; an unsigned one is not even waited for."""
    device = running.client()
    body = gzip.compress(kit.batch_of([kit.window(1)]))
    headers = device.key.headers("POST", "/v1/windows", body, time_ms=kit.now_ms())
    head = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    request = f"POST /v1/windows HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode()
    assert _status_and_code(_raw(running.port, request + body[:100])) == (408, "slow")
    unsigned = b"POST /v1/windows HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n"
    assert _status_and_code(_raw(running.port, unsigned)) == (401, "signature")


def test_an_endless_body_nobody_reads_is_cut(running):
    """A GET with a body that never ends does not keep its connection for ever."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
        connection.settimeout(30)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(1 << 16):
                said += chunk
        assert said.startswith(b"HTTP/1.1 200")


def test_headers_are_bounded(running):
    """One long header, many short ones, and a long path: 431."""
    long = b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 8_000 + b"\r\n\r\n"
    many = b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 2_000 + b"\r\n"
    path = b"GET /" + b"a" * 8_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    for request in (long, many, path):
        assert _status_and_code(_raw(running.port, request)) == (431, "headers")


def test_what_is_not_http_is_answered(running):
    """Another protocol gets a well-formed error and a closed connection."""
    for request in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"HELO x\r\n\r\n"):
        assert _status_and_code(_raw(running.port, request)) == (400, "http")
    twice = b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"
    assert _status_and_code(_raw(running.port, twice)) == (400, "http")


def test_connections_are_bounded(running):
    """Silent connections of one address do not shut others out for longer than they may be silent."""
    with contextlib.ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=20))
            for _ in range(TIGHT.connections_per_address + 5)
        ]
        refused = [_status_and_code(connection.recv(1 << 16)) for connection in idle[-5:]]
        assert refused == [(503, "connections")] * 5
        for connection in idle[:-5]:
            assert connection.recv(1) == b""
    assert kit.Client(running.port).send("GET", "/healthz").status == 200


def test_large_bodies_are_refused(running):
    """By what the headers say and by what comes, compressed and decompressed; the client sees the answer."""
    device = running.client()
    large = device.signed("POST", "/v1/windows", bytes(TIGHT.body_bytes + 1))
    assert (large.status, large.code) == (413, "too_large")
    bomb = device.signed("POST", "/v1/windows", gzip.compress(bytes(20 << 20)), {"Content-Encoding": "gzip"})
    assert (bomb.status, bomb.code) == (413, "too_large")
    chunked = (
        b"POST /v1/enrol HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"4000\r\n" + bytes(0x4000) + b"\r\n0\r\n\r\n"
    )
    assert _status_and_code(_raw(running.port, chunked)) == (413, "too_large")


def test_deep_json_is_refused(running):
    """A body nested a hundred thousand deep, signed by a device."""
    device = running.client()
    deep = b'{"schema":1,"sent_ms":1,"windows":[' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"]}"
    answer = device.upload(deep)
    assert (answer.status, answer.code) == (400, "depth")


PATHS = st.sampled_from(
    [
        *("/", "/healthz", "/metrics", "/v1/enrol", "/v1/windows", "/v1/samples", "/v1/classify", "/nothing"),
        *("/repository/metadata/root.json", "/repository/../gateway.sqlite", "/repository/targets/%2e%2e/x"),
        "/v1/windows?x=%00",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
_TEMPLATE = json.loads(kit.batch_of([kit.window(0), kit.window(1)]))


@st.composite
def mutated(draw):
    """A batch with some of its values replaced by others."""
    record = json.loads(json.dumps(_TEMPLATE))
    for _ in range(draw(st.integers(1, 3))):
        at = record
        while isinstance(at, dict | list) and at:
            key = (
                draw(st.sampled_from(sorted(at)))
                if isinstance(at, dict)
                else draw(st.integers(0, len(at) - 1))
            )
            if draw(st.booleans()) or not isinstance(at[key], dict | list):
                at[key] = draw(JSON)
                break
            at = at[key]
    return json.dumps(record, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")


BODIES = st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()) | mutated()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    path=PATHS,
    method=st.sampled_from(["GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS"]),
    body=BODIES,
    is_signed=st.booleans(),
    encoding=st.sampled_from([None, "gzip", "identity", "deflate"]),
    compress=st.booleans(),
)
def test_nothing_breaks_an_endpoint(  # noqa: PLR0917  # what hypothesis draws
    running, fuzzer, path, method, body, is_signed, encoding, compress
):
    """Whatever is sent is answered, never by 5xx, and every refusal is a well-formed error."""
    body = gzip.compress(body) if compress else body
    headers = {"Content-Encoding": encoding} if encoding else {}
    answer = (fuzzer.signed if is_signed else fuzzer.send)(method, path, body, headers)
    assert answer.status < 500 or answer.status == 501, answer.body
    if answer.status >= 400 and method != "HEAD":
        assert answer.code


@pytest.fixture(scope="module")
def fuzzer(running):
    return running.client()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=mutated())
def test_a_mutated_batch_is_stored_kept_apart_or_refused(running, fuzzer, body):
    """Of a batch of a known schema every window is accounted for."""
    answer = fuzzer.upload(body)
    assert answer.status in (200, 400, 413), answer.body
    if answer.status == 200:
        receipt = answer.json()
        record, apart = json.loads(body), receipt["quarantined"]
        if [one["index"] for one in apart] == [-1]:
            assert record["schema"] != 1
        else:
            assert receipt["accepted"] + receipt["duplicates"] + len(apart) == len(record["windows"])


def test_a_full_disk_acknowledges_nothing(tmp_path):
    """When the disk takes no more, answers are 503 and what was acknowledged is there; later it goes on."""
    folder = tmp_path / "state"

    def little_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))

    acknowledged, refused, sent = [], 0, 0
    with kit.gateway(folder, compact_every_s=0) as running:
        device = running.client()
    with kit.gateway(folder, compact_every_s=0, preexec=little_disk) as running:
        device.port = running.port
        while refused < 3 and sent < 400:
            numbers = list(range(sent * 20, sent * 20 + 20))
            answer = device.upload(kit.batch_of([kit.window(n) for n in numbers]))
            if answer.status == 200:
                acknowledged += numbers
            else:
                assert (answer.status, answer.code) == (503, "disk")
                assert "retry-after" in answer.headers
                refused += 1
            sent += 1
        assert refused == 3
        assert acknowledged
        assert device.send("GET", "/metrics").status == 200
    with kit.gateway(folder, compact_every_s=0) as running:
        device.port = running.port
        assert kit.stored(folder, device.key.device) == acknowledged
        assert device.upload(kit.batch_of([kit.window(n) for n in (0, 1_000_000)])).json()["accepted"] == 1


def test_a_nearly_full_disk_takes_nothing_in(tmp_path):
    """Below its reserve the gateway is unhealthy and stores no window."""
    with kit.gateway(tmp_path / "state", limits=Limits(free_bytes=1 << 60)) as running:
        device = running.client()
        answer = device.upload(kit.batch_of([kit.window(1)]))
        assert (answer.status, answer.code) == (503, "disk")
        assert device.send("GET", "/healthz").status == 503


def test_quarantine_is_bounded(tmp_path):
    """A device that sends garbage for ever fills a bounded part of the disk; reasons are kept on."""
    from dataclasses import replace

    from fleet.gateway import database

    with kit.gateway(tmp_path / "state", limits=replace(kit.FAST, quarantine_bytes=5_000)) as running:
        device = running.client()
        for at in range(5):
            device.upload(kit.batch_of([replace(kit.window(at * 10 + k), boot="x") for k in range(10)]))
    connection = database.reader(tmp_path / "state")
    count, size = connection.execute("SELECT count(*), sum(length(raw)) FROM quarantine").fetchone()
    connection.close()
    assert count == 50
    assert 0 < size <= 5_000
