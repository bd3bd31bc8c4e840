"""Benchmarks of llama.cpp: times of single tokens and of pieces, by its library or by its program ``llama-bench``.

The program and its JSON are used where the library is not installed. It loads the model anew for each time, and reports
neither memory nor a cache of experts; so small models of kernels, and checks of settings, are timed with the library.
Token ids are random, since random weights make no text.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple, Protocol

import numpy as np

from realrun.errors import RefusedError
from realrun.llama_cpp.model import LlamaContext, LlamaModel
from trilane.common.json_text import parse_json
from trilane.common.quoting import printable
from trilane.common.units import MIB

VARIABLE = "LLAMA_BENCH"
GENERATED = 16  # tokens of a repeat: the program times them together
_ALL_LAYERS = "999"
_SHOWN = 500  # letters of what a failed run printed
_WARM, _FEW = 2, 16  # runs before, of at most so many tokens
_COMPUTED_TOKENS = 512  # at once, and before any are copied
_SIZE = re.compile(r"(\S+)\s+(model|KV|RS|compute|output) buffer size =\s*([\d.]+) MiB")
_REPACKED = "_REPACK"  # ends the name of a buffer that holds a second copy of weights that are mapped, too


class BenchContext(Protocol):
    """A loaded model with a KV cache of one sequence."""

    def compute_ns(self, tokens: int) -> int:
        """Compute ``tokens`` random tokens after those in the cache; the time in ns."""
        ...

    def fill(self, tokens: int) -> None:
        """Fill the cache with random tokens, up to ``tokens`` in all."""
        ...

    def keep(self, tokens: int) -> None:
        """Remove all but the first ``tokens`` from the cache."""
        ...

    def use_threads(self, threads: int) -> None:
        """Compute with ``threads`` CPU threads from now on."""
        ...


class BenchSettings(NamedTuple):
    """Settings with which a model is loaded.

    ``gpu``: onto a GPU, except the experts of the first ``cpu_layers`` layers; ``kv``: the format of keys and values;
    ``mapped``: from a mapped file, not from one that is read into pinned memory; ``copies``: fill the cache with copies
    of its first tokens, since computing thousands takes minutes.
    """

    context_tokens: int
    piece_tokens: int = 512
    gpu: bool = False
    cpu_layers: int = 0
    kv: str = "f16"
    mapped: bool = True
    copies: bool = False


OpenModel = Callable[[Path, BenchSettings], AbstractContextManager[BenchContext]]


class BenchPoint(NamedTuple):
    """A measurement: ``tokens`` computed at once, with ``depth`` others in the cache."""

    threads: int
    depth: int
    tokens: int


def time_points(context: BenchContext, points: Iterable[tuple[BenchPoint, int]]) -> dict[BenchPoint, list[int]]:
    """Times in ns of each point, ``points`` with their number of repeats; up to 16 tokens are computed twice before.

    The cache is empty at first, and grows or shrinks from point to point. A point that is listed again is timed again.
    """
    times: dict[BenchPoint, list[int]] = {}
    depth = 0
    for point, repeats in points:
        context.use_threads(point.threads)
        if point.depth > depth:
            context.fill(point.depth)
        elif point.depth < depth:
            context.keep(point.depth)
        depth = point.depth
        for _ in range(_WARM if point.tokens <= _FEW else 0):
            _once(context, point)
        times[point] = times.get(point, []) + [_once(context, point) for _ in range(repeats)]
    return times


def quartiles(times: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    low, middle, high = np.quantile(times, (0.25, 0.5, 0.75)).tolist()
    return low, middle, high


def _once(context: BenchContext, point: BenchPoint) -> int:
    ns = context.compute_ns(point.tokens)
    context.keep(point.depth)
    return ns


def bench_program() -> str | None:
    """The program named by the environment variable ``LLAMA_BENCH``, else ``llama-bench`` on PATH; None without one."""
    return os.environ.get(VARIABLE) or shutil.which("llama-bench")


def program_times(
    program: str, path: Path, settings: BenchSettings, points: Iterable[tuple[BenchPoint, int]]
) -> dict[BenchPoint, list[int]]:
    """Times in ns of each point, ``points`` with their number of repeats; the model is loaded for each point.

    The time of a single token is the mean of ``GENERATED`` tokens after ``depth`` others. Raises RefusedError, with the
    program's output, if it fails or prints anything but its times.
    """
    return {point: _times(program, path, settings, point, repeats) for point, repeats in points}


def _times(program: str, path: Path, settings: BenchSettings, point: BenchPoint, repeats: int) -> list[int]:
    prompt, generated = (0, GENERATED) if point.tokens == 1 else (point.tokens, 0)
    piece, where = str(settings.piece_tokens), ["-ngl", "0", "-dev", "none"]  # a GPU would compute long prompts
    if settings.gpu:
        where = ["-ngl", _ALL_LAYERS, "-ncmoe", str(settings.cpu_layers)]
    if not settings.mapped:
        where += ["-lm", "none"]
    printed = _run([
        program, "-m", str(path), "-o", "json", "-r", str(repeats), "-p", str(prompt), "-n", str(generated),
        "-d", str(point.depth), "-t", str(point.threads), "-b", piece, "-ub", piece, "-ctk", settings.kv,
        "-ctv", settings.kv, *where,
    ])
    samples = samples_ns(printed, program, prompt, generated)
    if len(samples) != repeats:
        raise RefusedError(f"{program}: expected {repeats} repeats, found {len(samples)}")
    return [ns // (generated or 1) for ns in samples]


def samples_ns(printed: str, program: str, prompt: int, generated: int) -> list[int]:
    """Times in ns of the repeats of the one test with ``prompt`` and ``generated`` tokens, from the program's output.

    Raises RefusedError for any other output.
    """
    document = parse_json(printed, f"{program}: what it printed", RefusedError)
    tests = document if isinstance(document, list) else []
    wanted = {"n_prompt": prompt, "n_gen": generated}
    matching = [test for test in tests if isinstance(test, dict) and wanted.items() <= test.items()]
    samples = matching[0].get("samples_ns") if len(matching) == 1 else None
    if not isinstance(samples, list) or not samples or not all(type(ns) is int and ns > 0 for ns in samples):
        raise RefusedError(
            f"{program}: expected JSON with the samples_ns of one test of {prompt} prompt tokens and {generated} "
            f"others, found {len(matching)} such tests{' without them' if matching else ''}; take a newer llama-bench"
        )
    return samples


def _run(command: Sequence[str]) -> str:
    """Standard output of the command. Raises RefusedError if it cannot be run, or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise RefusedError(f"{command[0]}: expected llama.cpp's program llama-bench: {error}") from None
    if done.returncode != 0:
        why = printable(done.stderr.strip()[-_SHOWN:])
        raise RefusedError(f"{' '.join(command)}: exit status {done.returncode}: {why}")
    return done.stdout


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
