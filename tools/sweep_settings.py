"""Every combination of threads, piece and KV format, measured with llama.cpp on this machine, to check ``tune`` by.

``python -m tools.sweep_settings MODEL.gguf FILE.csv`` on a quiet machine writes a row for each: milliseconds of a token
(the median of sixteen) and of a prompt.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from realrun.llama_cpp.model import LlamaModel
from realrun.llama_cpp.timed_run import RunSettings, timed_in
from realrun.machine.cores import physical_cores
from trilane.common.files import atomic_path

PIECES, KV_FORMATS = (64, 128, 256, 512), ("f16", "q8_0", "q4_0")
PROMPT_TOKENS, GENERATED_TOKENS = 512, 16
COLUMNS = ("model", "threads", "piece_tokens", "kv", "prompt_tokens", "generated_tokens", "token_ms", "prompt_ms")


def settings_of(cores: int) -> Iterator[RunSettings]:
    """All combinations, on up to so many cores."""
    for threads, piece, kv in product(range(1, cores + 1), PIECES, KV_FORMATS):
        window = PROMPT_TOKENS + GENERATED_TOKENS
        yield RunSettings(threads, piece, kv, window, PROMPT_TOKENS, GENERATED_TOKENS)


def main(model: str, target: str) -> None:
    """Measure and write."""
    with LlamaModel(Path(model)) as loaded, atomic_path(Path(target)) as path, path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for own in settings_of(len(physical_cores())):
            run = timed_in(loaded, own)
            settings = (own.threads, own.piece_tokens, own.kv, own.prompt_tokens, own.generated_tokens)
            writer.writerow([Path(model).stem, *settings, f"{run.tpot_ms:.3f}", f"{run.ttft_ms:.1f}"])


if __name__ == "__main__":
    main(*sys.argv[1:])
