"""The reports of a repository's workspaces over HTTP, on the loopback: browsers open no file from a page.

    /                          the workspaces and what there is of each
    /WORKSPACE/release.html    the release report
    /WORKSPACE/data_docs/...   the Data Docs

Nothing else of the disk is served.
"""

import html
import mimetypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from flows.servers.process import HOST
from tasks.workspace import workspaces

REPORT = "release.html"
DATA_DOCS = "data_docs/index.html"
_FILES = ("gate.md", "prune_ladder.html", REPORT)
_FOLDERS = ("data_docs",)
_COMMITTED = ("gate.md",)
"""Its time may be that of the clone."""


@contextmanager
def served(repository: Path, port: int) -> Iterator[None]:
    """Serve for the block.

    Raises:
        OSError: the port is taken.
    """

    class Handler(_Handler):
        root = repository

    server = _Server((HOST, port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def page(workspace: str, name: str) -> str:
    """The path of a report's page."""
    return f"/{quote(workspace, safe='')}/{quote(name)}"


def newest_report(repository: Path) -> str | None:
    """The page of the release report written last; None when no workspace has one."""
    found = {name: w.path / "reports" / REPORT for name, w in workspaces(repository).items()}
    written = {name: file.stat().st_mtime for name, file in found.items() if file.is_file()}
    return page(max(written, key=written.__getitem__), REPORT) if written else None


def file_of(repository: Path, path: str) -> Path | None:
    """The file behind a page's path; None for whatever is not to be served."""
    workspace, _, name = unquote(path).lstrip("/").partition("/")
    known = workspaces(repository).get(workspace)
    if known is None or "\0" in name:
        return None
    reports = (known.path / "reports").resolve()
    file = (reports / name).resolve()  # a link that leads out is not followed
    inside = any(file.is_relative_to(reports / folder) for folder in _FOLDERS)
    allowed = inside or (file.parent == reports and file.name in _FILES)
    return file if allowed and file.is_file() else None


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a reader that went away; a defect of ours is shown."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]  # whatever it was given


class _Handler(BaseHTTPRequestHandler):
    root = Path()

    def do_HEAD(self) -> None:
        """As GET, without the content."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answer with the index, a report, or not found."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        path = _path_of(self.path)
        if host not in (HOST, "localhost"):  # a name somebody else's page made lead here
            self.send_error(HTTPStatus.FORBIDDEN)
        elif path == "/":
            self._send(_index(self.root).encode(), "text/html")
        elif file := file_of(self.root, path):
            kind = "text/plain" if file.suffix == ".md" else mimetypes.guess_type(file.name)[0]
            self._send(file.read_bytes(), kind or "application/octet-stream")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(HTTPStatus.OK)
        text = kind.startswith("text/")
        self.send_header("Content-Type", f"{kind}; charset=utf-8" if text else kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        # Data Docs name files on other hosts; nothing on these pages asks the network.
        self.send_header("Content-Security-Policy", "default-src 'self' 'unsafe-inline' data:")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Print nothing: stderr is the user's."""


def _path_of(target: str) -> str:
    """The path of a request's target; empty where it is none."""
    try:
        return urlsplit(target).path
    except ValueError:
        return ""


def _index(repository: Path) -> str:
    rows = []
    for name, workspace in workspaces(repository).items():
        files = ((REPORT, "release report"), ("gate.md", "gate"), (DATA_DOCS, "Data Docs"))
        there = [(f, what, workspace.path / "reports" / f) for f, what in files]
        cells = [
            f'<a href="{html.escape(page(name, f))}">{what}</a> {"" if f in _COMMITTED else _written(path)}'
            for f, what, path in there
            if path.is_file()
        ]
        rows.append(f"<li><b>{html.escape(name)}</b> {' · '.join(cells) or 'not built yet'}</li>")
    style = "body{font:16px/1.6 system-ui,sans-serif;margin:2rem;color-scheme:light dark}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><style>{style}</style>'
    return (
        f'<!doctype html><html lang="en"><head><title>edgeloop reports</title>{head}</head>'
        f"<body><h1>Reports</h1><ul>{''.join(rows)}</ul></body></html>"
    )


def _written(file: Path) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(file.stat().st_mtime))
