"""A validation of three policies on a tiny model, and its journal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trilane.study.journal import journal_of as any_journal
from trilane.study.validation.journal import VALIDATION, journal_of
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


def contents(path: Path) -> dict[str, tuple[Any, bytes]]:
    """The JSON and the bytes of the entries of a journal, by key."""
    with any_journal(path, VALIDATION) as journal:
        return {key: (content, journal.blob(key)) for key, content in journal.entries.items()}


def kept_in(path: Path, question: str) -> None:
    """A journal with one repetition of the microbenchmarks."""
    with journal_of(path, {"plan": question}) as journal:
        journal.add_samples(0, {("gate", 1): [5.0]})
