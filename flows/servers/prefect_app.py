"""Prefect's server as edgeloop runs it: its pages may load nothing from, and tell nothing to, anybody else.

The newer of Prefect's two pages calls a service of its makers though the server's analytics are switched off;
browsers obey the header set here.
"""

from fastapi import FastAPI
from prefect.server.api import server
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'self' data: blob:; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; "
    "style-src 'self' 'unsafe-inline'; connect-src 'self' ws://127.0.0.1:* data: blob:; "
    "frame-ancestors 'self'"
)


class OwnSourcesOnly:
    """Adds the Content-Security-Policy to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer back with the header."""

        async def with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"content-security-policy", POLICY.encode()),
                ]
            await send(message)

        await self._app(scope, receive, with_policy)


def create_app() -> FastAPI:
    """The factory that uvicorn calls."""
    app = server.create_app()
    app.add_middleware(OwnSourcesOnly)
    return app
