"""Real parts: those that fit, each with the speed that tune gives on the machine that has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sim.machine.parts import CardPart, part
from trilane.engines.model_formats import Bench
from trilane.engines.recommend import RecommendQuestion, recommend
from trilane.engines.replaceable import no_upgrades
from trilane.engines.upgrades import (
    WORTH_BUYING,
    Upgrade,
    channel_steps,
    cpu_steps,
    memory_steps,
    sized_cards,
    table_upgrades,
    upgrades,
)

OWNER: dict[str, Any] = {"gpu": "rtx-3060", "ram": "ddr4-3200", "cpu": "ryzen-5-5600", "ram_gb": 32}


def of(model: str, weights: str | None = "q4_k_m", **changes: Any) -> tuple[Upgrade, ...]:
    return upgrades(RecommendQuestion({**OWNER, **changes}).of(model, weights))


@pytest.mark.parametrize(("model", "weights"), [("qwen3-30b-a3b", "q4_k_m"), ("gpt-oss-120b", None)])
def test_every_upgrade_is_as_fast_as_tune_says_of_the_machine_that_has_it(model: str, weights: str | None) -> None:
    asked = RecommendQuestion(OWNER).of(model, weights)
    before = Bench(asked)
    found = upgrades(asked)
    assert 1 <= len(found) <= 8
    for one in found:
        after = Bench(replace(asked, fit=replace(asked.fit, **one.step.changes)))
        assert one.tuned == after.best
        if before.runs:
            assert one.faster == pytest.approx(before.best.answer_ms / one.tuned.answer_ms - 1)
            assert one.pays == (one.faster > WORTH_BUYING)
        else:
            assert one.faster is None
            assert one.pays


def test_an_rtx_3060_takes_the_next_cards_faster_modules_and_a_cpu_of_its_socket() -> None:
    assert [one.step.title for one in of("gpt-oss-20b", None)] == [
        "RTX 4070", "RTX 4060 Ti 16GB", "RTX 5060 Ti 16GB", "RTX 3090", "RTX 4090",
        "a second RTX 3060 12GB at x4", "DDR4-3600", "Ryzen 7 5700X3D",
    ]


def test_a_part_that_gains_nothing_is_told_as_such() -> None:
    """A CPU does nothing for a model that is on the GPU."""
    found = {one.step.part: one for one in of("olmoe-1b-7b", "q8_0")}
    assert not found["CPU"].pays
    assert not found["memory modules"].pays
    assert found["GPU"].pays


def test_cards_fit_the_slot_and_are_of_the_same_maker_and_time() -> None:
    question = RecommendQuestion(OWNER).of("qwen3-30b-a3b").fit
    own = part("gpu", "rtx-3060")
    for size, steps in sized_cards(question):
        for step in steps:
            card = part("gpu", step.changes["gpu"])
            assert isinstance(card, CardPart)
            assert card.form.value == "card"
            assert card.vendor == own.vendor
            assert card.released is not None
            assert card.released.value >= 2020
            assert card.memory_bytes.value == size >= own.memory_bytes.value
            assert step.watts == card.board_power_w.value


@pytest.mark.parametrize(("own", "told"), [("rtx-a4000", True), ("rtx-3060", False), ("rtx-4090", False)])
def test_cards_of_workstations_are_for_their_owners_alone(own: str, told: bool) -> None:
    question = RecommendQuestion({**OWNER, "gpu": own}).of("qwen3-30b-a3b").fit
    names = {step.changes["gpu"] for _, steps in sized_cards(question) for step in steps}
    assert ("rtx-pro-6000-blackwell" in names) == told
    assert ("rtx-a5000" in names) == (own == "rtx-a4000")
    assert "rtx-5090" in names


def test_an_rtx_4090_gains_by_the_one_faster_card_alone() -> None:
    found = of("gpt-oss-20b", None, gpu="rtx-4090", ram="ddr5-6000", cpu="ryzen-9-7950x", ram_gb=64)
    assert [one.step.title for one in found if one.step.part == "GPU"] == ["RTX 5090"]


def test_a_gain_of_less_than_a_tenth_is_none() -> None:
    assert WORTH_BUYING == 0.10
    [modules] = [one for one in of("gpt-oss-20b", None) if one.step.part == "memory modules"]
    assert 0 < (modules.faster or 0) < 0.10
    assert not modules.pays


def test_modules_and_cpus_are_checked_against_each_other() -> None:
    """Ryzen 7000 takes no DDR4, and CPUs of one socket are offered for the memory that is there."""
    fit = RecommendQuestion(OWNER).of("olmoe-1b-7b").fit
    crossed = replace(fit, ram="ddr5-5600")  # no such board: AM4 has DDR4
    assert memory_steps(crossed) == []
    assert cpu_steps(crossed) == []
    assert cpu_steps(replace(fit, gpu="apple-m4-pro", ram=None, cpu=None)) == []
    intel = replace(fit, cpu="core-i5-12400")
    assert all("ddr4" in part("cpu", step.changes["cpu"]).memory for step in cpu_steps(intel))
    assert all(step.changes["ram"].startswith("ddr4") for step in memory_steps(intel))


def test_without_named_memory_there_are_no_channels_to_fill() -> None:
    assert channel_steps(RecommendQuestion({"machine": "rtx4090-ddr5"}).of("olmoe-1b-7b").fit) == []


@pytest.mark.parametrize(("own", "told"), [("a100-40gb-pcie", True), ("rtx-3060", False)])
def test_cards_without_fans_are_for_machines_that_have_one(own: str, told: bool) -> None:
    question = RecommendQuestion({**OWNER, "gpu": own}).of("qwen3-30b-a3b").fit
    names = {step.changes["gpu"] for _, steps in sized_cards(question) for step in steps}
    assert {"h100-pcie"} <= names if told else not {"a10", "h100-pcie"} & names


def test_modules_and_cpus_are_those_that_the_board_takes() -> None:
    question = RecommendQuestion(OWNER).of("qwen3-30b-a3b").fit
    assert [step.changes["ram"] for step in memory_steps(question)] == ["ddr4-3600"]
    sockets = {part("cpu", step.changes["cpu"]).socket for step in cpu_steps(question)}
    assert {socket.value for socket in sockets if socket} == {"am4"}


@pytest.mark.parametrize(("machine", "reason"), [
    ({"gpu": "rtx-4060-laptop", "ram": "ddr5-5600"}, "laptop"), ({"gpu": "apple-m4-max"}, "one memory"),
    ({"machine": "rtx4090-ddr5"}, "preset"), (OWNER, None),
], ids=["laptop", "Mac", "preset", "desktop"])
def test_machines_without_parts_that_can_be_replaced(machine: dict[str, Any], reason: str | None) -> None:
    question = RecommendQuestion(machine).of("olmoe-1b-7b", "q4_k_m")
    assert no_upgrades(question.fit) == reason
    assert bool(upgrades(question)) == (reason is None)


def test_a_single_channel_is_filled() -> None:
    found = of("qwen3-30b-a3b", channels=1)
    assert next(one for one in found if one.step.part == "memory channels").step.changes == {"channels": 2}


def test_of_all_models_those_are_named_that_run_only_then() -> None:
    answer = recommend(models=("gpt-oss-120b", "gpt-oss-20b", "qwen3-30b-a3b"), **OWNER)
    found = {one.step.title: one for one in table_upgrades(answer)}
    assert [run.model for run in found["64 GiB"].runs] == ["gpt-oss-120b"]
    assert found["64 GiB"].faster == pytest.approx(0, abs=1e-9)
    assert (found["RTX 3090"].faster or 0) > 1
    assert found["RTX 3090"].more_bits == 1  # Qwen3 in five bits
