"""A real HTTP server on this machine that keeps every byte it is sent, before anything parses it."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Received:
    """One request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Reply:
    """What is answered."""

    status: int = 200
    record: dict = field(default_factory=dict)
    delay_s: float = 0.0
    drip_s: float = 0.0
    """Pause between the bytes of the answer."""
    hang_up: bool = False


class RecordingGateway:
    """Answers with what `reply` (set by the test) says; a context manager."""

    def __init__(self, context: ssl.SSLContext | None = None, *, read_slowly_s: float = 0.0) -> None:
        self.reply: Callable[[Received], Reply] = lambda _request: Reply()
        self.requests: list[Received] = []
        self.raw: list[bytearray] = []
        self._context, self._read_slowly_s = context, read_slowly_s
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self.port}"
        self._open: list[socket.socket] = []
        self._closing = False

    def everything(self) -> bytes:
        """Every byte of every connection."""
        return b"\n".join(bytes(raw) for raw in self.raw)

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._closing = True
        self._server.close()
        for connection in self._open:
            connection.close()

    def _accept(self):
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            if self._read_slowly_s:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        raw = bytearray()
        self.raw.append(raw)
        try:
            if self._context:
                connection = self._context.wrap_socket(connection, server_side=True)
            self._open.append(connection)
            while self._one(connection, raw):
                pass
        except OSError:
            pass
        finally:
            connection.close()

    def _one(self, connection, raw) -> bool:
        begin = len(raw)
        while (end := raw.find(b"\r\n\r\n", begin)) < 0:
            if not self._more(connection, raw):
                return False
        first, *lines = raw[begin:end].decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        while len(raw) < end + 4 + length:
            if not self._more(connection, raw):
                return False
        method, path, _ = first.split(" ")
        request = Received(method, path, headers, bytes(raw[end + 4 : end + 4 + length]))
        self.requests.append(request)
        reply = self.reply(request)
        time.sleep(reply.delay_s)
        if reply.hang_up:
            return False
        body = json.dumps(reply.record).encode()
        answer = f"HTTP/1.1 {reply.status} X\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
        if not reply.drip_s:
            connection.sendall(answer)
            return True
        for byte in answer:
            if self._closing:
                return False
            connection.sendall(bytes([byte]))
            time.sleep(reply.drip_s)
        return True

    def _more(self, connection, raw) -> bool:
        time.sleep(self._read_slowly_s)
        data = connection.recv(1024 if self._read_slowly_s else 1 << 16)
        raw += data
        return bool(data)
