"""llama.cpp as an engine of benchmarks: random token ids, since random weights make no text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from realrun.llama_cpp.bench_engine import BenchContext, BenchSettings
from realrun.llama_cpp.context import LlamaContext
from realrun.llama_cpp.model import LlamaModel

_COMPUTED_TOKENS = 512  # at once, and before any are copied


@contextmanager
def open_llama(path: Path, settings: BenchSettings) -> Iterator[BenchContext]:
    """A GGUF file, loaded by llama.cpp. Raises RefusedError with the library's reason."""
    gpu_layers = -1 if settings.gpu else 0
    with (
        LlamaModel(path, gpu_layers=gpu_layers, cpu_expert_layers=settings.cpu_layers, mmap=settings.mapped) as model,
        LlamaBenchContext(
            model, context=settings.context_tokens, piece=settings.piece_tokens, kv=settings.kv, repeats=settings.copies
        ) as context,
    ):
        yield context


class LlamaBenchContext(LlamaContext):
    """See ``BenchContext``; with ``repeats``, the cache is filled with copies."""

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng(0)

    def compute_ns(self, tokens: int) -> int:
        ids = self._random.integers(0, self.model.vocabulary, tokens, dtype=np.int32)
        begin = perf_counter_ns()
        self.decode(ids)
        return perf_counter_ns() - begin

    def fill(self, tokens: int) -> None:
        """See ``BenchContext``."""
        most = min(tokens, _COMPUTED_TOKENS) if self.repeats else tokens
        while (missing := most - self.tokens) > 0:
            self.compute_ns(min(missing, _COMPUTED_TOKENS))
        while (missing := tokens - self.tokens) > 0:
            self.repeat(min(missing, self.tokens))
            filled = self.tokens
            self.compute_ns(1)  # those that were copied get their positions with the next token
            self.keep(filled)
