"""CPU experts with weights in blocks: the native kernel on one core and on all, plain reading, and ggml's products."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from statistics import median
from threading import Barrier

import torch
from torch import Tensor

from benchmarks.cpu_rates import Rates, Work, experts, rates, ratio
from benchmarks.figures import Cell, Section, Target
from realrun.errors import RefusedError
from realrun.experts.ffn import BlockSwiGlu, ExpertShape
from realrun.llama_cpp.abi import has_library, library_version, llama_library
from realrun.machine.native_ffn import compiled
from realrun.machine.weight_formats import SUPER_BLOCK
from traces.models.catalogue import load_model

MODEL = "qwen3-235b-a22b"
FORMATS = {"q8_0": "q8_0", "q4_0": "q4_0", "q4_k": "ud-q4_k_xl-2025"}  # block -> a format of which all experts are
DOTS = {"q8_0": "ggml_vec_dot_q8_0_q8_0", "q4_0": "ggml_vec_dot_q4_0_q8_0", "q4_k": "ggml_vec_dot_q4_K_q8_K"}
TOKENS = (1, 2, 3, 4, 16)
WINDOW_TOKENS = 4  # rows up to which the kernel is to reach OVER_READING
OVER_READING = 0.6
QUANTISED_BYTES = 1.25  # of a vector, more than q8_0 and q8_K take a value


def measure_blocks(rounds: int, cores: set[int]) -> Section:
    """One row for each block and number of rows; on the caller's core, and on all ``cores`` at once."""
    rows: list[list[Cell]] = []
    targets: list[Target] = []
    for block, name in FORMATS.items():
        shape = ExpertShape.of(load_model(f"{MODEL}@{name}"))
        buffers = experts(shape.layout)
        for tokens in TOKENS:
            works = {"native": native_work(shape, tokens)}
            every = on_all(cores, works, buffers, rounds)
            if has_library():
                works["ggml"] = ggml_work(block, shape, tokens)
            one = rates(works, buffers, rounds)
            share = every["native"] / every["reading"]
            rows.append([block, tokens, *_of_one(one), every["reading"], every["native"], share])
            if tokens <= WINDOW_TOKENS:
                targets.append(Target(f"{block}, {tokens} rows, over reading", "times", OVER_READING, share))
    columns = ("block", "rows", "reading", "native", "over reading", "ggml", "over reading",
               f"reading, {len(cores)} cores", f"native, {len(cores)} cores", "over reading")
    return Section("CPU expert in blocks", columns, rows, targets, _notes(rounds, cores))


def _of_one(found: Rates) -> list[Cell]:
    """Columns of one core."""
    cells: list[Cell] = [median(found["reading"])]
    for name in ("native", "ggml"):
        cells += [median(found[name]), ratio(found, name, "reading")] if name in found else [None, None]
    return cells


def on_all(cores: set[int], works: Mapping[str, Work], buffers: Iterator[Tensor], rounds: int) -> dict[str, float]:
    """GB/s of all cores together: each has a thread of its own that computes whole experts, and all begin together."""
    together = Barrier(len(cores))
    given = [[next(buffers) for _ in range((rounds + 1) * (len(works) + 1))] for _ in cores]

    def on_one(core: int, own: list[Tensor]) -> Rates:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})
        torch.set_num_threads(1)
        return rates(works, iter(own), rounds, together.wait)

    with ThreadPoolExecutor(len(cores)) as pool:
        found = list(pool.map(on_one, sorted(cores), given))
    return {name: sum(median(each[name]) for each in found) for name in ("reading", *works)}


def native_work(shape: ExpertShape, tokens: int) -> Work:
    """One call of the native kernel, for an expert whose parts are found before."""
    kernel, layout = shape.kernel, shape.layout
    assert isinstance(kernel, BlockSwiGlu)
    if kernel.ffn is None:
        raise RefusedError("CPU kernel: expected one that is compiled; install gcc")
    ffn, blocks, hidden = kernel.ffn, kernel.blocks, layout.parts[1].shape[0]
    x, choices, weights = torch.randn(tokens, hidden).bfloat16(), torch.arange(tokens), torch.rand(tokens)
    out, parts = torch.empty(tokens, hidden), cache(lambda buffer: tuple(layout.views(buffer).values()))

    def work(buffer: Tensor) -> None:
        ffn(*parts(buffer), x, choices, weights, 1, out, scattered=False, threads=1, blocks=blocks)

    return work


def ggml_work(block: str, shape: ExpertShape, tokens: int) -> Work:
    """The products of an expert by ggml's function for one row and one vector, whose values do not matter."""
    rows = ctypes.CDLL(str(compiled(Path(__file__).parent / "ggml_rows.c"))).products
    rows.restype, rows.argtypes = None, (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int,
        ctypes.c_int64, ctypes.c_void_p,
    )
    library = llama_library()
    library.ggml_cpu_init()
    dot = ctypes.cast(getattr(library, DOTS[block]), ctypes.c_void_p)
    form = shape.kernel.blocks  # type: ignore[attr-defined]
    matrices = [(part.shape[0], form.weights_of(part.shape[1]), part.shape[1]) for part in shape.layout.parts]
    most = int(max(columns for _, columns, _ in matrices) * QUANTISED_BYTES) + SUPER_BLOCK
    vectors, out = torch.full((tokens, most), 16, dtype=torch.uint8), torch.empty(1)

    def work(buffer: Tensor) -> None:
        for view, (count, columns, row_bytes) in zip(shape.layout.views(buffer).values(), matrices, strict=True):
            rows(dot, view.data_ptr(), count, columns, row_bytes, vectors.data_ptr(), tokens, most, out.data_ptr())

    return work


def _notes(rounds: int, cores: set[int]) -> list[str]:
    notes = [
        f"GB/s of blocks, experts of {MODEL}, which take turns with plain reading; a weight takes 8.5 bits in q8_0 and "
        "4.5 in q4_0 and q4_k, so that 1 GB/s of them holds as many weights as 1.9 and 3.6 GB/s of bfloat16",
        f"by CPU time, median of {rounds} rounds; {len(cores)} cores: each computes whole experts at the same time as "
        "the others, which share the memory; targets are of all cores",
    ]
    if has_library():
        (package, number), = library_version().items()
        notes.append(f"ggml: the products alone, by ggml_vec_dot of {package} {number}, row by row and token by token")
    return notes
