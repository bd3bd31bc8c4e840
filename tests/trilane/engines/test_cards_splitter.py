"""The first split over several cards for which they have room, against a search through all of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trilane.engines.cards_splitter import CardsSplitter
from trilane.engines.question import Question
from trilane.engines.speed import EngineSpeed

MODELS = ("gpt-oss-120b@mxfp4", "qwen3-235b-a22b@q4_k_m", "gemma-4-26b-a4b@q5_k_m", "deepseek-v3@q4_k_m",
          "qwen3-next-80b-a3b@q4_k_m", "llama-4-scout@q4_k_m", "olmoe-1b-7b@q8_0")
CARDS = ("2x-rtx-3060", "rtx-3090+rtx-3060", "4x-rtx-4060", "rtx-5090+rtx-2070-super", "2x-rx-7900-xtx")


def splitter_of(question: Question) -> CardsSplitter:
    splitter = EngineSpeed.asked(question, question.model_shape, question.load_machine()).splitter
    assert isinstance(splitter, CardsSplitter)
    return splitter


def first_of_all(splitter: CardsSplitter) -> int:
    """Place of the first split for which the cards have room, or of the last one."""
    fitting = (place for place, split in enumerate(splitter.splits)
               if all(card.missing_bytes <= 0 for card in splitter.memory(split).cards))
    return next(fitting, len(splitter.splits) - 1)


@settings(max_examples=40)
@given(
    model=st.sampled_from(MODELS), gpu=st.sampled_from(CARDS),
    tokens=st.integers(1, 40_000), batch=st.sampled_from([1, 4]), ubatch=st.sampled_from([None, 128, 4096]),
)
def test_the_first_split_with_room_is_that_of_a_search_through_all(
    model: str, gpu: str, tokens: int, batch: int, ubatch: int | None
) -> None:
    splitter = splitter_of(Question(
        model, gpu=gpu, ram="ddr4-3200", ram_gb=1024, prompt_tokens=tokens, batch=batch, ubatch=ubatch
    ))
    place, split = splitter._first
    assert place == first_of_all(splitter)
    assert splitter.splits[place] == split
