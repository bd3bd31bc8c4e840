"""Answers of inference servers: a log of requests, each with the routing of its prompt and of what it generated."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.importers.token_routes import TokenRoutes, moe_layers_of, shape_for, trace_of
from traces.layout import DECODE, PREFILL, TraceError
from traces.trace import Trace
from trilane.common.json_text import parse_json
from trilane.common.quoting import quoted

MOST_JSON = 200_000_000  # bytes of one JSON text: Python needs some ten times as much


class Request(NamedTuple):
    """One text. ``ids`` [tokens, layers, k], the first ``prompt`` of them of the prompt."""

    ids: NDArray[Any]
    prompt: int


def trace_of_requests(path: Path, log_format: str, model: str | None, requests: Sequence[Request]) -> Trace:
    """The trace of requests, in their order, one sequence each. Raises TraceError."""
    requests = [request for request in requests if len(request.ids)]
    shapes = {request.ids.shape[1:] for request in requests}
    if len(shapes) != 1:
        raise TraceError(f"{path}: expected arrays [tokens, layers, k] of one model, found {quoted(sorted(shapes))}")
    ids = moe_layers_of(np.concatenate([request.ids for request in requests]), model)
    lengths = [len(request.ids) for request in requests]
    routing = TokenRoutes(
        ids,
        sequence=np.repeat(np.arange(len(requests), dtype=np.int32), lengths),
        phase=np.concatenate([_phase(request) for request in requests]),
    )
    return trace_of(path, log_format, shape_for(path, model, *ids.shape[1:]), routing)


def _phase(request: Request) -> NDArray[np.uint8]:
    return np.where(np.arange(len(request.ids)) < request.prompt, PREFILL, DECODE).astype(np.uint8)


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
