"""Dataclasses from plain values and back, by their type hints: every key, type and bound is checked.

A hint may carry constraints, such as ``Annotated[int, at_least(1)]`` (``trilane.common.hints``). Written here rather
than taken from a library: importing pydantic takes 0.09 s of the 0.2 s in which the command line starts, and no library
suggests the key that was probably meant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, overload

from trilane.common.errors import ErrorClass, TrilaneError
from trilane.common.hints import Constraint, field_names, hints_of, in_words, is_enum, is_record
from trilane.common.names import unknown
from trilane.common.quoting import quoted

T = TypeVar("T")
_EXPONENT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")  # YAML 1.1 reads 25e9 as text
_UNWRITABLE = re.compile(r"[\0\ud800-\udfff]")  # not in UTF-8, or in no name of a file


class SchemaError(TrilaneError):
    """A value that its type hint does not allow; the message has the path to it, such as ``gpu.memory_bytes``."""


@overload
def from_dict(hint: type[T], values: object, where: str = ..., error: ErrorClass = ..., *, cells: bool = ...) -> T: ...
@overload
def from_dict(hint: Any, values: object, where: str = ..., error: ErrorClass = ..., *, cells: bool = ...) -> Any: ...
def from_dict(
    hint: Any, values: object, where: str = "", error: ErrorClass = SchemaError, *, cells: bool = False
) -> Any:
    """A value of the type ``hint`` from plain values, as YAML or JSON gives them.

    ``hint``: a dataclass or NamedTuple, which may be generic, or mappings, tuples and unions of such. Lists become
    tuples, whole numbers floats where one is expected, and texts such as 25e9 numbers. What is an instance of its class
    already is kept. ``where`` begins the message; ``cells``: it speaks of a table. Raises ``error``.
    """
    try:
        return _read(hint, values, "", False)
    except _FaultError as fault:
        raise error(": ".join(filter(None, (where, fault.path, fault.problem(cells))))) from None


def check(instance: Any, error: ErrorClass = SchemaError) -> None:
    """For ``__post_init__``: raise ``error`` where a field does not match its hint. Nothing is converted."""
    try:
        kind = _class(instance)
        may_lack = _may_be_none(kind)
        for name, hint in hints_of(kind).items():
            value = getattr(instance, name)
            if value is not None or name not in may_lack:
                _read(hint, value, name, True)
    except _FaultError as fault:
        raise error(f"{fault.path}: {fault.problem()}") from None


@cache
def _may_be_none(kind: type) -> frozenset[str]:
    """Names of the fields that may be None."""
    return frozenset(name for name, hint in hints_of(kind).items() if NoneType in get_args(hint))


def to_dict(instance: object, *, nulls: bool = True) -> dict[str, Any]:
    """The plain values of a dataclass or a mapping, ready for YAML and JSON; ``from_dict`` is the inverse.

    ``nulls``: whether fields that are None are written.
    """
    values: dict[str, Any] = _plain(instance, nulls)
    return values


# --- reading ----------------------------------------------------------------------------------------------------------


class _FaultError(Exception):
    """(path, what is wrong there)."""

    @property
    def path(self) -> str:
        return str(self.args[0])

    def problem(self, cells: bool = False) -> str:
        return str(self.args[1])


class _MismatchError(_FaultError):
    """(path, hint, value): a value that is not of its type. It is put into words only if it is told: a union tries one
    part after another."""

    def problem(self, cells: bool = False) -> str:
        _, hint, value = self.args
        return f"expected {in_words(hint, cells)}, got {'null' if value is None else quoted(value)}"


def _read(hint: Any, value: Any, path: str, exact: bool) -> Any:
    """``value`` as a ``hint``; converted where nothing is lost, unless ``exact``. Raises _FaultError."""
    origin = get_origin(hint)
    if reader := _READERS.get(origin or hint):
        return reader(hint, value, path, exact)
    if not exact and is_record(hint) and isinstance(value, Mapping):
        return _record(hint, value, path)
    if not exact and is_enum(hint):
        value = next((member for member in hint if member.value == value), value)
    if isinstance(value, origin or hint):
        return value
    raise _MismatchError(path, hint, value)


def _annotated(hint: Any, value: Any, path: str, exact: bool) -> Any:
    plain, *notes = get_args(hint)
    try:
        read = _read(plain, value, path, exact)
    except _MismatchError as fault:
        raise fault if fault.path != path else _MismatchError(path, hint, value) from None
    if all(note.holds(read) for note in notes if isinstance(note, Constraint)):
        return read
    raise _MismatchError(path, hint, value)


def _union(hint: Any, value: Any, path: str, exact: bool) -> Any:
    """The first part that takes the value as it stands, or else converted."""
    if value is None and NoneType in get_args(hint):
        return None
    for strictly in (True,) if exact else (True, False):
        for part in get_args(hint):
            try:
                return _read(part, value, path, strictly)
            except _MismatchError as fault:
                if strictly == exact and fault.path != path:
                    raise  # the value is of this part, but for something in it
    raise _MismatchError(path, hint, value)


def _literal(hint: Any, value: Any, path: str, exact: bool) -> Any:
    if any(type(value) is type(choice) and value == choice for choice in get_args(hint)):
        return value
    raise _MismatchError(path, hint, value)


def _number(hint: Any, value: Any, path: str, exact: bool) -> int | float:
    given = float(value) if not exact and isinstance(value, str) and _EXPONENT.fullmatch(value) else value
    allowed = (int, float) if hint is float or not exact else int
    with suppress(OverflowError, ValueError):  # infinite or not a number, or too large for a float
        number: int | float = hint(given) if isinstance(given, allowed) and not isinstance(given, bool) else math.nan
        if math.isfinite(number) and (hint is float or number == given):
            if isinstance(number, int) and not -(2**63) <= number < 2**63:  # no table could hold it
                raise _FaultError(path, "expected a whole number of at most 64 bits, got a larger one")
            return number
    raise _MismatchError(path, hint, value)


def _text(hint: Any, value: Any, path: str, exact: bool) -> str:
    if not isinstance(value, str):
        raise _MismatchError(path, hint, value)
    if _UNWRITABLE.search(value):
        raise _FaultError(path, "expected text without NUL and without characters that UTF-8 lacks")
    return value


def _any(hint: Any, value: Any, path: str, exact: bool) -> Any:
    """Any value of which the numbers and texts are such as other hints allow, and keys are texts, as in JSON."""
    if isinstance(value, Mapping):
        for key, given in value.items():
            _text(str, key, path, exact)
            _any(hint, given, _join(path, key), exact)
    elif isinstance(value, list | tuple):
        for place, given in enumerate(value):
            _any(hint, given, f"{path}[{place}]", exact)
    elif isinstance(value, str):
        _text(str, value, path, exact)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _number(int if isinstance(value, int) else float, value, path, exact)
    return value


def _mapping(hint: Any, value: Any, path: str, exact: bool) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise _MismatchError(path, hint, value)
    keys, values = get_args(hint)
    pairs = ((key, given, _join(path, key)) for key, given in value.items())
    return {_read(keys, key, inner, exact): _read(values, given, inner, exact) for key, given, inner in pairs}


def _sequence(hint: Any, value: Any, path: str, exact: bool) -> Sequence[Any]:
    origin, parts = get_origin(hint), get_args(hint)
    if isinstance(value, str) or not isinstance(value, origin if exact else list | tuple):
        raise _MismatchError(path, hint, value)
    hints = parts if origin is tuple and parts[-1] is not Ellipsis else parts[:1] * len(value)
    if len(hints) != len(value):
        raise _MismatchError(path, hint, value)
    items = (_read(one, given, f"{path}[{i}]", exact) for i, (one, given) in enumerate(zip(hints, value, strict=True)))
    return list(items) if origin is list else tuple(items)


def _record(hint: Any, value: Mapping[str, Any], path: str) -> Any:
    """A dataclass or NamedTuple from a mapping."""
    kind, hints = get_origin(hint) or hint, hints_of(hint)
    for key in value:
        if key not in hints:
            raise _FaultError(path, unknown("key", str(key), hints))
    if missing := [name for name in _required(kind) if name not in value]:
        raise _FaultError(path, f"missing key{'s' * (len(missing) > 1)}: {', '.join(missing)}")
    read = {name: _read(hints[name], given, _join(path, name), False) for name, given in value.items()}
    try:
        return kind(**read)
    except TrilaneError as error:  # a rule that concerns several fields
        raise _FaultError(path, str(error)) from None


def _required(kind: Any) -> list[str]:
    if not is_dataclass(kind):
        return [name for name in kind._fields if name not in kind._field_defaults]
    return [f.name for f in fields(kind) if f.init and f.default is MISSING and f.default_factory is MISSING]


_READERS: Mapping[Any, Callable[[Any, Any, str, bool], Any]] = {
    Annotated: _annotated, Union: _union, UnionType: _union, Literal: _literal, int: _number, float: _number,
    str: _text, Mapping: _mapping, tuple: _sequence, list: _sequence, Sequence: _sequence, Any: _any,
}


def _class(instance: object) -> Any:
    return type(instance)


def _join(path: str, key: object) -> str:
    name = str(key) if len(str(key)) <= 80 else quoted(key)
    return f"{path}.{name}" if path else name


def _plain(value: Any, nulls: bool) -> Any:
    if isinstance(value, Enum):
        return value.value
    if is_record(kind := _class(value)):
        value = {name: part for name in field_names(kind) if (part := getattr(value, name)) is not None or nulls}
    if isinstance(value, Mapping):
        return {_plain(key, nulls): _plain(part, nulls) for key, part in value.items()}
    return [_plain(part, nulls) for part in value] if isinstance(value, tuple | list) else value
