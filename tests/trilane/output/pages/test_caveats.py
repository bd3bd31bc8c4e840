"""Sentences on answers: the limit, and caveats, beside their numbers in JSON."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from trilane.engines.gains import Gain
from trilane.engines.question import Question
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.tune.tune import TuneCaveats, Tuning, tune
from trilane.output.pages.caveats import limit_text, tune_caveats, tune_record

NONE = TuneCaveats(short_window=False, measured=False, pinned=False, single_tensors_ms=None)


@pytest.mark.parametrize(("gains", "sentence"), [
    (
        [Gain("DRAM", "the CPU's memory", 0.171), Gain("PCIe", "the link", 0.02)],
        "the CPU's memory: DRAM 25% better makes it about 17% faster, PCIe 25% better 2%",
    ),
    (
        [Gain("PCIe", "the link", 0.2), Gain("DRAM", "the CPU's memory", -0.01)],
        "the link: PCIe 25% better makes it about 20% faster",
    ),
    (
        [Gain("PCIe", "the link", 0.01), Gain("DRAM", "the CPU's memory", 0.01)],
        "no part by itself: none of them 25% better makes it 2% faster",
    ),
    (
        [Gain("DRAM", "the CPU's memory", 0.03), Gain("PCIe", "the link", 0.01)],
        "no part by itself: DRAM 25% better gives most, 3%",
    ),
])
def test_the_sentence_names_the_first_part_and_what_the_second_gives(gains: list[Gain], sentence: str) -> None:
    assert limit_text(gains) == sentence


@cache
def tuned(**asked: Any) -> Tuning:
    question = Question("deepseek-v2-lite:2", gpu="rtx-3060", ram="ddr4-3200", threads=4, generated=16, **asked)
    return tune(TuneQuestion(question, kv=("f16",)))


def test_a_window_too_short_for_prompt_and_answer_is_a_caveat() -> None:
    short = tuned(prompt_tokens=600, window=100)
    assert short.caveats.short_window
    note = tune_caveats(short)[0]
    assert note.startswith("--context 100 has no room for a prompt of 600 tokens and 16 generated: ")
    assert "the answer has a window of 616" in note
    assert not tuned(prompt_tokens=600, window=616).caveats.short_window
    assert not tuned(prompt_tokens=600).caveats.short_window


@pytest.mark.parametrize(("caveats", "text"), [
    ({"single_tensors_ms": 0.4}, "save 0.40 ms a token at most, 2%"), ({"pinned": True}, "call it --no-mmap"),
    ({"measured": True}, "named parts say what fits, not how fast"),
])
def test_each_caveat_has_its_sentence(caveats: dict[str, Any], text: str) -> None:
    found = tuned(prompt_tokens=600)
    other = replace(found, best=replace(found.best, tpot_ms=20.0), caveats=NONE._replace(**caveats), machine_notes=())
    [note] = tune_caveats(other)
    assert note.endswith(text)


def test_json_has_the_sentences_behind_their_numbers() -> None:
    found = tuned(prompt_tokens=600)
    record = tune_record(found)
    names = [*record]
    assert names[names.index("limit") + 1] == "limited_by"
    assert record["limited_by"] == limit_text(found.gains)
    assert names[names.index("machine_notes") + 1] == "notes"
    assert record["notes"] == list(tune_caveats(found))
