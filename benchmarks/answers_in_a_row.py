"""Answers one after the other with one cache, as a server gives them: the decode tokens of several texts as one answer.

A text that changes brings other experts into use at once. Prompts pass by these caches: only the first is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from traces.layout import DECODE
from traces.library import load_trace
from traces.synthesis.named import with_lengths
from traces.trace import Trace

Facts = Mapping[str, float]


def answers_in_a_row(model: str, texts: Sequence[int], prompt_tokens: int, generated_tokens: int) -> Trace:
    """The prompt of the first of ``texts`` of the synthetic ``model``, and the answers of all of them."""
    trace = load_trace(with_lengths(model, max(texts) + 1, prompt_tokens, generated_tokens, ()))
    decode = trace.phase == DECODE
    answers = [np.flatnonzero(decode & (trace.sequence == text)) for text in texts]
    rows = np.concatenate([np.flatnonzero(~decode & (trace.sequence == texts[0])), *answers])
    tensors = {name: array[rows] for name, array in trace.tensors().items()}
    tensors["sequence"] = np.zeros(len(rows), np.int32)
    tensors["position"] = np.arange(len(rows), dtype=np.int32)
    return Trace.from_tensors(trace.shape, tensors, {"texts": list(texts), "of": model})


def without_the_first(all_: Facts, first: Facts, answers: int) -> dict[str, float]:
    """Speed in all of so many answers but the first, which warms the cache; what is counted runs from its start."""
    ms = answers / all_["tokens_per_s"] - 1 / first["tokens_per_s"]
    return {**all_, "tokens_per_s": round((answers - 1) / ms, 2)}
