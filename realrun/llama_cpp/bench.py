"""Benchmarks of llama.cpp: the interface of an engine that is timed, and timing with the program ``llama-bench``.

The engine is the library (``timed_run``) or, where only ``llama-bench`` is installed, that program and its JSON. The
library also times models of kernels, for which the program would load each model anew for each point.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from realrun.errors import RefusedError
from trilane.common.json_text import parse_json
from trilane.common.quoting import printable


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


_WARM, _FEW = 2, 16


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


VARIABLE = "LLAMA_BENCH"
GENERATED = 16  # tokens of a repeat: the program times them together
_ALL_LAYERS = "999"
_SHOWN = 500  # letters of what a failed run printed


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
