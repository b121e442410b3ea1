"""Asking a server whether it is there, told apart from one that is there and refuses.

With Python's own client, in one place: what a build takes for an answer, `edgeloop doctor` does, too.
"""

import base64
import http.client
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Literal

TIMEOUT_S = 4.0
Answer = Literal["answers", "refuses us", "is absent", "answers otherwise", "cannot be read"]

_LONGEST = 120


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What became of a request."""

    answer: Answer
    detail: str = ""
    """In words, without user, password and token."""
    body: bytes = b""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A login page is no answer, and credentials belong to nobody else."""

    def redirect_request(self, *_: object) -> None:
        return None


def ask(
    uri: str,
    path: str,
    *,
    basic: str | None = None,
    bearer: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Asked:
    """GET `path` below `uri` with its user and password, or the ones given.

    Args:
        uri: http(s)://[USER:PASSWORD@]HOST[:PORT][/PREFIX].
        path: Begins with a slash.
        basic: USER:PASSWORD.
        bearer: A token, which goes before a password.
        timeout_s: How long to wait for each part of the answer.
    """
    try:
        request = _request(uri, path, basic, bearer)
        opener = urllib.request.build_opener(_NoRedirect())
        with opener.open(request, timeout=timeout_s) as response:
            return Asked(answer="answers", body=response.read(1 << 16))
    except urllib.error.HTTPError as error:
        return _status(error)
    except (ValueError, http.client.InvalidURL):  # these quote what they could not read, passwords too
        return Asked(
            answer="cannot be read",
            detail="`#`, `/`, `?`, `@`, `%` and blanks in a password are written as %XX",
        )
    except (http.client.HTTPException, ssl.SSLError) as error:
        return Asked(
            answer="answers otherwise", detail=f"no web server of this kind ({type(error).__name__})"
        )
    except OSError as error:
        return _absent(error, timeout_s)


def _request(uri: str, path: str, basic: str | None, bearer: str | None) -> urllib.request.Request:
    parts = urllib.parse.urlsplit(uri)
    if parts.scheme not in {"http", "https"} or not parts.hostname or not 0 <= (parts.port or 0) <= 65535:
        raise ValueError("no address of a web server")
    host = parts.netloc.rpartition("@")[2]
    address = urllib.parse.urlunsplit((parts.scheme, host, parts.path.rstrip("/") + path, "", ""))
    request = urllib.request.Request(address)  # noqa: S310  # http(s), seen above
    if parts.username is not None:
        basic = urllib.parse.unquote(f"{parts.username}:{parts.password or ''}")
    if bearer:
        request.add_unredirected_header("Authorization", f"Bearer {bearer}")
    elif basic:
        request.add_unredirected_header(
            "Authorization", f"Basic {base64.b64encode(basic.encode()).decode('ascii')}"
        )
    return request


def _status(error: urllib.error.HTTPError) -> Asked:
    if error.code in {401, 403, 407}:
        return Asked(answer="refuses us", detail=f"HTTP {error.code}")
    if error.code in {301, 302, 303, 307, 308}:
        return Asked(answer="refuses us", detail=f"HTTP {error.code}, as to a login page")
    return Asked(answer="answers otherwise", detail=f"HTTP {error.code}")


def _absent(error: OSError, timeout_s: float) -> Asked:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, ssl.SSLError):
        return Asked(answer="answers otherwise", detail=f"its certificate or TLS fails: {reason.reason}")
    if isinstance(reason, TimeoutError):
        return Asked(answer="is absent", detail=f"no answer in {timeout_s:.0f} s")
    if isinstance(reason, socket.gaierror):
        return Asked(answer="is absent", detail="nobody knows this host name")
    return Asked(answer="is absent", detail=str(reason)[:_LONGEST])
