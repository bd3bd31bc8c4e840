"""Upgrades of machines with several GPUs: a second one, another in place of one, and their slots."""

from __future__ import annotations

from dataclasses import replace

from trilane.engines.question import Question
from trilane.engines.tune.settings import TuneQuestion
from trilane.engines.upgrades import Step, second_card_steps, sized_cards, slot_steps, upgrades

OWN = Question(
    "gpt-oss-120b", gpu="2x-rtx-3090", ram="ddr4-3200", cpu="ryzen-9-5950x", ram_gb=128, prompt_tokens=2048,
    generated=64,
)


def test_a_second_card_is_offered_in_a_slot_of_four_lanes() -> None:
    (step,) = second_card_steps(replace(OWN, gpu="rtx-3090"))
    assert step.changes == {"gpu": "2x-rtx-3090", "pcie": "4x16,4x4"}
    assert step.watts == 350
    assert second_card_steps(OWN) == []


def _in_place(gpu: str, pcie: str | None) -> dict[str, Step]:
    question = replace(OWN, gpu=gpu, pcie=pcie)
    return {step.title: step for _, steps in sized_cards(question) for step in steps}


def test_of_several_cards_the_one_with_the_least_memory_is_replaced() -> None:
    found = _in_place("rtx-3090+rtx-3060", None)
    assert found["RTX 3090 for the RTX 3060 12GB"].changes == {"gpu": "2x-rtx-3090", "pcie": None}
    assert found["RTX 4060 Ti 16GB for the RTX 3060 12GB"].changes == {"gpu": "rtx-3090+rtx-4060-ti-16gb", "pcie": None}
    assert all(title.endswith(" for the RTX 3060 12GB") for title in found)


def test_a_quicker_card_takes_the_quicker_slot() -> None:
    """PCIe 3.0 x16 is as quick as 4.0 x8 and quicker than 4.0 x4."""
    found = _in_place("rtx-3090+rtx-3060", "4x16,3x4")
    assert found["RTX 3090 for the RTX 3060 12GB"].changes == {"gpu": "2x-rtx-3090", "pcie": "4x16,3x4"}
    assert found["RTX 4090 for the RTX 3060 12GB"].changes == {"gpu": "rtx-4090+rtx-3090", "pcie": "4x16,3x4"}
    assert _in_place("rtx-3060+rtx-3090", "4x4,3x16")["RTX 4090 for the RTX 3060 12GB"].changes["pcie"] == "3x16,4x4"


def test_cards_in_each_others_slots_are_told() -> None:
    crossed = replace(OWN, gpu="rtx-3090+rtx-4090", pcie="4x16,3x4")
    (step,) = slot_steps(crossed)
    assert step.changes == {"gpu": "rtx-4090+rtx-3090", "pcie": "4x16,3x4"}
    for gpu, pcie in (("rtx-4090+rtx-3090", "4x16,3x4"), ("rtx-3090+rtx-4090", "3x4,4x16"), ("2x-rtx-3090", "4x16,3x4"),
                      ("rtx-3090+rtx-4090", "4x8"), ("rtx-3090+rtx-4090", None), ("rtx-3090", "4x16")):
        assert slot_steps(replace(crossed, gpu=gpu, pcie=pcie)) == [], (gpu, pcie)


def test_the_first_of_equal_cards_takes_the_quickest_slot() -> None:
    """It computes the host's experts for prompts."""
    (step,) = slot_steps(replace(OWN, gpu="3x-rtx-3060", pcie="4x4,4x16,4x1"))
    assert step.title == "the first cards in the quicker slots"
    assert step.changes == {"gpu": "3x-rtx-3060", "pcie": "4x16,4x4,4x1"}


def test_changing_slots_gains_what_copies_of_prompts_take() -> None:
    (told,) = (one for one in upgrades(TuneQuestion(replace(OWN, gpu="rtx-3060+rtx-3090", pcie="4x16,3x4")))
               if one.step.part == "slots")
    assert told.faster is not None
    assert told.faster > 0.10
