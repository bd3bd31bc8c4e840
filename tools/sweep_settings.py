"""Every combination of threads, piece and KV format, measured with llama.cpp on this machine, to check ``tune`` by.

``python -m tools.sweep_settings MODEL.gguf FILE.csv`` on a quiet machine writes a row for each: milliseconds of a token
(the median of sixteen) and of a prompt. Of a file that is there, each time stays where it was shorter: what disturbs a
run makes it longer.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from realrun.llama_cpp.bench import RunSettings, timed_in
from realrun.llama_cpp.model import LlamaModel
from realrun.machine.cores import physical_cores
from trilane.common.files import atomic_path

PIECES, KV_FORMATS = (64, 128, 256, 512), ("f16", "q8_0", "q4_0")
PROMPT_TOKENS, GENERATED_TOKENS = 512, 16
SETTINGS = ("model", "threads", "piece_tokens", "kv", "prompt_tokens", "generated_tokens")
TIMES = ("token_ms", "prompt_ms")


def settings_of(cores: int) -> Iterator[RunSettings]:
    """All combinations, on up to so many cores."""
    for threads, piece, kv in product(range(1, cores + 1), PIECES, KV_FORMATS):
        window = PROMPT_TOKENS + GENERATED_TOKENS
        yield RunSettings(threads, piece, kv, window, PROMPT_TOKENS, GENERATED_TOKENS)


def measured(model: Path, cores: int) -> Iterator[dict[str, str]]:
    """A row for each combination."""
    with LlamaModel(model) as loaded:
        for own in settings_of(cores):
            run = timed_in(loaded, own)
            settings = (model.stem, own.threads, own.piece_tokens, own.kv, own.prompt_tokens, own.generated_tokens)
            times = (f"{run.tpot_ms:.3f}", f"{run.ttft_ms:.1f}")
            yield dict(zip((*SETTINGS, *TIMES), map(str, (*settings, *times)), strict=True))


def shorter(row: dict[str, str], known: dict[tuple[str, ...], dict[str, str]]) -> dict[str, str]:
    """A row with the shorter of its times and those that are known of the same settings."""
    other = known.get(tuple(row[name] for name in SETTINGS), row)
    return {**row, **{name: min(row[name], other[name], key=float) for name in TIMES}}


def main(model: str, target: str) -> None:
    """Measure and write."""
    path = Path(target)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {tuple(row[name] for name in SETTINGS): row for row in csv.DictReader(lines)}
    rows = [shorter(row, known) for row in measured(Path(model), len(physical_cores()))]
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, (*SETTINGS, *TIMES), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
