"""The nearest thing to a gateway: a real HTTP server that checks signatures, nonces, times and schema.

It keeps what it acknowledged, and goes wrong on demand, request by request.
"""

import contextlib
import gzip
import json
import threading
import time
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec

from fleet.device.credentials import MOST_SKEW_MS, SIGNATURE, is_signed_by, signed_request
from fleet.device.histogram import Histogram
from fleet.device.wire import Batch, Window


class GatewayStub:
    """`faults` are taken one a request: a status, or a name of `_Handler._fault`; then it works."""

    def __init__(self, key, *, ahead_ms=0):
        self.key, self.ahead_ms = key, ahead_ms
        self.faults = deque()
        self.headers = {}  # of faults
        self.bodies = {}  # sequence -> the window as JSON text
        self.requests = []  # (sequences, fault)
        self.duplicates = 0
        self.refuse = set()  # sequences of windows that make a request a 422
        self.problems = []
        self.connections = 0
        self._nonces, self._seen = set(), set()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"stub": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()
        assert self.problems == []

    def now_ms(self):
        return time.time_ns() // 1_000_000 + self.ahead_ms

    def windows(self):
        """Decoded, by number."""
        with self._lock:
            bodies = dict(self.bodies)
        return {number: msgspec.json.decode(bodies[number], type=Window) for number in sorted(bodies)}

    def wait_for(self, holds, timeout_s=60):
        """Until the condition holds; False when it never did."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if holds():
                return True
            time.sleep(0.01)
        return False

    def take(self, handler, body):
        """Judge one request: (status, answer)."""
        request = signed_request(handler.command, handler.path, dict(handler.headers), body)
        if request is None or not is_signed_by(self.key.public, request, handler.headers[SIGNATURE]):
            self.problems.append("a request without a right signature")
            return 401, {"error": {"code": "signature"}}
        if abs(request.time_ms - self.now_ms()) > MOST_SKEW_MS:
            return 401, {"error": {"code": "clock", "server_ms": self.now_ms()}}
        content = gzip.decompress(body)
        batch = msgspec.json.decode(content, type=Batch)
        with self._lock:
            if request.nonce in self._nonces:
                self.problems.append("a nonce came twice")
            self._nonces.add(request.nonce)
            if self.refuse & {window.sequence for window in batch.windows}:
                return 422, {"error": {"code": "window"}}
            return 200, self._keep(batch, json.loads(content)["windows"])

    def _keep(self, batch, texts):
        duplicates = 0
        for window, text in zip(batch.windows, map(json.dumps, texts), strict=True):
            for family in (window.performance, window.resource, window.quality):
                for name in family.__dataclass_fields__:
                    if isinstance(value := getattr(family, name), Histogram):
                        value.check()
            if self.bodies.setdefault(window.sequence, text) != text:
                self.problems.append(f"two windows are number {window.sequence}")
            elif window.sequence in self._seen:
                duplicates += 1
            self._seen.add(window.sequence)
        self.duplicates += duplicates
        return {
            "accepted": len(texts) - duplicates,
            "duplicates": duplicates,
            "quarantined": [],
            "server_ms": self.now_ms(),
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: GatewayStub

    def setup(self):
        super().setup()
        self.stub.connections += 1

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        fault = self.stub.faults.popleft() if self.stub.faults else None
        numbers = [window["sequence"] for window in json.loads(gzip.decompress(body))["windows"]]
        self.stub.requests.append((numbers, fault))
        if isinstance(fault, str):
            self._fault(fault, body)
        elif isinstance(fault, int):
            self._answer(fault, {"error": {"code": "fault"}}, self.stub.headers)
        else:
            self._answer(*self.stub.take(self, body))

    def _fault(self, fault, body):
        self.close_connection = True
        if fault == "hang up":
            return
        if fault == "portal":
            self._answer(200, "<html>please log in</html>", {"Connection": "close"})
            return
        if fault == "redirect":
            self._answer(302, {}, {"Location": "http://127.0.0.1/login", "Connection": "close"})
            return
        if fault == "lost answer":  # taken, but the device never hears of it
            self.stub.take(self, body)
            return
        text = json.dumps(self.stub.take(self, body)[1]).encode()
        self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text))
        if fault == "cut answer":
            self.wfile.write(text[: len(text) // 2])
        elif fault == "drip":
            for byte in text:
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
        else:
            raise AssertionError(fault)

    def _answer(self, status, answer, headers=None):
        text = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass

    def handle(self):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            super().handle()
