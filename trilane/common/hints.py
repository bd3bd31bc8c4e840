"""Type hints: constraints that they carry, the fields of a class, and types in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

_WORDS: Mapping[Any, str] = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null",
    Mapping: "a mapping (`key: value`)",
}
_IN_CELLS: Mapping[Any, str] = {**_WORDS, bool: "yes or no", NoneType: "an empty cell"}


class Constraint(NamedTuple):
    """A condition on values of the right type. ``words`` follow those of the type: "a whole number" + ">= 1"."""

    words: str
    holds: Callable[[Any], bool]


def at_least(minimum: float) -> Constraint:
    """The number is ``minimum`` or more."""
    return Constraint(f">= {minimum:g}", lambda value: value >= minimum)


def at_most(maximum: float) -> Constraint:
    """The number is ``maximum`` or less."""
    return Constraint(f"<= {maximum:g}", lambda value: value <= maximum)


def above(limit: float) -> Constraint:
    """The number is more than ``limit``."""
    return Constraint(f"above {limit:g}", lambda value: value > limit)


def between(low: float, high: float) -> Constraint:
    """The number is from ``low`` to ``high``, both included."""
    return Constraint(f"from {low:g} to {high:g}", lambda value: low <= value <= high)


NOT_EMPTY = Constraint("that is not empty", bool)
ASCENDING = Constraint("in ascending order", lambda values: all(a < b for a, b in pairwise(values)))
Count = Annotated[int, at_least(1)]
Share = Annotated[float, between(0, 1)]
Name = Annotated[str, Constraint("of at most 300 printable characters", lambda s: len(s) <= 300 and s.isprintable())]


@cache
def hints_of(kind: Any) -> Mapping[str, Any]:
    """The type hint of every field of a dataclass or NamedTuple, with its constraints."""
    plain: Any = get_origin(kind) or kind
    bound = dict(zip(getattr(plain, "__parameters__", ()), get_args(kind), strict=False))
    hints = get_type_hints(plain, include_extras=True)
    return {name: bound.get(hints[name], hints[name]) for name in field_names(plain)}


@cache
def field_names(kind: Any) -> tuple[str, ...]:
    """The names of the fields of a dataclass or NamedTuple, whose types need not be imported."""
    return tuple(f.name for f in fields(kind) if f.init) if is_dataclass(kind) else kind._fields


def plain_types(hint: Any) -> frozenset[type]:
    """The types of single values that a hint allows, in lists too but not in mappings: of ``Count | None``, int."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return frozenset(map(type, parts))
    if origin is Annotated:
        return plain_types(parts[0])
    if origin in (Union, UnionType, tuple, list, Sequence):
        return frozenset[type]().union(*(plain_types(part) for part in parts if part is not Ellipsis)) - {NoneType}
    return frozenset({hint} if isinstance(hint, type) else ())


@cache
def in_words(hint: Any, cell: bool = False) -> str:
    """A type as a user would write it: "a whole number >= 1 or null"; ``cell``: in a table."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        notes = " and ".join(note.words for note in parts[1:] if isinstance(note, Constraint))
        return f"{in_words(parts[0], cell)} {notes}"
    if origin in (Union, UnionType):
        return " or ".join(in_words(part, cell) for part in sorted(parts, key=lambda part: part is NoneType))
    if origin is Literal or is_enum(hint):
        *first, last = [repr(part.value if isinstance(part, Enum) else part) for part in parts or hint]
        return f"{', '.join(first)} or {last}" if first else last
    if is_record(hint):
        keys = ", ".join(hints_of(hint))
        return f"a mapping with the keys {keys}" if len(keys) < 80 else _WORDS[Mapping]
    if origin in (tuple, list, Sequence):
        fixed = origin is tuple and Ellipsis not in parts
        return f"a list of {len(parts)}" if fixed else f"a list (each {in_words(parts[0], cell)})"
    return (_IN_CELLS if cell else _WORDS).get(origin or hint) or str(getattr(hint, "__name__", hint))


@cache
def is_record(hint: Any) -> bool:
    """True for a dataclass or a NamedTuple."""
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields"))


def is_enum(hint: Any) -> bool:
    """True for an enumeration."""
    return isinstance(hint, type) and issubclass(hint, Enum)
