"""Bytes of weights that a CPU expert reads in a second: the native kernel, torch, and plain reading, in turn; also in
blocks of 8 and 4 bits.

``python -m benchmarks.cpu_kernel [--write]``; ``--write`` keeps the figures next to this file, in ``cpu_kernel.json``
and ``cpu_kernel.md``. One thread on one core, by its CPU time, so that it counts little what else the machine does; in
blocks also one on each core. The experts lie in more memory than caches hold.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

from benchmarks.__main__ import pin
from benchmarks.cpu_blocks import measure_blocks
from benchmarks.cpu_rates import BYTES, expert_work, experts, rates, ratio
from benchmarks.figures import Cell, Section, Target, measured_by, report
from realrun.errors import RefusedError
from realrun.experts.ffn import NativeSwiGlu, SwiGlu
from realrun.experts.store import ExpertLayout
from realrun.machine.native_ffn import SOURCE, NativeFfn, NotCompiledError, loaded
from traces.models.catalogue import load_model

HERE = Path(__file__).parent
MODEL = "deepseek-v2-lite"
ROUNDS = 25
TOKENS = (1, 2, 4, 8, 16, 32, 64)
OVER_TORCH = {1: 2.0, 4: 1.0, 16: 1.0}
OVER_READING = 0.7
LESS = (  # than this processor has, so that the kernels for others are measured too
    ("-mno-avx512bf16",),
    ("-mno-avx512f",),
    ("-mno-avx512f", "-mno-avx2", "-mno-fma", "-mno-avx"),
)


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_kernel", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write cpu_kernel.json and cpu_kernel.md")
    given = parser.parse_args()
    where = measured_by("benchmarks.cpu_kernel", sys.argv[1:])
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
    pin()
    torch.set_num_threads(1)
    sections = [measure(ROUNDS), measure_blocks(ROUNDS, cores)]
    report(where, sections, HERE / "cpu_kernel", "CPU expert kernel", given.write)


def measure(rounds: int) -> Section:
    """One row for each number of tokens; targets are of the kernel for this processor."""
    shape = load_model(MODEL)
    layout = ExpertLayout.from_shape(shape.hidden, shape.expert_width, torch.bfloat16)
    buffers = experts(layout)
    kernels = {"torch": SwiGlu(), **{name: NativeSwiGlu(ffn=ffn) for name, ffn in _native().items()}}
    rows: list[list[Cell]] = []
    targets: list[Target] = []
    own = list(kernels)[1]
    for tokens in TOKENS:
        found = rates({name: expert_work(kernel, layout, tokens) for name, kernel in kernels.items()}, buffers, rounds)
        over_torch, over_reading = (ratio(found, own, other) for other in ("torch", "reading"))
        first = [median(found[name]) for name in ("reading", "torch", own)]
        others = [median(found[name]) for name in kernels if name not in ("torch", own)]
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


if __name__ == "__main__":
    main()
