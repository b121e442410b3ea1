"""Batches on their way: retries, clocks, refusals, and a log that tells which of them it was."""

import json
import subprocess
import threading
import time

import pytest
from gateway_stub import GatewayStub
from telling import window

from fleet.device.credentials import MOST_SKEW_MS, DeviceKey
from fleet.device.monitor import delivery
from fleet.device.monitor.client import GatewayClient
from fleet.device.monitor.delivery import Courier, read_receipt
from fleet.device.monitor.loss import LossCounter
from fleet.device.monitor.spool import Spool
from fleet.device.monitor.upload_log import MOST_BYTES, Request, UploadLog, read_log
from fleet.device.monitor.uploader import Sent, send
from fleet.device.wire import Loss

KEY = DeviceKey(bytes(range(1, 33)))


class Sending:
    """A spool with n windows and what sends them; waits are noted and not waited."""

    def __init__(self, folder, url, n=3, **client):
        self.folder, self.loss, self.waits = folder, LossCounter(), []
        self.spool = Spool(folder, self.loss, wall_ms=lambda: 1)
        for index in range(n):
            self.spool.put(window(mark=10.0 + index))
        self.client = GatewayClient(url, **client)
        log = UploadLog(folder / "uploads.jsonl")
        self.courier = Courier(
            self.client, KEY, log, wall_ms=lambda: time.time_ns() // 1_000_000, wait=self.wait
        )

    def wait(self, seconds):
        self.waits.append(seconds)
        return False

    def send(self):
        return send(list(self.spool.waiting()), self.spool, self.courier)

    def outcomes(self):
        return [(request.outcome, request.status) for request in read_log(self.folder)]


@pytest.fixture
def gateway():
    with GatewayStub(KEY) as running:
        yield running


@pytest.mark.parametrize(
    ("fault", "logged"),
    [
        ("hang up", ("network", None)),
        ("cut answer", ("network", None)),
        ("lost answer", ("network", None)),
        (500, ("5xx", 500)),
        (503, ("5xx", 503)),
        (429, ("4xx", 429)),
        (408, ("4xx", 408)),
    ],
)
def test_what_may_pass_is_tried_again(tmp_path, gateway, fault, logged):
    """Twice wrong, then right: taken once, nothing left, each try in the log, waits within the backoff."""
    gateway.faults += [fault, fault]
    sending = Sending(tmp_path, gateway.url)
    assert sending.send() == Sent(through=True)
    assert sorted(gateway.bodies) == [1, 2, 3]
    assert sending.spool.waiting() == {}
    assert sending.outcomes() == [logged, logged, ("ok", 200)]
    assert len(sending.waits) == 2
    assert all(0 <= wait <= 2**index for index, wait in enumerate(sending.waits))


def test_the_backoff_doubles(tmp_path, gateway, monkeypatch):
    """At most 1, 2 and 4 s; where in between is drawn."""
    monkeypatch.setattr("fleet.device.monitor.delivery.random.uniform", lambda _low, high: high)
    gateway.faults += [500] * 4
    sending = Sending(tmp_path, gateway.url)
    sending.send()
    assert sending.waits == [1, 2, 4]


@pytest.mark.parametrize("fault", ["hang up", "cut answer", "lost answer", 500, 429])
def test_after_three_retries_the_windows_wait_for_the_next_turn(tmp_path, gateway, fault):
    """Four requests, no more; all windows still there; the next turn brings them, once."""
    gateway.faults += [fault] * 4
    sending = Sending(tmp_path, gateway.url)
    assert not sending.send().through
    assert len(gateway.requests) == 4
    assert list(sending.spool.waiting()) == [1, 2, 3]
    assert sending.send().through
    assert sorted(gateway.bodies) == [1, 2, 3]
    assert sending.spool.waiting() == {}


@pytest.mark.parametrize(
    ("fault", "logged"),
    [
        ("portal", ("serialisation", 200)),
        ("redirect", ("network", 302)),
        (404, ("4xx", 404)),
        (403, ("4xx", 403)),
    ],
)
def test_what_is_no_receipt_acknowledges_nothing(tmp_path, gateway, fault, logged):
    """A login page with 200, a redirect, a wrong path, a revoked key: every window stays in the spool."""
    gateway.faults += [fault] * 4
    sending = Sending(tmp_path, gateway.url)
    assert not sending.send().through
    assert list(sending.spool.waiting()) == [1, 2, 3]
    assert set(sending.outcomes()) == {logged}
    assert sending.loss.take() == Loss()


def test_nobody_listens(tmp_path):
    """Connection refused is the network's doing."""
    with GatewayStub(KEY) as gone:
        url = gone.url
    sending = Sending(tmp_path, url)
    assert not sending.send().through
    assert sending.outcomes() == [("network", None)] * 4
    assert "refused" in read_log(tmp_path)[0].said


def test_an_answer_that_drips_is_given_up(tmp_path, gateway):
    """Each byte comes in time, all of them never would: the whole answer has a limit."""
    gateway.faults += ["drip"] * 4
    sending = Sending(tmp_path, gateway.url, answer_s=0.3)
    assert not sending.send().through
    assert sending.outcomes() == [("network", None)] * 4
    assert sending.spool.waiting()


def test_a_gateway_that_is_silent_is_given_up(tmp_path):
    """It accepts the connection and never says a word."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        sending = Sending(tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}", silence_s=0.1)
        assert not sending.send().through
    assert sending.outcomes() == [("network", None)] * 4


def test_retry_after_is_respected(tmp_path, gateway):
    """Seconds are waited; more than a minute ends the turn and is handed on."""
    gateway.headers = {"Retry-After": "7"}
    gateway.faults.append(503)
    sending = Sending(tmp_path, gateway.url)
    assert sending.send().through
    assert sending.waits == [7.0]
    sending.spool.put(window())
    gateway.headers = {"Retry-After": "600"}
    gateway.faults.append(429)
    assert sending.send() == Sent(through=False, retry_after_s=600.0)
    assert sending.waits == [7.0]


@pytest.mark.parametrize(
    ("header", "seconds"), [("", 0), ("soon", 0), ("-5", 0), ("²", 0), ("9" * 30, 86400)]
)
def test_nonsense_in_retry_after_is_no_wait(header, seconds):
    """And no request is put off for more than a day."""
    assert delivery._seconds(header) == seconds


def test_retry_after_may_be_a_date():
    """In the past it asks for nothing."""
    assert delivery._seconds("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert delivery._seconds("Fri, 31 Dec 9999 23:59:59 GMT") == 86_400


@pytest.mark.parametrize("ahead_ms", [3 * MOST_SKEW_MS, -3 * MOST_SKEW_MS])
def test_a_wrong_clock_is_corrected_once(tmp_path, ahead_ms):
    """By the time in the refusal, also for the requests after; the windows keep the device's own times."""
    with GatewayStub(KEY, ahead_ms=ahead_ms) as gateway:
        sending = Sending(tmp_path, gateway.url)
        assert sending.send().through
        sending.spool.put(window())
        assert sending.send().through
        assert sorted(gateway.bodies) == [1, 2, 3, 4]
    assert sending.outcomes() == [("4xx", 401), ("ok", 200), ("ok", 200)]
    assert sending.waits == []


def test_a_gateway_that_never_agrees_on_the_time_is_not_asked_for_ever(tmp_path):
    """One correction a batch."""
    with GatewayStub(KEY) as gateway:
        times = iter(range(0, 10**12, 10**10))
        gateway.now_ms = lambda: next(times)
        sending = Sending(tmp_path, gateway.url)
        assert not sending.send().through
        assert len(gateway.requests) == 2
    assert len(sending.spool.waiting()) == 3


def test_the_refused_window_is_found_and_put_aside(tmp_path, gateway):
    """Two of a hundred: the other 98 arrive, once each, and the loss is counted."""
    gateway.refuse = {17, 80}
    sending = Sending(tmp_path, gateway.url, n=100)
    assert sending.send().through
    assert sorted(gateway.bodies) == [number for number in range(1, 101) if number not in (17, 80)]
    assert gateway.duplicates == 0
    assert sending.spool.waiting() == {}
    assert sorted(path.name for path in (tmp_path / "aside").iterdir()) == [
        f"{number:020d}-n.json.refused" for number in (17, 80)
    ]
    assert sending.loss.take() == Loss(dropped_windows=2)


@pytest.mark.parametrize("n", [1, 100])
def test_a_gateway_that_refuses_everything_loses_nothing(tmp_path, gateway, n):
    """Whatever is wrong there, it is not each window; and the turn ends soon."""
    gateway.refuse = set(range(1, 101))
    sending = Sending(tmp_path, gateway.url, n=n)
    assert not sending.send().through
    assert len(gateway.requests) <= 32
    assert len(sending.spool.waiting()) == n
    assert sending.loss.take() == Loss()


def test_a_turn_keeps_its_connection(tmp_path, gateway):
    """Three batches, one connection."""
    sending = Sending(tmp_path, gateway.url, n=100)
    assert sending.send().through
    assert [len(numbers) for numbers, _ in gateway.requests] == [45, 45, 10]
    assert gateway.connections == 1


def test_broken_windows_do_not_stop_the_others(tmp_path, gateway):
    """They are put aside before the batch is made."""
    sending = Sending(tmp_path, gateway.url, n=3)
    next((tmp_path / "windows").glob("*2-n.json")).write_bytes(b"garbage")
    assert sending.send().through
    assert sorted(gateway.bodies) == [1, 3]
    assert sending.loss.take() == Loss(dropped_windows=1)


RECEIPT = {"accepted": 2, "duplicates": 0, "quarantined": [{"index": 0, "reason": "schema"}], "server_ms": 5}


@pytest.mark.parametrize(
    "change",
    [{"accepted": 3}, {"accepted": -1, "duplicates": 3}, {"accepted": "2"}, {"accepted": True},
     {"server_ms": None}, {"quarantined": None}, {"quarantined": [1]}, {"quarantined": []}],
)  # fmt: skip
def test_a_receipt_that_does_not_add_up_is_none(change):
    """The sum of its parts is what was sent."""
    newer = RECEIPT | {"more": 1, "quarantined": [{"index": 0, "reason": "schema", "since": 3}]}
    assert read_receipt(json.dumps(newer).encode(), 3).accepted == 2  # a later gateway may say more
    assert read_receipt(json.dumps(RECEIPT | change).encode(), 3) is None
    for body in (b"", b"[]", b"\xff", b"[" * 100_000):
        assert read_receipt(body, 3) is None


def test_a_batch_that_is_kept_whole_is_acknowledged():
    """Of an unknown schema: one item, -1, stands for all its windows; beside others it is none."""
    whole = {
        "accepted": 0,
        "duplicates": 0,
        "quarantined": [{"index": -1, "reason": "schema"}],
        "server_ms": 5,
    }
    assert read_receipt(json.dumps(whole).encode(), 45).quarantined[0].index == -1
    for change in ({"accepted": 2}, {"quarantined": whole["quarantined"] * 2}):
        assert read_receipt(json.dumps(whole | change).encode(), 45) is None


def test_https_is_verified(tmp_path):
    """A certificate that nobody vouches for is a network error, and nothing is sent."""
    import ssl
    from http.server import BaseHTTPRequestHandler, HTTPServer

    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-days", "2", "-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem", *subject],
        check=True, capture_output=True,
    )  # fmt: skip
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            asked.append(self.path)

    server = HTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        sending = Sending(tmp_path / "spool", f"https://localhost:{server.server_address[1]}", n=1)
        assert not sending.send().through
    finally:
        server.shutdown()
        server.server_close()
    assert sending.outcomes() == [("network", None)] * 4
    assert "CERTIFICATE_VERIFY_FAILED" in read_log(tmp_path / "spool")[0].said
    assert asked == []


def test_the_log_is_bounded_and_survives_what_was_cut_off(tmp_path):
    """Two files of at most 128 KiB, the newest requests in them; a torn line is left out."""
    log = UploadLog(tmp_path / "uploads.jsonl")
    for index in range(3000):
        log.add(
            Request(
                time_ms=index, windows=1, bytes=2, status=200, outcome="ok", duration_ms=1.5, said="x" * 40
            )
        )
    assert all(path.stat().st_size <= MOST_BYTES for path in tmp_path.iterdir())
    kept = [request.time_ms for request in read_log(tmp_path)]
    assert kept == list(range(3000 - len(kept), 3000))
    assert len(kept) > 700
    with (tmp_path / "uploads.jsonl").open("r+b") as file:
        file.truncate((tmp_path / "uploads.jsonl").stat().st_size - 9)
    assert [request.time_ms for request in read_log(tmp_path)] == kept[:-1]
