"""llama.cpp's own program ``llama-bench``, in place of the library: it is run, and its JSON is read."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from realrun.errors import RefusedError
from realrun.llama_cpp.bench_engine import BenchPoint, BenchSettings
from trilane.common.json_text import parse_json
from trilane.common.quoting import printable

VARIABLE = "LLAMA_BENCH"
GENERATED = 16  # tokens of a repeat: the program times them together
_ALL_LAYERS = "999"
_SHOWN = 500  # letters of what a failed run printed


def bench_program() -> str | None:
    """That of the environment variable ``LLAMA_BENCH``, or the one on the path."""
    return os.environ.get(VARIABLE) or shutil.which("llama-bench")


def program_times(
    program: str, path: Path, settings: BenchSettings, points: Iterable[tuple[BenchPoint, int]]
) -> dict[BenchPoint, list[int]]:
    """Times in ns of each point, as often as stated; one of a single token is a part of ``GENERATED`` ones behind
    ``depth`` others. The model is loaded for each point.

    Raises RefusedError with what the program printed where it fails or prints anything but its times.
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
    """Times of the repeats of the one test with so many tokens. Raises RefusedError for any other output."""
    document = parse_json(printed, f"{program}: what it printed", RefusedError)
    tests = document if isinstance(document, list) else []
    wanted = {"n_prompt": prompt, "n_gen": generated}
    found = [each for each in tests if isinstance(each, dict) and wanted.items() <= each.items()]
    samples = found[0].get("samples_ns") if len(found) == 1 else None
    if not isinstance(samples, list) or not samples or not all(type(ns) is int and ns > 0 for ns in samples):
        raise RefusedError(
            f"{program}: expected JSON with the samples_ns of one test of {prompt} prompt tokens and {generated} "
            f"others, found {len(found)} such tests{' without them' if found else ''}; take a newer llama-bench"
        )
    return samples


def _run(command: Sequence[str]) -> str:
    """Standard output. Raises RefusedError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise RefusedError(f"{command[0]}: expected llama.cpp's program llama-bench: {error}") from None
    if done.returncode != 0:
        why = printable(done.stderr.strip()[-_SHOWN:])
        raise RefusedError(f"{' '.join(command)}: exit status {done.returncode}: {why}")
    return done.stdout
