"""Every answer that is an error: a status and `{"error": {code, got, allowed, next_step}}`."""

import json
from typing import Any

from starlette.responses import Response

_SHOWN = 120
"""Characters of a client's own text that an error repeats."""


class Refusal(Exception):  # noqa: N818  # what it is called: nothing of ours failed
    """A request that is not served, and what its sender can do about it."""

    def __init__(
        self, status: int, code: str, got: str, *, allowed: str, next_step: str, **more: int | str
    ) -> None:
        """Keep the parts.

        Args:
            status: Of HTTP.
            code: A word that programs decide by.
            got: What was found; never a secret.
            allowed: What would have been accepted.
            next_step: What the sender should do.
            more: Further fields of the error; `retry_after_s` becomes a header as well.
        """
        super().__init__(code)
        self.status, self.code = status, code
        self.error: dict[str, Any] = {
            "code": code,
            "got": got,
            "allowed": allowed,
            "next_step": next_step,
            **more,
        }

    def body(self) -> bytes:
        """The JSON of the answer."""
        return json.dumps({"error": self.error}).encode()

    def response(self, *, close: bool = False) -> Response:
        """The answer; `close` when the request's body was not read to its end."""
        headers = {"Connection": "close"} if close else {}
        if "retry_after_s" in self.error:
            headers["Retry-After"] = str(self.error["retry_after_s"])
        return Response(self.body(), self.status, headers, media_type="application/json")


def shown(text: str) -> str:
    """A client's text as an error may repeat it: short, and nothing a terminal would obey."""
    kept = "".join(c if c.isprintable() else "?" for c in text[:_SHOWN])
    return kept + "..." if len(text) > _SHOWN else kept


def too_large(what: str, most: int) -> Refusal:
    """413."""
    return Refusal(
        413,
        "too_large",
        f"{what} of more than {most} bytes",
        allowed=f"at most {most} bytes",
        next_step="send fewer windows in a batch",
    )


def unavailable(code: str, got: str) -> Refusal:
    """503: nothing of the request was kept, it may come again."""
    return Refusal(
        503,
        code,
        got,
        allowed="a gateway that can store",
        next_step="send the same again later: nothing of it was stored",
        retry_after_s=30,
    )
