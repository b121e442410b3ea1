"""A local record of every request: what tells a dead network from a refusal from a broken gateway.

One JSON object a line in `uploads.jsonl`, the newest last; the older half is `uploads.1.jsonl`.
"""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

MOST_BYTES = 128 * 1024
"""Of each of the two files: some 350 requests with long answers, more with short ones."""
Outcome = Literal["ok", "network", "4xx", "5xx", "serialisation"]
"""network: no answer, or one that is not the gateway's to give (a redirect); serialisation: an answer that is
no receipt."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request and what came of it."""

    time_ms: int
    """When it began, by the device's clock."""
    windows: int
    bytes: int
    """Of the body as sent."""
    status: int | None
    """Of HTTP; None without an answer."""
    outcome: Outcome
    duration_ms: float
    said: str = ""
    """What the system or the gateway said when it was not ok."""


class UploadLog:
    """The two files; belongs to one thread."""

    def __init__(self, path: Path) -> None:
        """Appends to `path`."""
        self._path, self._in_trouble = path, False

    def add(self, request: Request) -> None:
        """Write one line. Never raises: a full disk must not stop what makes room on it."""
        line = json.dumps(asdict(request)) + "\n"
        try:
            if self._path.exists() and self._path.stat().st_size + len(line) > MOST_BYTES:
                self._path.replace(self._path.with_name("uploads.1.jsonl"))
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)
            self._in_trouble = False
        except OSError as error:
            if not self._in_trouble:  # once, and not with every request
                _log.warning("%s cannot be written: %s", self._path, error)
            self._in_trouble = True


def read_log(folder: Path) -> list[Request]:
    """The requests of a monitor's folder, oldest first; lines cut off by a kill are left out."""
    paths = (folder / name for name in ("uploads.1.jsonl", "uploads.jsonl"))
    lines = [line for path in paths if path.exists() for line in path.read_bytes().splitlines()]
    return [request for line in lines if (request := _parsed(line)) is not None]


def _parsed(line: bytes) -> Request | None:
    try:
        return Request(**json.loads(line))
    except (ValueError, TypeError):
        return None
