"""Starting a gateway, and what its operator does to the state beside it."""

import contextlib
import fcntl
import os
import resource
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from fleet.device.address import is_loopback
from fleet.device.errors import UserError
from fleet.device.wall import now_ms
from fleet.gateway import database
from fleet.gateway import devices as known
from fleet.gateway.app import create_app
from fleet.gateway.classify import MnnClassifier
from fleet.gateway.devices import Device
from fleet.gateway.limits import Limits
from fleet.gateway.protocol import guarded
from fleet.gateway.state import Settings

HOST, PORT = "127.0.0.1", 8480
_GRACEFUL_S = 10
_BACKLOG = 1024
_OWN_DESCRIPTORS = 256


def serve(
    folder: Path,
    *,
    host: str = HOST,
    port: int = PORT,
    certfile: Path | None = None,
    keyfile: Path | None = None,
    repository: Path | None = None,
    insecure: bool = False,
    open_pages: bool = False,
    classifier: Path | None = None,
    compact_every_s: float = 60.0,
    limits: Limits | None = None,
) -> int:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        folder: State; made with mode 0700 when it is not there.
        host: Address to listen on.
        port: Its port; 0 takes a free one, which the first line on stdout says.
        certfile: TLS certificate chain, PEM.
        keyfile: Its key, PEM.
        repository: TUF repository to serve.
        insecure: Listen beyond this machine without TLS: something in front of it does it.
        open_pages: Show the fleet page and the metrics to other machines, too.
        classifier: MNN model that answers hard samples, its card.json beside it.
        compact_every_s: Seconds between compactions; 0 for none.
        limits: Other bounds than usual.

    Returns:
        Exit code.

    Raises:
        UserError: no TLS for a host that others reach, files that are not there, a port or a state in use.
    """
    _check(host, certfile, keyfile, repository, insecure=insecure)
    prepare(folder)
    bounds = limits or Limits()
    settings = Settings(
        folder=folder.resolve(),
        repository=repository,
        limits=bounds,
        classifier=MnnClassifier(classifier) if classifier else None,
        compact_every_s=compact_every_s,
        open_pages=open_pages,
    )
    config = uvicorn.Config(
        create_app(settings),
        host=host,
        port=port,
        loop="uvloop",
        http=guarded(bounds),
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # a header is no proof of where a request comes from
        timeout_keep_alive=bounds.keep_alive_s,
        timeout_graceful_shutdown=_GRACEFUL_S,
        ssl_certfile=certfile,
        ssl_keyfile=str(keyfile) if keyfile else None,
    )
    _allow_descriptors(bounds.connections)
    server = _Announcing(config)
    with _only(folder), _bound(host, port) as listening:
        server.run(sockets=[listening])
    return 0 if server.started else 3


class _Announcing(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or []:
            host, port = bound.getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            shown = f"[{host}]" if ":" in host else host
            print(f"edgeloop gateway: {scheme}://{shown}:{port}/", flush=True)


def _allow_descriptors(connections: int) -> None:
    """A connection is a file descriptor, of which a shell often allows 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OWN_DESCRIPTORS
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))


@contextlib.contextmanager
def _only(folder: Path) -> Iterator[None]:
    """Hold the state folder, whose store opens, for this process."""
    with (folder / "serve.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            database.opened(folder).close()
        except BlockingIOError as error:
            raise UserError(
                f"{folder} is served by another gateway",
                allowed="one gateway for a state folder",
                next_step="stop the other one, or give another --folder",
            ) from error
        except sqlite3.Error as error:
            raise UserError(
                f"{folder / database.FILE}: {error}",
                allowed="the store of this version of the gateway",
                next_step="serve it with the version that made it, or give another --folder",
            ) from error
        yield


def _bound(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"{host} port {port}: {error}",
            allowed="an address of this machine and a port that is free",
            next_step="give another --port, or --port 0 for any free one",
        ) from error


def prepare(folder: Path) -> None:
    """Make the state folder, readable by its owner only.

    Raises:
        UserError: others may read it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    mode = folder.stat().st_mode & 0o777
    if mode & 0o077:
        raise UserError(
            f"{folder} has mode {mode:o}",
            allowed="a folder that only its owner may read (mode 700)",
            next_step=f"chmod 700 {folder}",
        )


def token(folder: Path, *, count: int = 1, hours: float = 24.0) -> list[str]:
    """New one-time tokens for enrolment; they are shown once and stored as hashes.

    Args:
        folder: State folder.
        count: How many.
        hours: For how long they work.
    """
    if not 1 <= count <= 100_000 or not 0 < hours <= 24 * 366:
        raise UserError(
            f"{count} tokens for {hours} hours",
            allowed="1 to 100000 tokens, more than 0 and at most 8784 hours",
            next_step="ask for fewer",
        )
    prepare(folder)
    connection = database.opened(folder)
    try:
        return known.make_tokens(connection, count, expires_ms=now_ms() + int(hours * 3_600_000))
    finally:
        connection.close()


def revoke(folder: Path, device: str) -> None:
    """Refuse a device from the next request on.

    Raises:
        UserError: there is no such device.
    """
    prepare(folder)
    connection = database.opened(folder)
    try:
        if not known.revoke(connection, device, now_ms=now_ms()):
            raise UserError(
                f"device {device}",
                allowed="a device that is enrolled",
                next_step="`edgeloop fleet devices` lists them",
            )
    finally:
        connection.close()


def devices(folder: Path) -> list[Device]:
    """All devices, in the order of enrolment."""
    prepare(folder)
    connection = database.opened(folder)
    try:
        return known.every(connection)
    finally:
        connection.close()


def _check(
    host: str, certfile: Path | None, keyfile: Path | None, repository: Path | None, *, insecure: bool
) -> None:
    if (certfile is None) != (keyfile is None):
        raise UserError(
            "a certificate without its key, or a key without its certificate",
            allowed="both, or none",
            next_step="give --certfile and --keyfile",
        )
    if certfile is None and not insecure and not is_loopback(host):
        raise UserError(
            f"host {host} without TLS",
            allowed="127.0.0.1, or a certificate and its key",
            next_step="give --certfile and --keyfile; --insecure if a proxy on the way does TLS",
        )
    for name, path in (("--certfile", certfile), ("--keyfile", keyfile)):
        if path is not None and not (path.is_file() and os.access(path, os.R_OK)):
            raise UserError(
                f"{name} {path}", allowed="a PEM file that can be read", next_step="check the path"
            )
    if repository is not None and not repository.is_dir():
        raise UserError(
            f"--repository {repository}",
            allowed="the folder of a TUF repository, with metadata/ and targets/",
            next_step="check the path",
        )
