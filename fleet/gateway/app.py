"""The gateway's endpoints; `fleet/device/wire.py` lists them."""

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from fleet.device.wall import now_ms
from fleet.device.wire import (
    Classified,
    Enrolled,
    Enrolment,
    Quarantined,
    Receipt,
    SampleReceipt,
    SamplesDeleted,
)
from fleet.gateway import batch, devices, ingest, page, samples
from fleet.gateway.ingest import Incoming
from fleet.gateway.refusal import Refusal, shown, unavailable
from fleet.gateway.requests import (
    address,
    body_of,
    drain,
    is_local,
    limited,
)
from fleet.gateway.state import Gateway, Settings

_LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")
_DISCONNECTED = 499
Handler = Callable[[Gateway, Request], Awaitable[Response]]


async def enrol(gateway: Gateway, request: Request) -> Response:
    """POST /v1/enrol."""
    limited(gateway.enrolments, address(request))
    limits = gateway.limits
    body = await body_of(request, most=limits.header_bytes, within_s=limits.body_s)
    try:
        enrolment = msgspec.json.decode(body, type=Enrolment)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Refusal(
            400,
            "enrolment",
            shown(str(error)),
            allowed="JSON: token, public_key, device_model",
            next_step="send an enrolment",
        ) from error
    server_ms = now_ms()
    device = await gateway.store.run(partial(devices.enrol, enrolment=enrolment, now_ms=server_ms))
    return answer(Enrolled(device=device, server_ms=server_ms), 201)


async def windows(gateway: Gateway, request: Request) -> Response:
    """POST /v1/windows."""
    started_s, limits = time.perf_counter(), gateway.limits
    gateway.require_room()
    device, time_ms, nonce, body = await gateway.signed(request, most=limits.body_bytes)
    encoding = request.headers.get("content-encoding", "").strip().lower()
    content = batch.decompressed(body, encoding, most=limits.batch_bytes)
    received_ms = now_ms()
    incoming = Incoming(
        device=device.number,
        time_ms=time_ms,
        nonce=nonce,
        received_ms=received_ms,
        body=body,
        encoding=encoding,
        content=content,
        arrived=batch.read(content, server_ms=received_ms),
    )
    stored = await gateway.store.run(
        partial(ingest.put, incoming=incoming, quarantine_bytes=limits.quarantine_bytes)
    )
    metrics = gateway.metrics
    metrics.accepted.inc(stored.accepted)
    metrics.duplicates.inc(stored.duplicates)
    metrics.quarantined.inc(len(stored.faults))
    metrics.acknowledged_s.observe(time.perf_counter() - started_s)
    apart = tuple(Quarantined(index=fault.index, reason=fault.reason) for fault in stored.faults)
    return answer(
        Receipt(
            accepted=stored.accepted, duplicates=stored.duplicates, quarantined=apart, server_ms=received_ms
        )
    )


async def keep_sample(gateway: Gateway, request: Request) -> Response:
    """POST /v1/samples."""
    require_private(request)
    gateway.require_room()
    device, time_ms, nonce, body = await gateway.signed(request, most=gateway.limits.sample_bytes)
    sample, server_ms = samples.read(body), now_ms()
    name = await gateway.samples.keep(device, sample, time_ms=time_ms, nonce=nonce, now_ms=server_ms)
    return answer(SampleReceipt(sha256=name, server_ms=server_ms), 201)


async def delete_samples(gateway: Gateway, request: Request) -> Response:
    """DELETE /v1/samples."""
    device, time_ms, nonce, _ = await gateway.signed(request, most=0)
    server_ms = now_ms()
    count = await gateway.samples.delete(device, time_ms=time_ms, nonce=nonce, now_ms=server_ms)
    return answer(SamplesDeleted(samples=count, server_ms=server_ms))


async def classify(gateway: Gateway, request: Request) -> Response:
    """POST /v1/classify: the image is answered and not kept."""
    require_private(request)
    device, time_ms, nonce, body = await gateway.signed(request, most=gateway.limits.sample_bytes)
    limited(gateway.classifications, device.device)
    sample = samples.read(body)
    await gateway.store.run(partial(devices.claim, device=device.number, time_ms=time_ms, nonce=nonce))
    found = await gateway.cloud.classify(sample.image_png)
    return answer(
        Classified(
            index=found.index,
            label=found.label,
            confidence=found.confidence,
            model=found.model,
            server_ms=now_ms(),
        )
    )


def require_private(request: Request) -> None:
    """Refuse raw inputs that others could read on the way.

    Raises:
        Refusal: 403.
    """
    if request.url.scheme != "https" and not is_local(request):
        raise Refusal(
            403,
            "transport",
            "a raw input over plain HTTP",
            allowed="HTTPS",
            next_step="keep the image on the device until the gateway has TLS",
        )


def require_operator(gateway: Gateway, request: Request) -> None:
    """Refuse the operator's pages to others than this machine, and to pages that lead its browser here.

    Raises:
        Refusal: 403.
    """
    host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
    if not gateway.settings.open_pages and not (is_local(request) and host in _LOCAL_NAMES):
        raise Refusal(
            403,
            "operator",
            "a page of the operator",
            allowed="requests from the gateway's own machine, by its loopback address",
            next_step="open it there, through a tunnel, or start the gateway with --open-pages",
        )


async def fleet_page(gateway: Gateway, request: Request) -> Response:
    """GET /."""
    require_operator(gateway, request)
    headers = {
        "Content-Security-Policy": page.POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    return Response(await gateway.page(), headers=headers, media_type="text/html; charset=utf-8")


async def repository_file(gateway: Gateway, request: Request) -> Response:
    """GET /repository/..."""
    return await gateway.repository.answer(request, request.path_params["path"])


async def health(gateway: Gateway, request: Request) -> Response:  # noqa: ARG001  # as every handler
    """GET /healthz: 200 while windows would be taken in."""
    gateway.require_room()
    return Response(b'{"ok": true}', media_type="application/json")


async def metrics(gateway: Gateway, request: Request) -> Response:
    """GET /metrics."""
    require_operator(gateway, request)
    read, measured = gateway.store.read, gateway.metrics
    measured.waiting.set(gateway.store.waiting)
    measured.commits.set(gateway.store.groups)
    measured.free_bytes.set(gateway.free_bytes)
    measured.devices.set(read.execute("SELECT count(*) FROM devices").fetchone()[0])
    (pending,) = read.execute(
        "SELECT max(0, (SELECT coalesce(max(id), 0) FROM batches) - value) FROM progress"
        " WHERE name = 'compacted_through'"
    ).fetchone()
    measured.pending.set(pending)
    return Response(measured.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def answer(record: Any, status: int = 200) -> Response:
    """A record of wire.py as JSON."""
    return Response(msgspec.json.encode(record), status, media_type="application/json")


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/enrol", enrol),
    ("POST", "/v1/windows", windows),
    ("POST", "/v1/samples", keep_sample),
    ("DELETE", "/v1/samples", delete_samples),
    ("POST", "/v1/classify", classify),
    ("GET", "/", fleet_page),
    ("GET", "/repository/{path:path}", repository_file),
    ("GET", "/healthz", health),
    ("GET", "/metrics", metrics),
)


def create_app(settings: Settings) -> FastAPI:
    """The ASGI application of one state folder.

    Raises:
        sqlite3.Error: at startup, when the state cannot be opened.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        gateway = app.state.gateway = Gateway(settings)
        running = [asyncio.create_task(gateway.tidy()), asyncio.create_task(gateway.compact())]
        yield
        await gateway.close(running)

    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    for method, path, handler in ROUTES:
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        # Starlette's routes: a handler reads its raw request, there is nothing for FastAPI to inject.
        app.router.add_route(path, _served(app, handler), methods=methods)
    app.add_exception_handler(HTTPException, _no_such_route)
    app.add_exception_handler(Exception, _bug)
    return app


def _served(app: FastAPI, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        gateway: Gateway = app.state.gateway
        try:
            return await handler(gateway, request)
        except Refusal as refusal:
            gateway.metrics.refused.labels(refusal.code).inc()
            if refusal.status != 408:  # whom that waited for already
                await drain(request)
            return refusal.response(close=refusal.status in (408, 413))
        except sqlite3.Error as error:
            gateway.metrics.refused.labels("disk").inc()
            return unavailable("disk", f"the store: {error}").response(close=True)
        except ClientDisconnect:
            return Response(status_code=_DISCONNECTED)

    return endpoint


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    await drain(request)
    return Refusal(
        error.status_code,
        "method" if error.status_code == 405 else "not_found",
        f"{request.method} {shown(request.url.path)}",
        allowed=", ".join(f"{method} {path}" for method, path, _ in ROUTES),
        next_step="ask for one of these",
    ).response(close=True)


async def _bug(_request: Request, _error: Exception) -> Response:
    """What nobody raised on purpose: the traceback is in the gateway's log, not in the answer."""
    return Refusal(
        500,
        "internal",
        "an error of the gateway itself",
        allowed="none",
        next_step="send it again later; the operator finds the cause in the gateway's log",
    ).response(close=True)
