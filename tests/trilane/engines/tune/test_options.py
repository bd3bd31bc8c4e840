"""The arguments that are printed exist in llama.cpp: b11549, whose list was read on 2026-11-23."""

from __future__ import annotations

import pytest

from trilane.engines.question import Question
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import tune

KNOWN = {  # ggml-org/llama.cpp tools/server/README.md at 00dc805
    "-m": "--model", "-ngl": "--n-gpu-layers", "--n-cpu-moe": "--n-cpu-moe", "--moe-cache-mib": "--moe-cache-mib",
    "-c": "--ctx-size", "-fa": "--flash-attn", "-b": "--batch-size", "-ub": "--ubatch-size", "-t": "--threads",
    "-ctk": "--cache-type-k", "-ctv": "--cache-type-v", "-np": "--parallel", "--load-mode": "--load-mode",
    "--spec-type": "--spec-type", "--spec-draft-n-max": "--spec-draft-n-max",
}


def printed() -> set[str]:
    """The options of all lines that a question leads to, on a card, with a cache of experts and with drafts."""
    asked = Question(
        model="qwen3-30b-a3b", gpu="rtx-3060", ram="ddr4-3200", prompt_tokens=2000, generated=16, threads=8
    )
    found = tune(TuneQuestion(asked, "prompt", ("f16", "q8_0"), draft_acceptance=0.95))
    assert found.drafts is not None
    rivals = (rival.tuned for rival in (found.usual, found.runner_up, found.other_placement) if rival)
    lines = [found.best.command, found.drafts.command or "", *(one.command for one in rivals)]
    return {word for line in lines for word in line.split() if word.startswith("-")}


def test_every_option_is_known() -> None:
    assert printed() == set(KNOWN)


@pytest.mark.llama
def test_every_option_is_in_the_library() -> None:
    """Its long name; short ones may be parts of other texts."""
    library = pytest.importorskip("xllamacpp.xllamacpp")
    with open(library.__file__, "rb") as file:
        held = file.read()
    missing = [name for name in KNOWN.values() if f"{name}\0".encode() not in held]
    assert missing == []
