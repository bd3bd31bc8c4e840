"""Reading of JSON: strict, plain values only, and no deeper than later code can follow."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from trilane.common.errors import ErrorClass, TrilaneError
from trilane.common.quoting import quoted

MOST_DEPTH = 32  # of lists and mappings in each other


class JsonError(TrilaneError):
    """A text that is not JSON, or that no UTF-8 file could hold."""


def parse_json(text: str | bytes, where: str, error: ErrorClass = JsonError, below: int = 2**63) -> Any:
    """The value of a JSON text; bytes are UTF-8.

    Raises ``error``, which begins with ``where``, for keys that are written twice, whole numbers that are not at least
    -2^63 and less than ``below``, lone surrogates, and more than ``MOST_DEPTH``. NaN and infinities are left to the
    schema, as those of YAML are.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text, parse_int=partial(_whole, below), object_pairs_hook=_mapping)
        _check_depth(value)
        if "\\u" in text:  # a lone surrogate can be written so, and nowhere else
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except RecursionError:
        raise error(f"{where}: not plain JSON: {_TOO_DEEP}") from None
    except ValueError as fault:
        raise error(f"{where}: not plain JSON: {fault}") from None


_TOO_DEEP = f"lists and mappings more than {MOST_DEPTH} deep"


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH):
        level = [part for value in level for part in _parts(value) if isinstance(part, list | dict)]
    if level:
        raise ValueError(_TOO_DEEP)


def _parts(value: Any) -> list[Any]:
    return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"duplicate key {quoted(key)}")
        mapping[key] = value
    return mapping


def _whole(below: int, digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= (value := int(digits)) < below:
        raise ValueError(f"the whole number {quoted(digits)} is beyond 64 bits")
    return value
