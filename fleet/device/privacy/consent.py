"""Whether the user lets raw inputs leave the device: no, unless a file says yes.

In the folder (mode 0700) lie

    consent.json    what the user decided last; nobody else writes it
    samples.sent    the gateway may have samples of this device
    erase.first     they are to be erased before others are sent: consent had ended, and was given again
    samples/        what waits to be sent

The file is read whenever it is asked, so that a revocation by another process counts at once. Whatever is not
exactly a file of this user that says yes is no consent. Nothing here compares times: a wrong clock changes no
decision.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from fleet.device.durable import sync, write_durably
from fleet.device.errors import UserError
from fleet.device.privacy.own_file import read_own, require_own

CONSENT, SAMPLES = "consent.json", "samples"
SENT, _ERASE_FIRST = "samples.sent", "erase.first"
_SCHEMA = 1
_MOST_BYTES = 4096
_MOST_TEXT = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ConsentState:
    """What holds now."""

    granted: bool
    at_ms: int | None
    """When it was decided, on the device's clock; None where nobody did."""
    text_version: str
    """Of the text that the user was shown."""
    why: str = ""
    """Why it is not granted, if nobody revoked it."""


class Consent:
    """The consent of this device's user. Threads and processes may share its folder."""

    def __init__(self, folder: Path) -> None:
        """Nothing is written before somebody decides."""
        self.folder = folder
        self._revoked_here = False

    def state(self) -> ConsentState:
        """What holds now; never raises."""
        try:
            state = _read(self.folder)
        except FileNotFoundError:
            return _no("nobody was asked")
        except (OSError, ValueError, RecursionError) as error:
            return _no(f"{CONSENT}: {error}")
        if self._revoked_here and state.granted:
            return _no("revoked, which could not be written")
        return state

    def holds(self) -> bool:
        """Whether raw inputs may leave now."""
        return self.state().granted

    def grant(self, text_version: str, at_ms: int) -> None:
        """The user said yes to this version of the text.

        Raises:
            UserError: no version, or it cannot be kept: then nothing has changed.
        """
        if not 0 < len(text_version) <= _MOST_TEXT:
            raise UserError(
                f"consent to a text with version {text_version[:20]!r}",
                allowed=f"the version of the text that was shown, 1 to {_MOST_TEXT} characters",
                next_step="name the text",
            )
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            if self.erasure_is_due():
                write_durably(self.folder / _ERASE_FIRST, b"")
            _write(self.folder, ConsentState(granted=True, at_ms=at_ms, text_version=text_version))
        except OSError as error:
            raise UserError(
                f"consent cannot be kept in {self.folder}: {error.strerror or error}",
                allowed="a folder of this user on a disk with room",
                next_step="make room and ask again; until then nothing is collected",
            ) from error
        self._revoked_here = False

    def revoke(self, at_ms: int) -> None:
        """The user said no: effective at once, also on a full disk; what waits to be sent is deleted.

        The gateway is asked to delete by whoever sends samples (`erasure_is_due`).

        Raises:
            UserError: it cannot be written (a read-only disk); this process obeys it all the same.
        """
        version = self.state().text_version
        self._revoked_here = True
        try:
            try:
                _write(self.folder, ConsentState(granted=False, at_ms=at_ms, text_version=version))
            except OSError:  # no room to say when: to say no takes none
                (self.folder / CONSENT).unlink(missing_ok=True)
                sync(self.folder)
            purge(self.folder)
        except FileNotFoundError:
            return  # no folder: nothing was ever granted
        except OSError as error:
            raise UserError(
                f"the revocation cannot be written to {self.folder}: {error.strerror or error}",
                allowed="a folder that can be written",
                next_step=f"remove {self.folder / CONSENT} and {self.folder / SAMPLES}",
            ) from error

    def erasure_is_due(self) -> bool:
        """Whether the gateway is to delete what it has of this device."""
        sent = os.path.lexists(self.folder / SENT)
        return os.path.lexists(self.folder / _ERASE_FIRST) or (sent and not self.holds())

    def sending(self) -> None:
        """The gateway is about to get a sample. Before its first byte, by the thread that sends and erases.

        Raises:
            OSError: it cannot be noted: then it must not be sent.
        """
        if not os.path.lexists(self.folder / SENT):
            write_durably(self.folder / SENT, b"")

    def erased(self) -> None:
        """The gateway has deleted everything. After its 2xx, by the thread that sends and erases.

        Raises:
            OSError: it cannot be noted; the gateway will be asked again.
        """
        for name in (SENT, _ERASE_FIRST):
            (self.folder / name).unlink(missing_ok=True)
        sync(self.folder)


def purge(folder: Path) -> None:
    """Delete every sample that waits, half-written ones too.

    Raises:
        OSError: one could not be deleted; the others are.
    """
    samples = folder / SAMPLES
    if samples.is_symlink():
        samples.unlink()  # not what it leads to: those are nobody's samples
        return
    failed: OSError | None = None
    paths = list(samples.iterdir()) if samples.is_dir() else []
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            failed = error
    if failed is not None:
        raise failed
    if paths:
        sync(samples)


def _no(why: str) -> ConsentState:
    return ConsentState(granted=False, at_ms=None, text_version="", why=why)


def _write(folder: Path, state: ConsentState) -> None:
    record = {name: value for name, value in asdict(state).items() if name != "why"}
    write_durably(folder / CONSENT, json.dumps({"schema": _SCHEMA, **record}).encode())


def _read(folder: Path) -> ConsentState:
    """What the file says.

    Raises:
        OSError: there is none, it is a link, or it cannot be read.
        ValueError: it is another user's, others may write it, or it says something else.
    """
    require_own(folder.stat(), others_may=0o055)
    content = read_own(folder / CONSENT, most_bytes=_MOST_BYTES, others_may=0o044)
    return _parsed(json.loads(content))


def _parsed(record: object) -> ConsentState:
    kinds = {"schema": int, "granted": bool, "at_ms": int, "text_version": str}
    if not isinstance(record, dict) or {key: type(value) for key, value in record.items()} != kinds:
        raise ValueError("not the record of a decision")
    if record.pop("schema") != _SCHEMA:
        raise ValueError("a record of another version")
    return ConsentState(**record)
