"""CSV files: a record a line, whose cells are checked by the type hints of its fields."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from inspect import signature
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

from trilane.common.errors import ErrorClass, TrilaneError
from trilane.common.files import atomic_path, check_no_pipe
from trilane.common.hints import hints_of, plain_types
from trilane.common.schema import from_dict

T = TypeVar("T")
_MOST_BYTES = 16 * 2**20


def read_csv(kind: type[T], path: str | Path, what: str, error: ErrorClass) -> list[T]:
    """The lines of a file as records of ``kind``, a dataclass or NamedTuple; other columns are passed over.

    An empty cell is None where the field allows that, the empty text in a field of text, and else the field's default.
    ``what``: what is expected of the file, in words. Raises ``error``, which names the file, the line and the field.
    """
    check_no_pipe(path, error)
    try:
        return list(_records(kind, Path(path)))
    except (OSError, csv.Error, ValueError) as fault:
        raise error(f"{path}: expected {what}: {fault}") from None


def read_lines(path: str | Path, what: str, error: ErrorClass) -> list[dict[str, str]]:
    """The lines of a file as texts by column, for files whose columns depend on their contents; errors as above."""
    check_no_pipe(path, error)
    try:
        return [line for _, line in _lines(Path(path), ())]
    except (OSError, csv.Error, ValueError) as fault:
        raise error(f"{path}: expected {what}: {fault}") from None


def _records(kind: type[T], path: Path) -> Iterator[T]:
    hints: Mapping[str, Any] = hints_of(kind)  # type: ignore[arg-type]  # a class is hashable
    required = [name for name, field in signature(kind).parameters.items() if field.default is field.empty]
    for number, line in _lines(path, required):
        yield from_dict(kind, _values(hints, line), f"line {number}", cells=True)


def _lines(path: Path, required: Iterable[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Numbers and cells of the lines below the first, which has the ``required`` columns."""
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise TrilaneError(f"at most {_MOST_BYTES:,} bytes, got {size:,}")
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.DictReader(file, strict=True)
        if missing := sorted({*required} - {*(lines.fieldnames or ())}):
            raise TrilaneError(f"its first line lacks the columns {', '.join(missing)}")
        for number, line in enumerate(lines, start=2):
            if None in line:
                raise TrilaneError(f"line {number}: more cells than columns")
            yield number, {name: text for name, text in line.items() if text is not None}


def _values(hints: Mapping[str, Any], line: Mapping[str, str]) -> dict[str, Any]:
    values = {name: _value(hint, text) for name, hint in hints.items() if (text := line.get(name)) is not None}
    return {name: value for name, value in values.items() if value != "" or str in plain_types(hints[name])}


def _value(hint: Any, text: str) -> Any:
    """A cell as its hint reads it; text that it cannot read stays, for the schema to refuse."""
    kinds = plain_types(hint)
    if not text and NoneType in get_args(hint):
        return None
    if bool in kinds:
        return {"yes": True, "true": True, "no": False, "false": False}.get(text, text)
    for kind in {int, float} & kinds:
        with suppress(ValueError):
            return kind(text)
    return text


def write_csv(rows: Iterable[Iterable[object]], path: str | Path) -> None:
    """The whole file, its head among the ``rows``, or nothing."""
    with atomic_path(path) as aside, aside.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
