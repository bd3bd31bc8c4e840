"""Tiny questions of verbs for real machines, and a validation of three policies with its journal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.machine.hardware import Hardware
from trilane.study.journal import journal_of as any_journal
from trilane.study.validation.journal import VALIDATION, journal_of
from trilane.study.validation.validate import Validated

LOCKED = "page-locked 28.80 GB of host memory in 4.1 s, 7.02 GB/s"  # as a GPU's machine says
TINY = ("trace=mini-moe:2", "model=null", "prompt_tokens=4", "generated_tokens=2", "cached_share=0.3")
SETS = tuple(word for change in TINY for word in ("--set", change))
PROFILE = (
    "--lanes", "host-lanes", "--quick", "--model", "mini-moe:2", "--batch", "1", "--context", "4", "--prompt", "2",
    "--policies", "fiddler",
)


def as_if_quiet(hardware: Hardware) -> Hardware:
    """A machine measured in no time, whose threads may have taken long to wake up because others were at work."""
    return hardware.with_numbers({"cpu.first_expert_ns": 10_000})


# --- a validation and its journal -------------------------------------------------------------------------------------

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
