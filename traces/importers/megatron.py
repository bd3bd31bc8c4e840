"""Importer of Megatron-LM's router traces: `router_trace_rank0.jsonl` in the folder of `--moe-routing-trace-path`.

A line for each step, block and layer: `{"step": 0, "stage": "pre_dispatch", "block": "decoder", "layer": 3, "rank": 0,
"num_tokens": 128, "topk": 22, "top_indices": [[12, 45, ...], ...]}`, "block" being absent from the first version;
ids may be in any order (NVIDIA/Megatron-LM, megatron/core/transformer/moe/router_trace.py, 2026). Layers of multi-token
prediction (`"block": "mtp"`) are left out.

Which sequence a token belongs to is not written. What is unambiguous can be read: inference of one request at a time, a
step of its prompt's tokens followed by steps of one; and training, all steps alike, each a text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.importers.requests import answers, part
from traces.importers.token_routes import TokenRoutes, shape_for, trace_of
from traces.layout import DECODE, PREFILL, TraceError
from traces.trace import Trace
from trilane.common.quoting import quoted


class _Record(NamedTuple):
    where: str
    step: int
    layer: int
    ids: NDArray[np.int64]  # [tokens, k]


def import_megatron(path: Path, model: str | None) -> Trace:
    """Read the trace of one rank. Raises TraceError naming the line."""
    steps = _steps(path, list(_records(path)))
    layers = sorted({record.layer for record in steps[0]})
    for step in steps:
        _check_step(step, layers)
    counts = np.array([len(step[0].ids) for step in steps])
    begins = _first_steps(path, counts)
    ids = np.concatenate([np.stack([record.ids for record in step], axis=1) for step in steps])
    sequence = np.repeat(np.cumsum(begins) - 1, counts).astype(np.int32)
    phase = np.repeat(np.where(begins, PREFILL, DECODE), counts).astype(np.uint8)
    return trace_of(path, "megatron", shape_for(path, model, *ids.shape[1:]), TokenRoutes(ids, sequence, phase))


def _records(path: Path) -> Iterator[_Record]:
    for where, line in answers(path):
        step, layer, tokens, k = (part(where, line, name, int) for name in ("step", "layer", "num_tokens", "topk"))
        rows = part(where, line, "top_indices", list)
        if line.get("block", "decoder") != "decoder":
            continue
        if len(rows) != tokens or not tokens or not all(_is_row(row, k) for row in rows):
            raise TraceError(
                f"{where}: expected top_indices to be {tokens} lists of {k} expert ids, got {quoted(rows)}; "
                "record it again"
            )
        yield _Record(where, step, layer, np.array(rows, np.int64))


def _is_row(row: Any, k: int) -> bool:
    return isinstance(row, list) and len(row) == k > 0 and all(type(value) is int for value in row)


def _steps(path: Path, records: list[_Record]) -> list[list[_Record]]:
    """Records of a step in the order of layers. A layer's second record in a step is that of the next micro-batch."""
    seen: dict[tuple[int, int], int] = {}
    steps: dict[tuple[int, int], list[_Record]] = {}
    for record in records:
        turn = seen[record.step, record.layer] = seen.get((record.step, record.layer), -1) + 1
        steps.setdefault((record.step, turn), []).append(record)
    if not steps:
        raise TraceError(f"{path}: expected records of decoder layers, found none; record it again")
    return [sorted(steps[key], key=lambda record: record.layer) for key in sorted(steps)]


def _check_step(step: list[_Record], layers: list[int]) -> None:
    found, shapes = [record.layer for record in step], {record.ids.shape for record in step}
    if found != layers or len(shapes) != 1:
        raise TraceError(
            f"{step[0].where}: expected step {step[0].step} to have the same tokens in the layers {quoted(layers)}, "
            f"found layers {quoted(found)}, tokens and ids per token {quoted(sorted(shapes))}; record it again"
        )


def _first_steps(path: Path, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which steps begin a sequence: all, where they have equally many tokens; those of several, where others follow."""
    several = counts > 1
    if several.all() and (counts == counts[0]).all():
        return several
    begins = several | (np.arange(len(counts)) == 0)
    if (doubtful := several[1:] & several[:-1]).any():
        at = int(np.flatnonzero(doubtful)[0])
        raise TraceError(
            f"{path}: expected one request at a time, a step of several tokens followed by steps of one, or steps of "
            f"equally many tokens, found steps of {counts[at]} and {counts[at + 1]} in a row; which sequence a token "
            "is of cannot be known: record requests one by one, without chunked prefill"
        )
    return np.asarray(begins)
