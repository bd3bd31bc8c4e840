"""Batches composed of recorded sequences: the rows of a trace that each step takes (steps that verify drafts:
``traces.windows``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from traces.layout import DECODE, PREFILL
from traces.trace import Trace
from trilane.common.errors import TrilaneError

Rows: TypeAlias = NDArray[np.intp]


class BatchError(TrilaneError):
    """A batch that the trace cannot fill."""


@dataclass(frozen=True, eq=False)
class StepRows:
    """One forward pass. Per-sequence tuples hold the sequences that take part, in batch order."""

    index: int
    phase: Literal["prefill", "decode"]
    rows: Rows  # row numbers in the trace, sequence by sequence
    sequences: tuple[int, ...]
    tokens: tuple[int, ...]  # rows of each sequence in this step
    context: tuple[int, ...]  # tokens that each sequence has in its KV cache before this step
    drafted: int = 0  # of a step that verifies drafts: its tokens but the first
    generated: int = 1  # tokens by which the step lengthens each answer: 1, and the drafts that are accepted


class LayerUse(NamedTuple):
    """Distinct experts that one layer uses in one step, in order of id, and the tokens of each."""

    step: int
    layer: int
    phase: Literal["prefill", "decode"]
    active: tuple[int, ...]
    tokens: tuple[int, ...]


def layer_uses(trace: Trace) -> Iterator[LayerUse]:
    """Yield every layer of every step, sequence by sequence, each alone. A prompt is one step."""
    steps = (
        rows for sequence in dict.fromkeys(trace.sequence.tolist())
        for rows in compose(trace, batch=1, sequences=[sequence])
    )
    for step, rows in enumerate(steps):
        workloads = step_workloads(trace, rows.rows)
        layer, expert = np.nonzero(workloads)
        tokens, experts = workloads[layer, expert].tolist(), expert.tolist()
        ends = np.searchsorted(layer, np.arange(1, len(workloads) + 1)).tolist()
        for number, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            yield LayerUse(step, number, rows.phase, tuple(experts[start:end]), tuple(tokens[start:end]))


def compose(
    trace: Trace,
    *,
    batch: int,
    prompt_tokens: int | None = None,
    generated_tokens: int | None = None,
    sequences: Sequence[int] | None = None,
    prefill_chunk_tokens: int | None = None,
) -> list[StepRows]:
    """The steps of a run of ``batch`` sequences: their prompts together, then one token of each per decode step.

    The batch is the first ``batch`` of ``sequences`` (default: all of the trace, by first appearance).
    ``prompt_tokens`` keeps the last tokens of each prompt, those next to the decode tokens (default: all);
    ``generated_tokens`` is the number of decode steps (default: as many as every sequence has);
    ``prefill_chunk_tokens`` cuts the prefill into steps of at most this many tokens, summed over the sequences.
    Raises BatchError saying what the trace has.
    """
    _check_counts(batch, prompt_tokens, generated_tokens, prefill_chunk_tokens)
    chosen = _choose(trace, batch, sequences)
    prompts = [_last(trace, sequence, prompt_tokens) for sequence in chosen]
    decodes = [_rows_of(trace, sequence, DECODE) for sequence in chosen]
    count = min(map(len, decodes)) if generated_tokens is None else generated_tokens
    for sequence, rows in zip(chosen, decodes, strict=True):
        _check_enough(sequence, "generated_tokens", count, len(rows), "decode")
    steps = _prefill_steps(chosen, prompts, prefill_chunk_tokens)
    steps += _decode_steps(chosen, prompts, decodes, count, first_index=len(steps))
    if not steps:
        raise BatchError(f"expected prompt or decode tokens in sequences {chosen}, found none to run")
    return steps


def count_experts(ids: NDArray[np.int16], experts: int) -> NDArray[np.intp]:
    """Counts [layers, experts] of the experts in ``ids`` [tokens, layers, k], ignoring negative entries."""
    layers = ids.shape[1]
    slots = ids.astype(np.intp) + np.arange(layers)[:, None] * experts
    return np.bincount(slots[ids >= 0], minlength=layers * experts).reshape(layers, experts)


def count_by_sequence(trace: Trace, rows: Rows) -> NDArray[np.int64]:
    """Tokens of ``rows`` [sequences, layers, experts], by sequence of the trace in order of first appearance."""
    sequences = dict.fromkeys(trace.sequence.tolist())
    mine = [rows[trace.sequence[rows] == sequence] for sequence in sequences]
    counts = [count_experts(trace.topk_ids[some], trace.shape.experts) for some in mine]
    return np.stack(counts).astype(np.int64)


def best_ranks(ids: NDArray[np.int16], experts: int) -> NDArray[np.intp]:
    """The best place of each expert among the choices ``ids`` [tokens, layers, k] of a token: [layers, experts], k for
    one that is never chosen."""
    _, layers, k = ids.shape
    ranks = np.full((layers, experts), k, np.intp)
    for rank in reversed(range(k)):
        token, layer = np.nonzero(ids[:, :, rank] >= 0)
        ranks[layer, ids[token, layer, rank]] = rank
    return ranks


def step_workloads(trace: Trace, rows: Rows) -> NDArray[np.int32]:
    """Tokens routed to each expert when ``rows`` are one step: [layers, experts]."""
    return count_experts(trace.topk_ids[rows], trace.shape.experts).astype(np.int32)


def _check_counts(batch: int, prompt_tokens: int | None, generated_tokens: int | None, chunk: int | None) -> None:
    for name, value, least in (
        ("batch", batch, 1), ("prompt_tokens", prompt_tokens, 0), ("generated_tokens", generated_tokens, 0),
        ("prefill_chunk_tokens", chunk, 1),
    ):
        if value is not None and value < least:
            raise BatchError(f"expected {name} >= {least}, got {value}")


def _choose(trace: Trace, batch: int, sequences: Sequence[int] | None) -> list[int]:
    numbers, first = np.unique(trace.sequence, return_index=True)
    present = [int(number) for number in numbers[np.argsort(first)]]
    wanted = present if sequences is None else [int(sequence) for sequence in sequences]
    strangers = sorted(set(wanted) - set(present))
    if strangers or len(set(wanted)) < len(wanted):
        raise BatchError(f"expected distinct sequences of the trace ({_brief(present)}), got {_brief(wanted)}")
    if batch > len(wanted):
        raise BatchError(
            f"expected at least {batch} sequences for batch {batch}, there are {len(wanted)} ({_brief(wanted)}); "
            "lower the batch or capture more sequences; no sequence is used twice"
        )
    return wanted[:batch]


def _rows_of(trace: Trace, sequence: int, phase: int) -> Rows:
    return np.flatnonzero((trace.sequence == sequence) & (trace.phase == phase))


def _last(trace: Trace, sequence: int, prompt_tokens: int | None) -> Rows:
    rows = _rows_of(trace, sequence, PREFILL)
    count = len(rows) if prompt_tokens is None else prompt_tokens
    _check_enough(sequence, "prompt_tokens", count, len(rows), "prompt")
    return rows[len(rows) - count :]


def _check_enough(sequence: int, name: str, wanted: int, available: int, kind: str) -> None:
    if wanted > available:
        raise BatchError(
            f"expected {wanted} {kind} tokens ({name}) in sequence {sequence}, it has {available}; "
            f"lower {name} or choose other sequences"
        )


def _prefill_steps(chosen: list[int], prompts: list[Rows], chunk: int | None) -> list[StepRows]:
    rows = np.concatenate(prompts)
    owner = np.repeat(np.arange(len(chosen)), [len(prompt) for prompt in prompts])
    starts = np.concatenate([[0], np.cumsum([len(prompt) for prompt in prompts])])
    steps: list[StepRows] = []
    for start in range(0, len(rows), chunk or max(len(rows), 1)):
        piece = slice(start, start + (chunk or len(rows)))
        members, tokens = np.unique(owner[piece], return_counts=True)
        context = tuple(max(start - int(starts[member]), 0) for member in members)
        sequences = tuple(chosen[member] for member in members)
        steps.append(StepRows(len(steps), "prefill", rows[piece], sequences, tuple(tokens.tolist()), context))
    return steps


def _decode_steps(
    chosen: list[int], prompts: list[Rows], decodes: list[Rows], count: int, first_index: int
) -> list[StepRows]:
    table = np.stack([rows[:count] for rows in decodes])
    contexts = (tuple(len(prompt) + step for prompt in prompts) for step in range(count))
    return [
        StepRows(first_index + step, "decode", table[:, step], tuple(chosen), (1,) * len(chosen), context)
        for step, context in enumerate(contexts)
    ]


def _brief(numbers: Sequence[int]) -> str:
    """The numbers, or the first few of them."""
    return ", ".join(map(str, numbers[:8])) + (f", ... ({len(numbers)} in all)" if len(numbers) > 8 else "")
