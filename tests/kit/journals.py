"""A validation of three policies on a tiny model, and its journal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trilane.study.validation.journal import journal_of
from trilane.study.validation.validate import Validated

PLAN = """
repeats: 2
scenario: {trace: "mini-moe:2", model: null, prompt_tokens: 4, generated_tokens: 2, cached_share: 0.5}
policies: [on-demand, smoe, fiddler]
"""
ROUND = ["on-demand", "smoe", "fiddler"]
WARM = [policy for policy in ROUND for _ in ("to warm up", "to count")]  # each once before its first measured run
ALL = WARM + ROUND[::-1]

Validate = Callable[..., Validated]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def kept_in(folder: Path, question: str) -> None:
    """A journal with one repetition of the microbenchmarks."""
    with journal_of(folder, {"plan": question}) as journal:
        journal.add_samples(0, {("gate", 1): [5.0]})
