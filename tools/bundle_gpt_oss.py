"""Makes the bundled traces of gpt-oss-20b: ``python -m tools.bundle_gpt_oss FOLDER -o traces/bundled``.

The folder holds generated tokens of AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, packed into arrays:
``gpt_oss_20b_decode.npz`` with ``expert_ids`` and ``weights`` [tokens, 24, 4], by descending weight, and
``sequence_start`` [sequences + 1]; ``sequences.json`` with ``dataset``, ``category``, ``row``, ``repetition`` (the text
fell into a loop) and ``tokens`` of each sequence.

Prompts were not recorded: the first tokens of each answer stand for its prompt, and the trace says so. A question that
is in several data sets is taken once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

from traces.file import CALIBRATION, write_trace
from traces.layout import DECODE, PREFILL
from traces.models.catalogue import load_model
from traces.trace import Trace

MODEL = "gpt-oss-20b"
SEQUENCES, PROMPT_TOKENS, GENERATED_TOKENS = 40, 64, 192  # of each trace
MOST_ALIKE = 0.6  # of the choices for the first tokens; those of a question asked twice share more
SEED = 17
PROVENANCE: Mapping[str, Any] = {
    "model": "openai/gpt-oss-20b",
    "source": "github.com/AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, commit "
    "72b368f60045221f21eeb65debb27d58de92e565",
    "licence": "Apache-2.0; changed: a choice of sequences, cut, in Trilane's format",
    "sampling": "greedy, MXFP4 checkpoint, transformers; sequences that fell into loops were left out",
    "text": "generated",
    "synthetic_prompts": f"prompts were not recorded: the first {PROMPT_TOKENS} generated tokens stand for them",
    "scores": "not recorded but for the weights of the chosen experts",
    "noisy_forecast_recall": [0.88, 0.82, 0.77],
}


class RecordedTokens(NamedTuple):
    """All sequences, one after the other."""

    ids: NDArray[np.uint8]  # [tokens, layers, k]
    weights: NDArray[np.float16]
    start: NDArray[np.int64]  # [sequences + 1]
    facts: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> RecordedTokens:
        """The two files of ``folder``."""
        arrays = np.load(folder / "gpt_oss_20b_decode.npz")
        facts = json.loads((folder / "sequences.json").read_text(encoding="utf-8"))
        return cls(arrays["expert_ids"], arrays["weights"], arrays["sequence_start"], facts)

    def rows(self, sequence: int) -> slice:
        """The tokens of a sequence that a trace has."""
        first = int(self.start[sequence])
        return slice(first, first + PROMPT_TOKENS + GENERATED_TOKENS)


def choose(recorded: RecordedTokens, count: int) -> tuple[list[int], list[int]]:
    """``count`` sequences to evaluate, and as many others to calibrate on: in turn one of every data set."""
    by_data_set: dict[str, list[int]] = {}
    for number in np.random.default_rng(SEED).permutation(len(recorded.facts)).tolist():
        fact = recorded.facts[number]
        if not fact["repetition"] and fact["tokens"] >= PROMPT_TOKENS + GENERATED_TOKENS:
            by_data_set.setdefault(fact["dataset"], []).append(number)
    turns = zip_longest(*(by_data_set[name] for name in sorted(by_data_set)))
    different = _different(recorded, [number for number in chain(*turns) if number is not None], 2 * count)
    return different[::2], different[1::2]


def _different(recorded: RecordedTokens, candidates: Sequence[int], count: int) -> list[int]:
    """The first ``count`` sequences that begin otherwise than those before them."""
    kept: list[int] = []
    begins: list[NDArray[np.uint8]] = []
    for number in candidates:
        begin = recorded.ids[recorded.rows(number)][:PROMPT_TOKENS]
        alike = ((begin[..., :, None] == other[..., None, :]).any(axis=-1).mean() for other in begins)
        if len(kept) < count and not any(share > MOST_ALIKE for share in alike):
            kept.append(number)
            begins.append(begin)
    return kept


def trace_of(recorded: RecordedTokens, sequences: Sequence[int]) -> Trace:
    """The trace of some sequences. Raises TraceError for arrays that are not of the model."""
    length = PROMPT_TOKENS + GENERATED_TOKENS
    rows = np.concatenate([np.r_[recorded.rows(number)] for number in sequences])
    phase = np.repeat([PREFILL, DECODE], [PROMPT_TOKENS, GENERATED_TOKENS]).astype(np.uint8)
    tensors = {
        "sequence": np.repeat(np.arange(len(sequences), dtype=np.int32), length),
        "position": np.tile(np.arange(length, dtype=np.int32), len(sequences)),
        "phase": np.tile(phase, len(sequences)),
        "topk_ids": recorded.ids[rows].astype(np.int16),
        "topk_weights": recorded.weights[rows],
    }
    domains = [recorded.facts[number]["dataset"] for number in sequences]
    return Trace.from_tensors(load_model(MODEL), tensors, {**PROVENANCE, "domains": domains})


def main(folder: Path, output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER")]) -> None:
    """Write both traces."""
    recorded = RecordedTokens.read(folder)
    for ending, sequences in zip(("", CALIBRATION), choose(recorded, SEQUENCES), strict=True):
        write_trace(trace_of(recorded, sequences), output / f"{MODEL}{ending}.safetensors")


if __name__ == "__main__":
    typer.run(main)
