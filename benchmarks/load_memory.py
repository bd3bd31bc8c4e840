"""Memory at load, ours and llama.cpp's, of eight families: ``python -m benchmarks.load_memory`` writes the page."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.kit.loadable_ggufs import FAMILIES, TWICE_AS_DEEP, write_loadable
from tests.trilane.engines.test_memory import KV_TYPES, SETTINGS, planned
from traces.models.gguf_model import read_gguf_model
from trilane.engines.load_memory import LoadSetting, load_memory

PAGE = Path(__file__).parents[1] / "docs" / "validation" / "load-memory.md"
MACHINES = {
    "GPU": (True, 0), "GPU, experts of 2 blocks on the host": (True, 2), "GPU, all experts on the host": (True, 99),
    "CPU": (False, 0),
}
HEAD = """# Memory at load

The memory that llama.cpp (build 11549, package xllamacpp) plans for a model and a setting, compared with that which
`trilane fit` plans ([formulas](../../trilane/engines/load_memory.py)). The models are of [eight
families](../../tests/kit/loadable_ggufs.py), with their real widths but only a few layers, experts in q4_0 and the rest
in q8_0. llama.cpp plans without allocating (`no_alloc`); the GPU is a [fake](../../tests/kit/llama_load.py) that can
compute everything, with the alignment of CUDA's buffers. No real GPU was used: what CUDA adds, such as its context and
its own pools, is part of the reserve. This page is written by `python -m benchmarks.load_memory`.

Settings: contexts of 512, 5,000 and 16,384 tokens; pieces (`-ub`) of 128, 512 and 2,048 tokens; a KV cache in f16, q8_0
and q4_0 with flash attention, and in f16 without; one sequence, and four.

## Largest errors

Each row has the largest error over its settings. If layers have different kinds of attention and experts are copied to
the GPU, llama.cpp's plan leaves a hole in the buffer, which the formulas follow. In a borderline case, where a mask is
nearly as large as a row of hidden states, they count a hole that may not be there. This is the +47 % of `gemma4`, twice
as deep: with pieces of 128, 5,000 tokens and f16, llama.cpp's buffer has 285 MiB; with q8_0 it has the hole, and 418.

| family | machine | flash attention | settings | KV cache | compute buffer |
| --- | --- | --- | ---: | ---: | ---: |
"""
SOME = """
## Some settings

MiB, with flash attention, on a GPU.

| family | context | piece | cache | KV cache, ours | llama.cpp's | compute buffer, ours | llama.cpp's |
| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: |
"""
NAMES = {1: "f16", 8: "q8_0", 2: "q4_0"}


def main() -> None:
    """Write the page: our memory next to llama.cpp's own plans, of every family on every machine."""
    largest, some = "", ""
    with tempfile.TemporaryDirectory() as folder:
        for family in (*FAMILIES, *TWICE_AS_DEEP):
            file = write_loadable(family, Path(folder) / "m.gguf")
            for machine, (gpu, cpu_layers) in MACHINES.items():
                rows = list(compared(file, gpu, cpu_layers))
                for flash in (1, 0):
                    its = [row for row in rows if row[0]["fa"] == flash]
                    errors = [max((row[at] / row[at + 1] - 1 for row in its), key=abs) for at in (1, 3)]
                    cells = " | ".join(f"{100 * error:+.1f} %" for error in errors)
                    largest += f"| {family} | {machine} | {'on' if flash else 'off'} | {len(its)} | {cells} |\n"
                if machine == "GPU" and family not in TWICE_AS_DEEP:
                    some += "".join(shown(family, *row) for row in rows if row[0]["fa"] and row[0]["ub"] == 512)
    PAGE.write_text(HEAD + largest + SOME + some, encoding="utf-8")


def compared(file: Path, gpu: bool, cpu_layers: int) -> Iterator[tuple[dict[str, int], float, float, float, float]]:
    """Settings with the MiB of the KV cache, ours and llama.cpp's, and of the compute buffer."""
    shape = read_gguf_model(file)
    for asked, said in zip(SETTINGS, planned(file, gpu, cpu_layers), strict=True):
        on_host = sum(block < cpu_layers for block in shape.expert_blocks)
        setting = LoadSetting(asked["c"], asked["np"], asked["ub"], bool(asked["fa"]), cpu_layers=on_host, gpu=gpu)
        ours = load_memory(replace(shape, kv_bits=KV_TYPES[asked["kv"]]), setting)
        yield asked, ours.kv_bytes / 2**20, sum(said["cache"]), ours.compute_bytes / 2**20, said["compute"][0]


def shown(family: str, asked: dict[str, int], *sizes: float) -> str:
    sequences = f" / {asked['np']} sequences" if asked["np"] > 1 else ""
    numbers = " | ".join(f"{size:.2f}" for size in sizes)
    return f"| {family} | {asked['c']:,}{sequences} | {asked['ub']} | {NAMES[asked['kv']]} | {numbers} |\n"


if __name__ == "__main__":
    main()
