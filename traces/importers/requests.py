"""Answers of inference servers, as JSON: the values in them, checked."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traces.layout import TraceError
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted

MOST_JSON = 200_000_000  # bytes of one JSON text: Python needs some ten times as much


def answers(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON objects of a file, each with its place for messages: one, a list of them, or one a line (.jsonl)."""
    for where, text in _texts(path):
        value = parse_json(text, where, TraceError)
        for number, each in enumerate(value if isinstance(value, list) else [value], 1):
            place = f"{where}, answer {number}" if isinstance(value, list) else where
            if not isinstance(each, dict):
                raise TraceError(f"{place}: expected an answer, a mapping, got {quoted(each)}")
            yield place, each


def _texts(path: Path) -> Iterator[tuple[str, bytes]]:
    lines = path.suffix.lower() == ".jsonl"
    with path.open("rb") as file:
        read = file.readline if lines else file.read
        for number, text in enumerate(iter(lambda: read(MOST_JSON + 1), b""), 1):
            if len(text) > MOST_JSON:
                raise TraceError(
                    f"{path}: expected at most {MOST_JSON:,} bytes of JSON; save one answer a line (.jsonl)"
                )
            if text.strip():
                yield (f"{path}, line {number}" if lines else str(path)), text


def part(where: str, answer: Any, name: str, kind: type) -> Any:
    """A value of an answer. Raises TraceError if it is missing or of another kind."""
    value = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TraceError(f"{where}: expected {name} ({kind.__name__}), got {quoted(value)}; save the whole answer")
    return value


def decoded(where: str, text: str) -> bytes:
    """The bytes that a base64 text stands for."""
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise TraceError(f"{where}: expected routed_experts in base64: {error}; save the whole answer") from None
