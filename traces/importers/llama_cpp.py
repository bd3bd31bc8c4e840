"""Importer of llama.cpp's moe-trace CSV: the experts of each evaluated token, without a header line.

Two forms, both in the order in which layers were evaluated:
- `layer,expert`, a line for each expert (ggml-org/llama.cpp pull request 28544, examples/moe-trace, 2026-09-07; its
  source as in savoflux-spec/AI.local at f830d477);
- `pos,layer,id0,id1,...`, a line for each token and layer, `pos` below 0 for a prompt's (thecodacus/llama.cpp,
  tools/moe-trace/moe-trace.cpp, commit 380d831d).

A pass evaluates several tokens of a prompt, or one. llama.cpp computes the last layer only for prompt tokens whose
output is used: the others get the routing of the one after them there (``filled_rows``). And both tools read the ids of
a pass of several tokens as if they were stored without gaps, so that all but the first token's are further entries of
the *first* token's ranking (found in Cartaz/llama.cpp-vulkan-moe, examples/moe-trace/README.md). Such passes are
recognised, since no id occurs twice in them, and left out (``prompt_tokens_left_out``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.importers.token_routes import TokenRoutes, shape_for, trace_of
from traces.layout import DECODE, PREFILL, TraceError
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from traces.trace import Trace
from trilane.common.quoting import quoted

_FORM = "lines of `layer,expert` or `pos,layer,id0,id1,...`, as llama-moe-trace writes"

_MOST_COLUMNS = 1000
_LONGEST_LINE = 20_000  # bytes

Ints = NDArray[np.int64]


class _Rows(NamedTuple):
    """Routing of R tokens and layers, in the order of the file."""

    layer: Ints  # [R], among the MoE layers
    ids: Ints  # [R, k]
    position: Ints | None  # [R], below 0 for prompts; None where the log does not say
    lines: int  # of the file for each


class _Passes(NamedTuple):
    """P passes over the layers."""

    first: Ints  # [P], its first token
    tokens: Ints  # [P]
    decode: NDArray[np.bool_]  # [P]


def import_llama_cpp(path: Path, model: str | None) -> Trace:
    """Read a log; each prompt begins a sequence. Raises TraceError naming the line."""
    table = _table(path)
    wide = table.shape[1] > 2
    numbers, layer = np.unique(table[:, 1 if wide else 0], return_inverse=True)
    top_k = table.shape[1] - 2 if wide or model is None else load_model(model).top_k
    shape = shape_for(path, model, len(numbers), top_k)
    read = _wide if wide else _narrow
    ids, passes = _scattered(path, shape, read(path, shape, layer, table))
    return _trace(path, shape, ids, passes)


def _table(path: Path) -> Ints:
    """The whole numbers of the file."""
    with path.open("rb") as file:
        columns = file.readline(_LONGEST_LINE).count(b",") + 1
    if columns > _MOST_COLUMNS:
        raise TraceError(f"{path}: expected {_FORM}, got more than {_MOST_COLUMNS} numbers in a line; record it again")
    try:
        frame = pd.read_csv(path, header=None, skip_blank_lines=False, index_col=False)
        numbers = frame.apply(pd.to_numeric, errors="coerce").to_numpy(np.float64)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError, OverflowError) as error:
        raise TraceError(f"{path}: expected {_FORM}: {error}; record it again") from None
    good = (np.abs(numbers) < 2**31) & (numbers == np.floor(numbers))
    if numbers.shape[1] < 2 or not good.all():
        line = int(np.flatnonzero(~good.all(axis=1))[0]) if not good.all() else 0
        came = quoted(",".join(map(str, frame.iloc[line])))
        raise TraceError(f"{path}, line {line + 1}: expected {_FORM}, got {came}; record it again")
    return np.asarray(numbers, np.int64)


def _wide(path: Path, shape: ModelShape, layer: Ints, table: Ints) -> _Rows:
    """Prompt tokens of a pass and layer stand in their order."""
    position = table[:, 0]
    apart = (np.diff(layer) == 0) & (position[1:] < 0) & (np.diff(position) != 1)
    if apart.any():
        at = int(np.argmax(apart))
        raise TraceError(
            f"{path}, line {at + 2}: expected the position after {position[at]}, got {position[at + 1]}; lines were "
            "lost: record it again"
        )
    return _Rows(layer, table[:, 2:], position, lines=1)


def _narrow(path: Path, shape: ModelShape, layer: Ints, table: Ints) -> _Rows:
    """The lines of a token and layer together. The last ones may be cut off."""
    k, rows = shape.top_k, len(layer) // shape.top_k
    together = layer[: rows * k].reshape(rows, k)
    if (mixed := (together != together[:, :1]).any(axis=1)).any() or shape.moe_layers < 2:
        line = int(np.argmax(mixed)) * k + 1 if rows else 1
        raise TraceError(
            f"{path}, line {line}: expected {k} lines of each layer together, as {shape.name} has experts per token, "
            "and two layers or more; name the model that was recorded (--model), or record it again"
        )
    return _Rows(together[:, 0], table[: rows * k, 1].reshape(rows, k), None, lines=k)


def _scattered(path: Path, shape: ModelShape, rows: _Rows) -> tuple[Ints, _Passes]:
    """Ids [tokens, layers, k], -1 where the last layer was not computed, and the passes; a last one that was cut off is
    not among them.
    """
    begins = _changes(rows.layer != np.roll(rows.layer, 1))
    moves = np.zeros(len(begins), np.bool_)
    if rows.position is not None:
        moves = _changes((rows.position >= 0) & (rows.position != np.roll(rows.position, 1)))
    run = np.cumsum(begins | moves) - 1
    start, length = np.flatnonzero(begins | moves), np.bincount(run)
    layer = rows.layer[start]
    opens = _changes((layer <= np.roll(layer, 1)) | moves[start])
    of_pass = np.cumsum(opens) - 1
    tokens = length[opens]
    whole = _whole_passes(path, shape, rows, start, layer, length, of_pass, tokens)
    first = np.cumsum(tokens) - tokens
    kept = of_pass[run] < whole
    run = run[kept]
    token = (first + tokens)[of_pass[run]] - length[run] + np.flatnonzero(kept) - start[run]
    ids = np.full((int(tokens[:whole].sum()), shape.moe_layers, shape.top_k), -1, np.int64)
    ids[token, rows.layer[kept]] = rows.ids[kept]
    decode = tokens == 1 if rows.position is None else rows.position[start[opens]] >= 0
    return ids, _Passes(first[:whole], tokens[:whole], decode[:whole])


def _changes(differs: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Mask of the places that begin something: the first, and those that differ from the one before."""
    return np.concatenate([[True], differs[1:]])[: len(differs)]


def _whole_passes(
    path: Path, shape: ModelShape, rows: _Rows, start: Ints, layer: Ints, length: Ints, of_pass: Ints, tokens: Ints
) -> int:
    """Number of passes that have all layers; the last may lack some. Raises TraceError if another does."""
    last = shape.moe_layers - 1
    skipped = (tokens > 1) & (np.bincount(of_pass, layer == last, len(tokens)) == 0)
    complete = np.bincount(of_pass, minlength=len(tokens)) + skipped == shape.moe_layers
    uneven = (length != tokens[of_pass]) & ((layer != last) | (length > tokens[of_pass]))
    complete &= np.bincount(of_pass, uneven, len(tokens)) == 0
    whole = len(tokens) if complete.all() else int(np.argmin(complete))
    if whole < max(len(tokens) - 1, 1):
        line = int(start[np.argmax(of_pass == whole)]) * rows.lines + 1 if len(start) else 1
        raise TraceError(
            f"{path}, line {line}: expected each pass to have the same tokens in all {shape.moe_layers} MoE layers, in "
            "their order; lines were lost, or the log was cut short: record it again"
        )
    return whole


def _trace(path: Path, shape: ModelShape, ids: Ints, passes: _Passes) -> Trace:
    """Each pass of a prompt after a generated token begins a sequence."""
    begins = ~passes.decode & np.concatenate([[False], passes.decode[:-1]])
    wrong = np.zeros(len(passes.first), np.bool_)
    for one in np.flatnonzero(passes.tokens > 1):
        wrong[one] = _misread(shape, ids[passes.first[one] :][: passes.tokens[one]])
    kept = np.repeat(~wrong, passes.tokens)
    sequence = np.repeat(np.cumsum(begins), passes.tokens)[kept].astype(np.int32)
    phase = np.repeat(np.where(passes.decode, DECODE, PREFILL), passes.tokens)[kept].astype(np.uint8)
    if not kept.any():
        raise TraceError(f"{path}: expected generated tokens, found prompts alone, which this tool misreads; use -n")
    ids = ids[kept]
    filled = _fill_last_layer(ids, sequence)
    marks: dict[str, Any] = {"filled_rows": filled, "prompt_tokens_left_out": int((~kept).sum())}
    return trace_of(path, "llama-cpp", shape, TokenRoutes(ids, sequence, phase), **marks)


def _misread(shape: ModelShape, ids: Ints) -> bool:
    """True if the ids of a pass are the ranking of its first token, in which none occurs twice."""
    tokens = min(len(ids), shape.experts // shape.top_k)
    ranked = np.sort(np.swapaxes(ids[:tokens, : max(shape.moe_layers - 1, 1)], 0, 1).reshape(-1, tokens * shape.top_k))
    return tokens > 1 and not (ranked[:, 1:] == ranked[:, :-1]).any()


def _fill_last_layer(ids: Ints, sequence: NDArray[np.int32]) -> int:
    """Give tokens without the last layer the routing of the next one that has it; count them."""
    lacking = np.flatnonzero(ids[:, -1, 0] < 0)
    place = np.where(ids[:, -1, 0] < 0, len(ids) - 1, np.arange(len(ids)))
    after = np.minimum.accumulate(place[::-1])[::-1][lacking]
    same = sequence[after] == sequence[lacking]
    ids[lacking[same], -1] = ids[after[same], -1]
    return int(same.sum())
