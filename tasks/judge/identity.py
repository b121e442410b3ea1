"""Whether the evidence speaks of the files that lie there: model bytes, and preprocessing."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from tasks.judge.check import About, Check, Verdict

_DIGITS = 12  # of a SHA-256, as a person compares them
_SHA256 = re.compile("[0-9a-f]{64}")
_MOST_LETTERS = 80


@dataclass(frozen=True, kw_only=True)
class Said:
    """What one source says about a model file, beside what is so; compared whole, shown short."""

    source: str
    said: str | None
    """None where the source says nothing."""
    found: str

    TOP1_ROUNDING: ClassVar[float] = 1e-9
    """One image more or fewer is a much larger difference."""

    @classmethod
    def digest(cls, source: str, said: object, found: str) -> "Said":
        """A SHA-256 that a source gives."""
        return cls(source=source, said=None if said is None else str(said), found=found)

    @classmethod
    def bytes(cls, source: str, said: int | None, found: int) -> "Said":
        """A file size that a source gives."""
        return cls(source=source, said=None if said is None else f"{said} bytes", found=f"{found} bytes")

    @classmethod
    def images(cls, source: str, said: int | None, found: int) -> "Said":
        """A number of test images that a source holds."""
        return cls(source=source, said=None if said is None else f"{said} images", found=f"{found} images")

    @classmethod
    def top1(cls, source: str, said: float | None, found: float) -> "Said":
        """An accuracy that a source comes to."""
        same = said is not None and abs(said - found) <= cls.TOP1_ROUNDING
        return cls(
            source=source,
            said=None if said is None else f"top-1 {found if same else said}",
            found=f"top-1 {found}",
        )


def bytes_check(variant: str, statements: Sequence[Said], *, exists: bool) -> Check:
    """Card and reports speak of the model file that lies there; those that say nothing prove nothing."""
    wrong = [s for s in statements if s.said not in (None, s.found)] if exists else []
    silent = [s for s in statements if s.said is None]
    reasons = [f"{s.source} is about {_short(s.said)}, not {_short(s.found)}" for s in wrong]
    reasons += [f"{s.source} says nothing about this file" for s in silent]
    if not exists:
        reasons = [f"there is no models/mnn/{variant}/model.mnn"]
    verdict: Verdict = "fail" if wrong or not exists else "not measured" if silent else "pass"
    return Check(
        name=f"{variant}: evidence is about this file",
        measured=len(wrong) if exists else None,
        threshold=0,
        unit="sources about another",
        n=len(statements),
        verdict=verdict,
        evidence="; ".join(reasons) or ", ".join(s.source for s in statements),
    )


def _short(said: str | None) -> str:
    """A SHA-256 as a person compares it; anything else as it is, within reason."""
    text = str(said)
    return text[:_DIGITS] if _SHA256.fullmatch(text) else text[:_MOST_LETTERS]


def engine_check(device: str, probed: Mapping[str, Any], cards: Mapping[str, Mapping[str, Any]]) -> Check:
    """What ran on a device is the engine the models were converted for and proven in."""
    ran = probed.get("engine_version")
    proven = {name: card.get("engine_version") for name, card in cards.items()}
    wrong = [name for name, engine in proven.items() if engine not in (None, ran)] if ran else []
    silent = [f"the card of {name}" for name, engine in proven.items() if engine is None]
    silent += [] if ran else [f"probe/{device}.json"]
    reasons = [f"{name} was proven in {str(proven[name])[:_MOST_LETTERS]}" for name in wrong]
    reasons += [f"{source} names no engine" for source in silent]
    return Check(
        name=f"engine on {device}",
        measured=len(wrong),
        threshold=0,
        unit="models of another engine",
        n=len(cards),
        verdict="fail" if wrong else "not measured" if silent else "pass",
        evidence="; ".join((f"probe/{device}.json: {str(ran)[:_MOST_LETTERS]}", *reasons)),
    )


def preprocess_check(card: Mapping[str, Any], parity: About) -> Check:
    """The card's preprocessing hashes to the card's digest, and is what the test images went through."""
    wrong, silent, digest = [], [], ""
    try:
        digest = Preprocess.from_dict(card["preprocess"]).digest()
    except KeyError:
        silent.append("card.json has no preprocess record")
    except (UserError, TypeError, AttributeError) as error:
        wrong.append(f"card.json: {getattr(error, 'got', error)}")
    for source, said in (
        ("card.json", card.get("preprocess_sha256")),
        ("parity.json", parity.text("preprocess_sha256")),
    ):
        if said is None:
            silent.append(f"{source} names no preprocessing")
        elif digest and said != digest:
            wrong.append(f"{source} names {str(said)[:_DIGITS]}, the card's record is {digest[:_DIGITS]}")
    return Check(
        name=f"{parity.variant}: preprocessing is the proven one",
        measured=len(wrong),
        threshold=0,
        unit="sources of another",
        n=2,
        verdict="fail" if wrong else "not measured" if silent else "pass",
        evidence="; ".join((*wrong, *silent)) or f"card.json and parity.json name {digest[:_DIGITS]}",
    )
