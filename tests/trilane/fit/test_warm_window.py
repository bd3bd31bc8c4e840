"""How machines are compared: over a few steps that begin warm, or over half of the answer where these would mislead."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from policies.parts.placements import NoPlacement
from policies.protocols import Budget
from sim.runs.prepare import Prepared
from tests.kit.depth import thinned
from trilane.engines.gains import PARTS
from trilane.engines.question import Question
from trilane.fit.policy_result import PlayedPolicy, play_policy
from trilane.fit.prepared_question import on_machine, prepared_for
from trilane.fit.sensitivity import NEAR, WarmPlacement, gain_of, half_tpot_ms, warm_tpot_ms, warm_window, with_better

OFFLOADED: dict[str, Any] = {"model": "deepseek-v2-lite", "trace": "mini-deepseek", "weights": "bf16",
                             "gpu": "rtx-3060", "ram": "ddr4-3200", "prompt_tokens": 256, "generated": 56}
PART = {part.name: part for part in PARTS}
ADAPTIVE, STATIC = "mixtral-offloading@impl", "ktransformers"


def test_a_warm_placement_keeps_the_slots_and_changes_who_sits_in_them() -> None:
    budget = Budget(experts=4, expert_bytes=(10, 10), cache_bytes=30)
    placed = WarmPlacement(NoPlacement(), ((3, 1), (2,))).place(budget)
    assert placed == replace(NoPlacement().place(budget), residents=((3, 1), (2,)))


def test_an_answer_ends_with_the_experts_that_the_next_run_begins_with() -> None:
    one, played = asked(ADAPTIVE), answered(ADAPTIVE)
    assert warm_window(one, played).residents == played.residents
    placed = one.session().residency.resident
    assert [set(experts) for experts in played.residents] != placed
    assert [len(experts) for experts in played.residents] == [len(experts) for experts in placed]


@thinned(2)
@pytest.mark.parametrize("policy", [ADAPTIVE, STATIC, "dali", "best-exact"])
def test_a_few_warm_steps_tell_what_half_of_the_answer_does(policy: str) -> None:
    """Of parts by which no policy decides what to copy; to two in a hundred of TPOT."""
    one = asked(policy)
    short = warm_window(one, answered(policy))
    assert short.residents is not None
    assert short.base_ms == pytest.approx(answered(policy).result.tpot_ms, rel=NEAR)
    half = replace(short, residents=None)
    for name in ("GPU bandwidth", "GPU kernels", "synchronisation"):
        told = gain_of(one, short, PART[name]).tpot
        assert told == pytest.approx(gain_of(one, half, PART[name]).tpot, abs=0.02)
        assert told >= -0.02


@pytest.mark.parametrize("name", ["PCIe", "DRAM", "GPU memory"])
def test_a_part_by_which_it_is_decided_what_to_copy_is_compared_over_half_of_the_answer(name: str) -> None:
    one = asked("best-exact")
    short = warm_window(one, answered("best-exact"))
    better = with_better(one, PART[name])
    expected = short.half_ms / half_tpot_ms(better) - 1
    assert gain_of(one, short, PART[name]).tpot == expected
    assert (expected == short.gain(better, other_copies=False)) == (name == "GPU memory")  # where others are placed
    whole_ms = play_policy(better).result.tpot_ms
    assert expected == pytest.approx(answered("best-exact").result.tpot_ms / whole_ms - 1, abs=0.09)


def test_where_others_are_placed_half_of_the_answer_is_compared() -> None:
    """By a policy that places experts by what the machine costs; the residents of old would sit in other slots."""
    one, short = asked(STATIC), warm_window(asked(STATIC), answered(STATIC))
    better = with_better(one, PART["GPU bandwidth"])
    elsewhere = replace(short, placed=((0,), *short.placed[1:]))
    assert elsewhere.gain(better, other_copies=False) == short.gain(better, other_copies=True)
    assert short.gain(better, other_copies=False) != short.gain(better, other_copies=True)


def test_the_same_machine_is_no_faster() -> None:
    one, window = asked(ADAPTIVE), warm_window(asked(ADAPTIVE), answered(ADAPTIVE))
    assert window.gain(one, other_copies=False) == 0
    assert window.gain(one, other_copies=True) == 0


def test_a_cold_start_would_mislead_and_is_not_used() -> None:
    """The broken twin: an answer that ended with nothing in the cache is compared over half of it."""
    one, played = asked(STATIC), answered(STATIC)
    empty = played._replace(residents=((),) * 26)
    assert warm_tpot_ms(one, empty.residents) > (1 + NEAR) * played.result.tpot_ms
    window = warm_window(one, empty)
    assert window.residents is None
    better = with_better(one, PART["GPU bandwidth"])
    assert window.gain(better, other_copies=False) == window.gain(better, other_copies=True)


@cache
def machine() -> Prepared:
    found = prepared_for(Question(**OFFLOADED))
    return on_machine(found, found.hardware.with_numbers({"gpu.memory_bytes": 12e9}))


def asked(policy: str) -> Prepared:
    return machine().with_policy(policy)


@cache
def answered(policy: str) -> PlayedPolicy:
    return play_policy(asked(policy))
