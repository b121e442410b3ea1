"""What a source offers: entries to read, and what it refused before a byte was decoded."""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from tasks.data.dataset import SplitName
from tasks.data.decode import DecodeRefusal

ListRefusal = Literal[
    "unreadable",
    "unsafe_name",
    "link",
    "special_file",
    "superseded",
    "hidden_file",
    "outside_class",
    "empty_class",
    "bad_line",
    "missing_file",
]
SplitRefusal = Literal["duplicate", "split_overlap", "label_conflict", "group_overlap"]
RefusalKind = ListRefusal | DecodeRefusal | SplitRefusal

REFUSAL_KINDS: tuple[RefusalKind, ...] = (
    *get_args(ListRefusal),
    *get_args(DecodeRefusal),
    *get_args(SplitRefusal),
)
# Left out on purpose and without loss: these say nothing about how sound the source is.
HARMLESS: frozenset[RefusalKind] = frozenset(
    {
        "superseded",
        "hidden_file",
        "outside_class",
        "empty_class",
        "duplicate",
        "split_overlap",
        "group_overlap",
    }
)


@dataclass(frozen=True)
class Refusal:
    """One file that is not in the dataset, and why."""

    name: str
    kind: RefusalKind
    reason: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One image a source offers."""

    name: str
    """Printable path inside the source."""
    read: Callable[[], bytes]
    """The file's bytes; raises OSError."""
    label: str | None
    """Class name; None where unknown."""
    split: SplitName | None = None
    """None where the source has no splits."""
    group: str = ""
    """Images of one group (a person, a session) never lie in two splits; empty: a group of its own."""


@dataclass(frozen=True)
class Listing:
    """Everything a source offers, in the order in which it reads fastest."""

    entries: list[Entry]
    refusals: list[Refusal]
    class_names: tuple[str, ...]
    """Every class of the source, in the order of its labels."""


def printable(name: str) -> str:
    """`name` as one line of text that UTF-8 can hold: control characters and undecodable bytes are escaped.

    Composed Unicode (NFC), because one name typed on two systems must not become two classes.
    """
    composed = unicodedata.normalize("NFC", name)
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in composed)


def group_of(name: str, pattern: re.Pattern[str] | None) -> str:
    """The group of a name: what `pattern` finds in it (its first parenthesis, if it has one), else empty."""
    match = pattern.search(name) if pattern else None
    return (match.group(min(1, match.re.groups)) or "") if match else ""
