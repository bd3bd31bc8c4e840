"""llama.cpp as an engine of benchmarks: random token ids, since random weights make no text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from realrun.llama_cpp.bench_engine import BenchContext, BenchSettings
from realrun.llama_cpp.context import LlamaContext
from realrun.llama_cpp.model import LlamaModel

_SEED = 0
_COMPUTED_TOKENS = 512  # at once, and before any are copied


@contextmanager
def open_llama(path: Path, settings: BenchSettings) -> Iterator[BenchContext]:
    """A GGUF file, loaded by llama.cpp. Raises RefusedError with the library's reason."""
    gpu_layers = -1 if settings.gpu else 0
    with (
        LlamaModel(path, gpu_layers=gpu_layers, cpu_expert_layers=settings.cpu_layers, mmap=settings.mapped) as model,
        LlamaContext(
            model, context=settings.context_tokens, piece=settings.piece_tokens, kv=settings.kv, repeats=settings.copies
        ) as context,
    ):
        yield LlamaBenchContext(context, settings.copies)


class LlamaBenchContext:
    """See ``BenchContext``."""

    def __init__(self, context: LlamaContext, copies: bool = False) -> None:
        self._context, self._copies = context, copies
        self._random = np.random.default_rng(_SEED)

    def compute_ns(self, tokens: int) -> int:
        """See ``BenchContext``."""
        ids = self._random.integers(0, self._context.model.vocabulary, tokens, dtype=np.int32)
        begin = perf_counter_ns()
        self._context.decode(ids)
        return perf_counter_ns() - begin

    def fill(self, tokens: int) -> None:
        """See ``BenchContext``."""
        most = min(tokens, _COMPUTED_TOKENS) if self._copies else tokens
        while (missing := most - self._context.tokens) > 0:
            self.compute_ns(min(missing, _COMPUTED_TOKENS))
        while (missing := tokens - self._context.tokens) > 0:
            self._context.repeat(min(missing, self._context.tokens))
            self._move_keys()

    def _move_keys(self) -> None:
        """Those that were copied get their positions with the next token."""
        tokens = self._context.tokens
        self.compute_ns(1)
        self._context.keep(tokens)

    def keep(self, tokens: int) -> None:
        """See ``BenchContext``."""
        self._context.keep(tokens)

    def use_threads(self, threads: int) -> None:
        """See ``BenchContext``."""
        self._context.set_threads(threads)
