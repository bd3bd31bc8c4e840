"""``trilane tune --engine strata``: the best setting, its arguments, and what is refused."""

from __future__ import annotations

import pytest
from rich.table import Table

from sim.costs.engine import load_fitted
from trilane.engines.question import FitError, Question, engine_of
from trilane.engines.strata.settings import KV_TOKENS, SHARES
from trilane.engines.strata.tune import (
    CONTEXTS,
    StrataTuning,
    strata_next_to,
    strata_shape,
    strata_tuning,
    window_engine,
)
from trilane.output.pages.strata_tune import next_to_part, strata_tune_page

ENGINE = load_fitted("strata")
PARTS = {"gpu": "rtx-4090-laptop", "ram": "ddr5-5600", "cpu": "core-i9-13900hx"}


def tuned(**changed: object) -> StrataTuning:
    question = Question("qwen3.8-flash-next", **{**PARTS, **changed})  # type: ignore[arg-type]
    return strata_tuning(question, ENGINE, question.load_machine())


def test_no_other_setting_is_quicker_by_more_than_workers_are_worth() -> None:
    found = tuned()
    assert found.best.token_ms <= found.usual.token_ms
    assert min(1000 / speed for speed in found.tokens_by_share.values()) == pytest.approx(found.best.token_ms)
    assert all(choice.slower >= -0.001 for choice in found.choices)
    assert set(found.tokens_by_share) == set(SHARES)


def test_each_further_draft_has_its_speed_and_the_last_is_that_of_the_setting() -> None:
    found = tuned()
    assert list(found.tokens_by_drafts) == [0, 1, 2, 3]
    assert found.tokens_by_drafts[3] == pytest.approx(1000 / found.best.token_ms)
    assert found.tokens_by_drafts[0] < found.tokens_by_drafts[1]


def test_weights_that_have_room_have_their_speed_and_fewer_bits_are_quicker() -> None:
    found = tuned()
    assert list(found.tokens_by_weights) == ["gsq-iq3_s", "gsq-iq3_xxs", "gsq-iq2_xs", "gsq-q2_0"]
    assert found.tokens_by_weights["gsq-iq3_s"] == 1000 / found.best.token_ms
    assert found.tokens_by_weights["gsq-iq3_s"] < found.tokens_by_weights["gsq-iq2_xs"]
    alone = tuned(weights="gsq-iq2_xs")
    assert alone.tokens_by_weights["gsq-iq2_xs"] == found.tokens_by_weights["gsq-iq2_xs"] == 1000 / alone.best.token_ms
    assert "gsq-iq3_s" not in tuned(weights="gsq-iq2_xs", ram_gb=40, gpu="rtx-3060").tokens_by_weights


def test_the_arguments_are_those_of_the_setting() -> None:
    found = tuned(window=131072)
    assert "--max-context 131072" in found.arguments
    assert f"--pcie-frac {found.best.setting.pcie_share:g}" in found.arguments
    assert found.to_dict()["command"] == " ".join(found.arguments)
    assert tuned(threads=7).best.setting.workers == 7


def test_its_page_has_all_parts_of_a_window() -> None:
    found = tuned()
    tables = [part for part in strata_tune_page(found) if isinstance(part, Table)]
    assert tables[-1].row_count == len(vars(found.best.window)) - 1  # one card hands over to none


def test_a_longer_context_leaves_fewer_slots_and_a_better_link_takes_a_larger_share() -> None:
    short, long = tuned(window=8192), tuned(window=262144)
    assert long.best.setting.slots < short.best.setting.slots
    assert long.best.hit_rate < short.best.hit_rate
    slow, quick = (tuned(gpu="rtx-5070-ti", cpu="ryzen-5-7600", pcie=slot) for slot in ("3x4", "5x16"))
    assert slow.best.setting.pcie_share < quick.best.setting.pcie_share


def test_long_contexts_stay_in_the_hosts_memory() -> None:
    short, long = tuned(window=8192), tuned(window=262144, ram_gb=64)
    assert short.best.setting.kv_tokens == 0
    assert long.best.setting.kv_tokens in KV_TOKENS[1:]
    assert f"--kv-resident {long.best.setting.kv_tokens}" in long.arguments
    assert not any("--kv-resident" in argument for argument in short.arguments)


def test_a_longer_context_has_fewer_experts_of_the_two_ways_to_hold_it() -> None:
    found = tuned(window=262144)
    assert list(found.by_context) == list(CONTEXTS)
    slots = [speed.slots for speed in found.by_context.values() if speed.kv_tokens]
    assert slots == sorted(slots, reverse=True)
    assert found.by_context[262144].tokens_per_s == pytest.approx(1000 / found.best.token_ms, rel=1e-6)
    assert list(tuned(prompt_tokens=40_000).by_context) == [65536, 131072, 262144]


def test_weights_are_stratas_own_unless_others_are_named() -> None:
    names = {strata_shape(Question("qwen3.8-flash-next", weights=name, **PARTS)).name for name in (None, "iq3_s")}
    assert names == {"qwen3.8-flash-next@gsq-iq3_s"}
    other = Question("qwen3.8-flash-next", weights="ud-q4_k_xl", **PARTS)
    assert strata_shape(other).name == "qwen3.8-flash-next@ud-q4_k_xl"


@pytest.mark.parametrize(("changed", "expected"), [
    ({"gpu": "arc-b580"}, "strata does not run on Intel's GPUs"),
    ({"gpu": "gb10", "ram": None, "cpu": None}, "expected a machine with a GPU that has its own memory"),
    ({"batch": 2}, "strata: expected one request at a time, whose windows are known, got 2"),
    ({"ram_gb": 16}, r"the host lacks \d+\.\d GB for the experts"),
    ({"ram_gb": 64, "disk": "nvme-4x4"}, "strata: expected no disk, got nvme-4x4"),
    ({"gpu": "gtx-1060-3gb"}, "has no room for a cache of experts"),
])
def test_what_cannot_run_is_refused(changed: dict[str, object], expected: str) -> None:
    with pytest.raises(FitError, match=expected):
        tuned(**changed)


def test_other_models_and_verbs_are_refused() -> None:
    question = Question("qwen3-30b-a3b", engine="strata", **PARTS)
    with pytest.raises(FitError, match=r"expected qwen3.8-flash-next"):
        strata_tuning(question, ENGINE, question.load_machine())
    with pytest.raises(FitError, match=r"trilane tune --engine strata"):
        engine_of(question, question.load_machine())


def test_engines_of_windows_are_known_by_their_section() -> None:
    assert window_engine("strata") is not None
    assert window_engine("llama.cpp") is None
    assert window_engine("graphs") is None
    assert window_engine(None) is None


def test_pages_of_other_engines_say_what_strata_gives() -> None:
    question = Question("qwen3.8-flash-next", weights="q4_k_m", threads=4, **PARTS)
    found = strata_next_to(question, question.load_machine())
    assert found is not None
    assert found.model == "qwen3.8-flash-next@gsq-iq3_s"
    assert found.best.token_ms == tuned().best.token_ms
    assert "--engine strata" in str(next_to_part(found)[1])


@pytest.mark.parametrize(
    "changed", [{"model": "qwen3-30b-a3b"}, {"batch": 2}, {"gpu": "arc-b580"}, {"gpu": "2x-rtx-3090"}]
)
def test_nothing_is_said_where_strata_does_not_run(changed: dict[str, object]) -> None:
    question = Question(**{"model": "qwen3.8-flash-next", **PARTS, **changed})  # type: ignore[arg-type]
    assert next_to_part(strata_next_to(question, question.load_machine())) == []
