"""Bytes from one repository over HTTP: no redirects, no proxies, no other host, bounded in time and length.

Plain http is for loopback only; elsewhere it is https, with the system's certificates or the app's context.
"""

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from tuf.api.exceptions import DownloadError, DownloadHTTPError, SlowRetrievalError
from tuf.ngclient.fetcher import FetcherInterface

from fleet.device.address import is_loopback
from fleet.device.runtime.refusal import UpdateRefusedError

_CHUNK_BYTES = 1 << 16
_SLOWEST_BYTES_PER_S = 16 << 10
_CLEAN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~/%")


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long a request may take."""

    silence_s: float = 10.0
    """Without a byte."""
    metadata_s: float = 60.0
    """For the whole of a metadata file."""


class Fetcher(FetcherInterface):
    """Fetches below one URL.

    Raises:
        UpdateRefusedError: reason `url`: neither https nor http on loopback.
    """

    def __init__(
        self, url: str, *, patience: Patience | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Fetch below `url`, a folder."""
        self.url = url.rstrip("/") + "/"
        self._patience = patience or Patience()
        self._parts = _checked(self.url)
        self._tls = tls or (ssl.create_default_context() if self._parts.scheme == "https" else None)
        self.bytes_received = 0
        """Of bodies, over all requests."""

    def _fetch(self, url: str) -> Iterator[bytes]:
        return self.fetch_from(url, 0, self._patience.metadata_s)[1]

    def fetch_file(self, url: str, offset: int, length: int) -> tuple[int, Iterator[bytes]]:
        """The bytes of a file of `length` bytes from `offset` on, or from 0 where the server cannot do that.

        Returns:
            Where the bytes begin, and the bytes.

        Raises:
            DownloadError: no answer, an error status, a redirect, an encoding that was not asked for.
        """
        deadline_s = self._patience.metadata_s + length / _SLOWEST_BYTES_PER_S
        return self.fetch_from(url, offset, deadline_s)

    def fetch_from(self, url: str, offset: int, deadline_s: float) -> tuple[int, Iterator[bytes]]:
        """As `fetch_file`, with the time that all of it may take."""
        parts = urlsplit(url)
        if not url.startswith(self.url) or ".." in parts.path.split("/") or not set(parts.path) <= _CLEAN:
            raise DownloadError(f"{url} is not below {self.url}")
        connection = self._connection()
        with _as_download_errors(url):
            connection.connect()
        # The socket itself: the connection forgets it once it knows that the server will close it.
        watchdog = threading.Timer(deadline_s, _cut, (connection.sock,))
        watchdog.daemon = True
        watchdog.start()
        try:
            headers = {"Accept-Encoding": "identity", "User-Agent": "edgeloop-device"}
            if offset:
                headers["Range"] = f"bytes={offset}-"
            with _as_download_errors(url):
                connection.request("GET", parts.path, headers=headers)
                response = connection.getresponse()
            start = _start_of(response, offset, url)
        except BaseException:  # nobody reads the rest of the answer
            watchdog.cancel()
            connection.close()
            raise
        return start, self._chunks(connection, response, watchdog, url)

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._tls is not None:
            return http.client.HTTPSConnection(
                host, port, timeout=self._patience.silence_s, context=self._tls
            )
        return http.client.HTTPConnection(host, port, timeout=self._patience.silence_s)

    def _chunks(
        self,
        connection: http.client.HTTPConnection,
        response: http.client.HTTPResponse,
        watchdog: threading.Timer,
        url: str,
    ) -> Iterator[bytes]:
        missing = response.length
        try:
            while True:
                with _as_download_errors(url):
                    chunk = response.read1(_CHUNK_BYTES)
                if not chunk:
                    break
                self.bytes_received += len(chunk)
                if missing is not None:
                    missing -= len(chunk)
                yield chunk
            if missing:
                raise DownloadError(f"{url}: cut, {missing} bytes are missing")
        finally:
            watchdog.cancel()
            connection.close()


def _checked(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UpdateRefusedError("url", f"{url}: {error}") from error
    plain = parts.username or parts.password or parts.query or parts.fragment
    allowed = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host or ""))
    if not host or plain or not allowed or not set(parts.path) <= _CLEAN:
        raise UpdateRefusedError("url", f"{url}: allowed https://HOST/PATH, or http:// on loopback")
    return parts


def _start_of(response: http.client.HTTPResponse, offset: int, url: str) -> int:
    """Where the body begins in the file."""
    if response.status not in (200, 206):
        raise DownloadHTTPError(f"{url}: status {response.status}", response.status)
    if response.getheader("Content-Encoding", "identity") != "identity":
        raise DownloadError(f"{url}: Content-Encoding {response.getheader('Content-Encoding')}")
    if response.status == 200:
        return 0
    if not response.getheader("Content-Range", "").startswith(f"bytes {offset}-"):
        raise DownloadError(f"{url}: asked for bytes from {offset}, got another part")
    return offset


def _cut(opened: socket.socket) -> None:
    """End a request that takes too long, from another thread: the reader sees the end of the stream."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(opened, socket.SHUT_RDWR)


@contextlib.contextmanager
def _as_download_errors(url: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise SlowRetrievalError(f"{url}: {error}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DownloadError(f"{url}: {error!r}") from error
