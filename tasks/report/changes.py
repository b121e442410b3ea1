"""What differs between a build and the champion: parameters and files; they tell a reviewer where to look."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.champion import Champion
from tasks.report.evidence import Evidence

_NOTHING = "–"  # noqa: RUF001  # an en dash in an empty cell
_NOT_OF_A_MODEL = ("root",)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that is another now."""

    what: str
    then: str
    now: str


@dataclass(frozen=True, kw_only=True)
class Changes:
    """All of them; `params_known` is false of a champion whose parameters were not kept."""

    params: tuple[Change, ...]
    params_known: bool
    files: tuple[Change, ...]
    same_files: tuple[str, ...]
    """Variants whose file is the champion's own."""


def changes(evidence: Evidence) -> Changes | None:
    """What changed since the champion; None when there is none."""
    if evidence.champion is None:
        return None
    then, now = evidence.champion_params, evidence.params
    known = then is not None and now is not None
    files, same = _files(evidence, evidence.champion)
    return Changes(
        params=tuple(_differences(dict(_flat(then)), dict(_flat(now)))) if known else (),
        params_known=known,
        files=files,
        same_files=same,
    )


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """`section.key` to the value as text; lists are one value: their order matters."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            if prefix or key not in _NOT_OF_A_MODEL:
                yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, str(value)


def _differences(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Change]:
    for key in sorted({*then, *now}):
        before, after = then.get(key, _NOTHING), now.get(key, _NOTHING)
        if before != after:
            yield Change(what=key, then=before, now=after)


def _files(evidence: Evidence, champion: Champion) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    changed, same = [], []
    ours = {name: card.text("mnn_sha256") for name, card in evidence.cards.items()}
    for name in sorted({*ours, *champion.variants}):
        before = champion.variants.get(name)
        if before and ours.get(name) == before.mnn_sha256:
            same.append(name)
            continue
        size_bytes = evidence.convert.number(f"{name}/size_bytes") if name in ours else None
        changed.append(
            Change(
                what=name,
                then=_megabytes(before.size_bytes) if before else _NOTHING,
                now=_NOTHING if size_bytes is None else _megabytes(size_bytes),
            )
        )
    return tuple(changed), tuple(same)


def _megabytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e6:.2f} MB"
