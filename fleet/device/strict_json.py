"""Strict JSON: bytes from outside become a frozen dataclass, or one UserError says where they are wrong.

Nothing is guessed, dropped or converted, but for an integer where a number is meant. Dicts keep the order
they were written in, because in some of them (`Policy.tier_of`) the first entry that fits wins.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fleet.device.errors import UserError

MOST_BYTES = 1 << 20
_MOST_DEPTH, _MOST_ITEMS, _MOST_INTEGER = 16, 100_000, 2**53

T = TypeVar("T")


class _WrongError(Exception):
    def __init__(self, where: str, got: str, allowed: str) -> None:
        super().__init__(where, got, allowed)
        self.where, self.got, self.allowed = where, got, allowed


def read_json(
    kind: type[T], data: bytes, *, what: str, schema: int | None = None, most_bytes: int = MOST_BYTES
) -> T:
    """The record of dataclass `kind` in `data`.

    Args:
        kind: A dataclass of scalars, literals, tuples, dicts with string keys, dataclasses and `X | None`.
        data: UTF-8 JSON.
        what: The file's name, for the error.
        schema: The value that the field `schema` must have; looked at before any other field.
        most_bytes: Longest that is looked at.

    Raises:
        UserError: anything else than exactly such a record.
    """
    try:
        value = _loaded(data, most_bytes)
        if schema is not None and isinstance(value, dict):
            said = value.get("schema")
            if type(said) is not int or said != schema:
                raise _WrongError("schema", _shown(said), str(schema))  # noqa: TRY301 - one way out
        record: T = _value(kind, value, "", 0)
    except _WrongError as error:
        raise UserError(
            f"{what}: {error.where or 'the whole'} = {error.got}",
            allowed=error.allowed,
            next_step=f"write {what} anew with this version of edgeloop",
        ) from error
    return record


def json_bytes(record: Any) -> bytes:
    """A dataclass as compact JSON, fields and dicts in their order: the same record, the same bytes."""
    text = json.dumps(asdict(record), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def _loaded(data: bytes, most_bytes: int) -> Any:
    if len(data) > most_bytes:
        raise _WrongError("", f"{len(data)} bytes", f"at most {most_bytes}")
    try:
        return json.loads(
            data.decode("utf-8", "strict"), object_pairs_hook=_unique, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise _WrongError("", f"no JSON ({str(error)[:200]})", "UTF-8 JSON, not nested deeply") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _WrongError(_shown(pairs[-1][0]), "an object with a key twice", "every key once")
    return found


def _no_constant(name: str) -> Any:
    raise _WrongError("", name, "finite numbers")


def _value(kind: Any, value: Any, where: str, depth: int) -> Any:
    """`value` as `kind`; `where` is its path in the file."""
    if depth > _MOST_DEPTH:
        raise _WrongError(where, "nested too deeply", f"at most {_MOST_DEPTH} levels")
    origin = get_origin(kind)
    if is_dataclass(kind) and isinstance(kind, type):
        return _record(kind, value, where, depth)
    if origin in (Union, UnionType):
        others = [k for k in get_args(kind) if k is not NoneType]
        return None if value is None else _value(others[0], value, where, depth)
    if origin is tuple:
        return tuple(_items(get_args(kind)[0], value, where, depth))
    if origin is dict:
        return _mapping(get_args(kind), value, where, depth)
    if origin is Literal:
        if not isinstance(value, str) or value not in get_args(kind):
            raise _WrongError(where, _shown(value), ", ".join(get_args(kind)))
        return value
    return _scalar(kind, value, where, depth)


def _record(kind: Any, value: Any, where: str, depth: int) -> Any:
    if not isinstance(value, dict):
        raise _WrongError(where, _shown(value), "an object")
    hints, names = _hints(kind), {field.name for field in fields(kind)}
    if set(value) != names:
        missing, unknown = sorted(names - set(value)), sorted(set(value) - names)
        raise _WrongError(
            where, f"an object without {missing} and with {_shown(unknown)}", f"exactly {sorted(names)}"
        )
    return kind(**{name: _value(hints[name], value[name], _inside(where, name), depth + 1) for name in names})


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _items(kind: Any, value: Any, where: str, depth: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MOST_ITEMS:
        raise _WrongError(where, _shown(value), f"a list of at most {_MOST_ITEMS}")
    return [_value(kind, item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]


def _mapping(kinds: tuple[Any, ...], value: Any, where: str, depth: int) -> dict[Any, Any]:
    if not isinstance(value, dict) or len(value) > _MOST_ITEMS:
        raise _WrongError(where, _shown(value), f"an object of at most {_MOST_ITEMS}")
    return {
        _value(kinds[0], key, where, depth + 1): _value(kinds[1], item, _inside(where, key), depth + 1)
        for key, item in value.items()
    }


def _scalar(kind: Any, value: Any, where: str, depth: int) -> Any:
    if kind is Any:
        return _anything(value, where, depth)
    checks: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
        str: (lambda v: isinstance(v, str) and _encodes(v), "text"),
        bool: (lambda v: isinstance(v, bool), "true or false"),
        int: (lambda v: type(v) is int and abs(v) <= _MOST_INTEGER, "an integer below 2^53"),
        float: (_is_number, "a finite number"),
    }
    fits, allowed = checks[kind]
    if not fits(value):
        raise _WrongError(where, _shown(value), allowed)
    return float(value) if kind is float else value


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return abs(value) <= _MOST_INTEGER
    return isinstance(value, float) and math.isfinite(value)


def _anything(value: Any, where: str, depth: int) -> Any:
    """A record that somebody else reads: plain JSON within the same bounds."""
    if isinstance(value, dict):
        return _mapping((str, Any), value, where, depth)
    if isinstance(value, list):
        return _items(Any, value, where, depth)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _scalar(str, value, where, depth)
    if not _is_number(value):
        raise _WrongError(where, _shown(value), "a finite number")
    return value


def _encodes(text: str) -> bool:
    """No half of a surrogate pair, which JSON can write and UTF-8 cannot."""
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


def _inside(where: str, name: str) -> str:
    return f"{where}.{name[:60]}" if where else name[:60]


def _shown(value: Any) -> str:
    text = ascii(value) if not isinstance(value, int) or abs(value) <= _MOST_INTEGER else "a huge integer"
    return text if len(text) <= 80 else text[:77] + "..."
