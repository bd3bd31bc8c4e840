"""Overlap statistics: how many experts two tokens have in common, by their distance and phase."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.layout import DECODE, PREFILL
from traces.statistics import experts_used, likeness_gain, overlaps
from traces.trace import Trace

LAGS = 16  # distances in tokens that are measured one by one; larger ones count as "far"
FAR_LAYERS = 8
LEAST_PROMPT, LEAST_ANSWER = 4, 2 * LAGS  # least tokens of a text that is measured
NEAR_PROMPT = 3  # prompt tokens nearer than this measure persistence rather than preferences
MOST_SEQUENCES, MOST_TOKENS = 20, 256  # limits for long traces: sequences, and tokens of each phase
WINDOWS = (2, 8, 32, 128)

Floats = NDArray[np.float64]
Ids = NDArray[np.int16]


@dataclass(frozen=True)
class Choices:
    """The experts of one text's tokens, of its prompt and of its answer: [tokens, layers, k]."""

    prompt: Ids
    answer: Ids


@dataclass(frozen=True, eq=False)
class OverlapStatistics:
    """Means over texts; *overlap* is the share of a token's experts that another token has, too. NaN where a trace is
    too short."""

    far: Floats  # [layers], overlap of answer tokens more than LAGS apart
    lags: Floats  # [LAGS], of answer tokens at each distance, mean over layers
    across: float  # of answer tokens of different texts
    prompt: float  # of tokens of one prompt
    prompt_answer: float  # of a prompt token and an answer token
    spread: float  # standard deviation, over pairs of far answer tokens, of the overlap in all layers together
    gain: float  # see traces.statistics.likeness_gain, next layer
    far_gain: float  # the same, FAR_LAYERS ahead
    distinct: Floats  # [WINDOWS], different experts in windows of consecutive answer tokens, mean over layers
    prompt_distinct: float  # different experts of a prompt


def measure_trace(trace: Trace) -> OverlapStatistics:
    """Statistics of a trace, without the last layer of prompts if its importer filled that in, and without prompts that
    were made up."""
    layers = trace.shape.moe_layers - bool(trace.provenance.get("filled_rows"))
    statistics = measure(choices_of(trace), trace.shape.experts, layers)
    if trace.provenance.get("synthetic_prompts"):
        return replace(statistics, prompt=np.nan, prompt_answer=np.nan, prompt_distinct=np.nan)
    return statistics


def middle(several: list[OverlapStatistics]) -> OverlapStatistics:
    """The mean of each statistic."""
    names = [field.name for field in fields(OverlapStatistics)]
    return OverlapStatistics(**{name: np.mean([getattr(one, name) for one in several], axis=0) for name in names})


def choices_of(trace: Trace) -> list[Choices]:
    """The texts of a trace that are long enough to say something."""
    texts = []
    for sequence in dict.fromkeys(trace.sequence.tolist()):
        mine = trace.sequence == sequence
        prompt, answer = (np.flatnonzero(mine & (trace.phase == phase)) for phase in (PREFILL, DECODE))
        prompt, answer = prompt[-MOST_TOKENS:], answer[:MOST_TOKENS]
        texts.append(Choices(np.asarray(trace.topk_ids[prompt]), np.asarray(trace.topk_ids[answer])))
    enough = [text for text in texts if len(text.prompt) >= LEAST_PROMPT and len(text.answer) >= LEAST_ANSWER]
    return enough[:MOST_SEQUENCES]


def measure(texts: list[Choices], experts: int, prompt_layers: int | None = None) -> OverlapStatistics:
    """Statistics over all pairs of tokens. ``prompt_layers``: layers of which prompts are measured (default: all)."""
    used = [
        (experts_used(text.prompt[:, :prompt_layers], experts), experts_used(text.answer, experts)) for text in texts
    ]
    k = texts[0].answer.shape[2]
    answers = [overlaps(answer, answer, k) for _, answer in used]
    far = [_apart(overlap, LAGS + 1) for overlap in answers]
    across = list(_across([answer for _, answer in used], k))
    return OverlapStatistics(
        far=_mean([pairs.mean(axis=1) for pairs in far]),
        lags=_mean([[np.diagonal(overlap, lag, 1, 2).mean() for lag in range(1, LAGS + 1)] for overlap in answers]),
        across=float(_mean(across or [np.nan])),
        prompt=float(_mean([_apart(overlaps(prompt, prompt, k), NEAR_PROMPT).mean() for prompt, _ in used])),
        prompt_answer=float(_mean([overlaps(prompt, answer, k).mean() for prompt, answer in used])),
        spread=float(_mean([pairs.mean(axis=0).std() for pairs in far])),
        gain=float(_mean([likeness_gain(overlap, 1) for overlap in answers])),
        far_gain=float(_mean([likeness_gain(overlap, FAR_LAYERS) for overlap in answers])),
        distinct=_mean([[_distinct(answer, window) for window in WINDOWS] for _, answer in used]),
        prompt_distinct=float(_mean([_distinct(prompt, prompt.shape[1]) for prompt, _ in used])),
    )


def _mean(values: Sequence[Any]) -> Floats:
    """The mean over texts, ignoring NaN."""
    array = np.asarray(values, np.float64)
    known = np.isfinite(array)
    return np.asarray(np.where(known, array, 0).sum(axis=0) / np.where(known.any(axis=0), known.sum(axis=0), np.nan))


def _apart(overlap: NDArray[np.float32], least: int) -> NDArray[np.float32]:
    """Overlaps [layers, pairs] of tokens at least ``least`` apart."""
    row, column = np.triu_indices(overlap.shape[1], least)
    pairs = overlap[:, row, column]
    return pairs if pairs.shape[1] else np.full((len(overlap), 1), np.nan, np.float32)


def _across(answers: list[NDArray[np.float32]], k: int) -> Iterator[float]:
    """Overlap between tokens of two texts, for every pair of texts."""
    popularity = [answer.mean(axis=1) for answer in answers]
    for place, one in enumerate(popularity):
        for other in popularity[:place]:
            yield float((one * other).sum(axis=1).mean() / k)


def _distinct(used: NDArray[np.float32], window: int) -> float:
    """Different experts in windows of ``window`` tokens, mean over layers and disjoint windows."""
    starts = range(0, used.shape[1] - window + 1, window)
    counts = [(used[:, start : start + window].max(axis=1) > 0).sum(axis=1).mean() for start in starts]
    return float(np.mean(counts)) if counts else float("nan")
