"""Bytes of weights that a CPU expert reads in a second: the native kernel, torch, and plain reading, in turn.

``python -m benchmarks.cpu_kernel [--write]``; ``--write`` keeps the figures next to this file, in ``cpu_kernel.json``
and ``cpu_kernel.md``. One thread on one core, by its CPU time, so that it counts little what else the machine does. The
experts are DeepSeek-V2-Lite's, and lie in more memory than caches hold.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import cycle
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.__main__ import pin
from benchmarks.figures import Cell, Section, Target, measured_by, report
from realrun.errors import RefusedError
from realrun.experts.ffn import ExpertShape, NativeSwiGlu, SwiGlu, weighted_ffn
from realrun.experts.store import ExpertLayout, random_store
from realrun.machine.native_ffn import SOURCE, NativeFfn, NotCompiledError, loaded
from realrun.machine.pinned import plain
from traces.models.catalogue import load_model

HERE = Path(__file__).parent
MODEL = "deepseek-v2-lite"
BYTES = 690_000_000  # of all experts
ROUNDS = 25
TOKENS = (1, 2, 4, 8, 16, 32, 64)
BLOCK_TOKENS = (1, 4, 16)
OVER_TORCH = {1: 2.0, 4: 1.0, 16: 1.0}
OVER_READING = 0.7
LESS = (  # than this processor has, so that the kernels for others are measured too
    ("-mno-avx512bf16",),
    ("-mno-avx512f",),
    ("-mno-avx512f", "-mno-avx2", "-mno-fma", "-mno-avx"),
)
Times = Mapping[str, list[float]]


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_kernel", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write cpu_kernel.json and cpu_kernel.md")
    given = parser.parse_args()
    where = measured_by("benchmarks.cpu_kernel", sys.argv[1:])
    pin()
    torch.set_num_threads(1)
    report(where, [measure(ROUNDS), measure_blocks(ROUNDS)], HERE / "cpu_kernel", "CPU expert kernel", given.write)


def measure(rounds: int) -> Section:
    """One row for each number of tokens; targets are of the kernel for this processor."""
    shape = load_model(MODEL)
    layout = ExpertLayout.from_shape(shape.hidden, shape.expert_width, torch.bfloat16)
    experts = _experts(layout)
    kernels = {"torch": SwiGlu(), **{name: NativeSwiGlu(ffn=ffn) for name, ffn in _native().items()}}
    rows: list[list[Cell]] = []
    targets: list[Target] = []
    own = list(kernels)[1]
    for tokens in TOKENS:
        rates = _rates(kernels, layout, experts, tokens, rounds)
        over_torch, over_reading = (_ratio(rates, own, other) for other in ("torch", "reading"))
        first = [median(rates[name]) for name in ("reading", "torch", own)]
        others = [median(rates[name]) for name in kernels if name not in ("torch", own)]
        rows.append([tokens, *first, over_torch, over_reading, *others])
        if tokens in OVER_TORCH:
            targets.append(Target(f"{own} over torch, batch {tokens}", "times", OVER_TORCH[tokens], over_torch))
    targets.append(Target(f"{own} over plain reading, batch 1", "times", OVER_READING, float(str(rows[0][5]))))
    columns = ("tokens", "plain reading", "torch", own, "over torch", "over reading", *list(kernels)[2:])
    notes = (
        f"GB/s of weights, median of {rounds} rounds in which all take turns; ratios: median of those within a round",
        f"one thread, CPU time; experts of {layout.size_bytes / 1e6:.1f} MB ({MODEL}) in turn, {BYTES / 1e6:.0f} MB",
        f"plain reading: torch.sum of the same bytes as int64. torch {torch.__version__}: SwiGlu of expert_ffn.py",
        "the other native kernels leave out instructions that this processor has, for processors without them",
    )
    return Section("CPU expert of bfloat16", columns, rows, targets, notes)


def measure_blocks(rounds: int) -> Section:
    """Weights in blocks, by the kernel for this processor."""
    names, rates = ("q8_0", "q4_0"), []
    for name in names:
        shape = ExpertShape.of(load_model(f"{MODEL}@{name}"))
        experts, kernels = _experts(shape.layout), {name: shape.kernel}
        rates.append([_rates(kernels, shape.layout, experts, tokens, rounds) for tokens in BLOCK_TOKENS])
    rows: list[list[Cell]] = []
    for tokens, *each in zip(BLOCK_TOKENS, *rates, strict=True):
        found = [(median(times[name]), _ratio(times, name, "reading")) for name, times in zip(names, each, strict=True)]
        rows.append([tokens, *(cell for pair in found for cell in pair)])
    columns = ("tokens", *(column for name in names for column in (name, f"{name} over reading")))
    notes = (
        "GB/s of blocks, as above; a weight takes 8.5 bits in q8_0 and 4.5 in q4_0, so that 1 GB/s of them holds as "
        "many weights as 1.9 and 3.6 GB/s of bfloat16",
    )
    return Section("CPU expert in blocks", columns, rows, (), notes)


def _experts(layout: ExpertLayout) -> Iterator[Tensor]:
    count = BYTES // layout.size_bytes
    store = random_store(layout, 1, count, plain)
    return cycle([store.buffer(0, expert) for expert in range(count)])


def _native() -> dict[str, NativeFfn]:
    """This processor's kernel first, without limit to its rows. Raises RefusedError where nothing compiles."""
    try:
        kernels = [loaded()]
    except NotCompiledError as error:
        raise RefusedError(f"CPU kernel: {error}") from error
    for flags in LESS:
        with suppress(NotCompiledError):  # of another kind of processor
            kernels.append(loaded(SOURCE, flags))
    for kernel in kernels:
        kernel.only_up_to = max(TOKENS)
    return {kernel.name: kernel for kernel in kernels}


def _rates(
    kernels: Mapping[str, SwiGlu], layout: ExpertLayout, experts: Iterator[Tensor], tokens: int, rounds: int
) -> Times:
    """GB/s of each, by round."""
    hidden = layout.parts[1].shape[0]  # rows of down_proj
    x, choices, weights = torch.randn(tokens, hidden).bfloat16(), torch.arange(tokens), torch.rand(tokens)
    out = torch.empty(tokens, hidden)
    works: dict[str, Callable[[Tensor], object]] = {"reading": lambda buffer: buffer.view(torch.int64).sum()}
    for name, kernel in kernels.items():
        works[name] = lambda buffer, kernel=kernel: weighted_ffn(  # type: ignore[misc]
            kernel, layout.views(buffer), x, choices, weights, 1, out
        )
    rates: dict[str, list[float]] = {name: [] for name in works}
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for name, work in works.items():
                rates[name].append(layout.size_bytes / _ns(work, next(experts)))
    return {name: found[1:] for name, found in rates.items()}


def _ns(work: Callable[[Tensor], object], buffer: Tensor) -> int:
    begin = time.thread_time_ns()
    work(buffer)
    return max(1, time.thread_time_ns() - begin)


def _ratio(rates: Times, one: str, other: str) -> float:
    return median(mine / its for mine, its in zip(rates[one], rates[other], strict=True))


if __name__ == "__main__":
    main()
