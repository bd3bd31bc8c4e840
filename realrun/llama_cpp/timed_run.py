"""Timing with llama.cpp's library: contexts for benchmarks, and one run of a prompt and of the tokens after it.

Token ids are random, since random weights make no text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from time import perf_counter_ns

import numpy as np

from realrun.llama_cpp.bench import BenchContext, BenchSettings
from realrun.llama_cpp.model import LlamaContext, LlamaModel
from trilane.common.units import MIB

_COMPUTED_TOKENS = 512  # at once, and before any are copied


@contextmanager
def open_llama(path: Path, settings: BenchSettings) -> Iterator[BenchContext]:
    """Load a GGUF file with llama.cpp. Raises RefusedError with the library's reason."""
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
        began_ns = perf_counter_ns()
        self.decode(ids)
        return perf_counter_ns() - began_ns

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


_SIZE = re.compile(r"(\S+)\s+(model|KV|RS|compute|output) buffer size =\s*([\d.]+) MiB")
_REPACKED = "_REPACK"  # ends the name of a buffer that holds a second copy of weights that are mapped, too


@dataclass(frozen=True)
class RunSettings:
    """Arguments as of ``llama-server``, and the tokens to compute.

    ``gpu``: onto a GPU, except the experts of the first ``cpu_expert_layers`` layers; ``mapped``: from a mapped file,
    not from one that is read (``--load-mode none``). ``prompt_tokens`` are computed in pieces, then
    ``generated_tokens`` one by one, in a KV cache of ``window_tokens``.
    """

    threads: int
    piece_tokens: int
    kv: str
    window_tokens: int
    prompt_tokens: int
    generated_tokens: int
    gpu: bool = False
    cpu_expert_layers: int = 0
    expert_cache_mib: int = 0
    mapped: bool = True


@dataclass(frozen=True)
class TimedRun:
    """Times in ns, and bytes of the buffers that the engine reported, by kind: model, KV, compute."""

    prompt_ns: int
    token_ns: tuple[int, ...]
    reported: Mapping[str, int]

    @property
    def tpot_ms(self) -> float:
        """The median time of a token."""
        return median(self.token_ns) / 1e6

    @property
    def ttft_ms(self) -> float:
        """The time of the prompt."""
        return self.prompt_ns / 1e6


def timed_run(path: Path, settings: RunSettings) -> TimedRun:
    """Load a model, run once to warm up, and time a prompt of random tokens and the tokens after it.

    Raises RefusedError with the library's reason where it cannot be loaded.
    """
    layers, on_cpu = -1 if settings.gpu else 0, settings.cpu_expert_layers
    with LlamaModel(path, gpu_layers=layers, cpu_expert_layers=on_cpu, mmap=settings.mapped) as model:
        return timed_in(model, settings)


def timed_in(model: LlamaModel, settings: RunSettings) -> TimedRun:
    """As ``timed_run``, with a loaded model."""
    with LlamaBenchContext(
        model, context=settings.window_tokens, piece=settings.piece_tokens, threads=settings.threads, kv=settings.kv,
        flash_attention=True, expert_cache_mib=settings.expert_cache_mib,
    ) as bench:
        bench.compute_ns(min(settings.piece_tokens, settings.prompt_tokens))
        bench.keep(0)
        prompt_ns = bench.compute_ns(settings.prompt_tokens)
        tokens_ns = tuple(bench.compute_ns(1) for _ in range(settings.generated_tokens))
        return TimedRun(prompt_ns, tokens_ns, reported_bytes(model.log.lines))


def reported_bytes(lines: Iterable[str]) -> dict[str, int]:
    """Bytes of all buffers by kind, from the log; a second copy of weights is not counted."""
    sizes: Counter[str] = Counter()
    for buffer, kind, mib in (match.groups() for line in lines for match in _SIZE.finditer(line)):
        if not buffer.endswith(_REPACKED):
            sizes["KV" if kind == "RS" else kind] += round(float(mib) * MIB)
    return dict(sizes)
