"""One run of llama.cpp with given settings: times of a prompt and of each token after it, and the memory it reports."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from realrun.llama_cpp.llama_bench_context import LlamaBenchContext
from realrun.llama_cpp.model import LlamaModel
from trilane.common.units import MIB

_SIZE = re.compile(r"(\S+)\s+(model|KV|RS|compute|output) buffer size =\s*([\d.]+) MiB")
_REPACKED = "_REPACK"  # ends the name of a buffer that holds a second copy of weights that are mapped, too


@dataclass(frozen=True)
class RunSettings:
    """As the arguments of ``llama-server``. ``gpu``: onto a GPU, but for the experts of ``cpu_expert_layers`` layers;
    ``mapped``: out of a mapped file, rather than one that is read (``--load-mode none``).

    ``prompt_tokens`` are computed in pieces, then ``generated_tokens`` one by one, in a KV cache of ``window_tokens``.
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
    """The same with a model that is loaded."""
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
    """Bytes of all buffers by kind, as the log has them; a second copy of weights is not counted."""
    found: Counter[str] = Counter()
    for buffer, kind, mib in (match.groups() for line in lines for match in _SIZE.finditer(line)):
        if not buffer.endswith(_REPACKED):
            found["KV" if kind == "RS" else kind] += round(float(mib) * MIB)
    return dict(found)
