"""The division of GPU memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.machine.hardware import load_hardware
from sim.runs.memory import BudgetError, plan_memory
from traces.models.shape import ModelShape

SMALL = ModelShape(  # experts of 600 bytes; 4 x 600 a layer; non-expert weights 2 x (100 + 40) x 2 = 560 bytes
    "small", moe_layers=2, dense_layers=0, experts=4, top_k=2, hidden=10, expert_width=10, kv_width=5,
    attention_params=100,
)
KV = 2 * 5 * 2  # bytes a token
MIXTRAL = ModelShape(
    "mixtral", moe_layers=32, dense_layers=0, experts=8, top_k=2, hidden=4096, expert_width=14336, kv_width=2048,
    attention_params=41_943_040, vocab=32000,
)


def test_everything_adds_up() -> None:
    plan = plan_memory(SMALL, 5000, batch=2, tokens=10, demand_slots=1, prefetch_slots=1)
    assert (plan.non_expert_bytes, plan.kv_bytes, plan.staging_bytes) == (560, 20 * KV, 1200)
    assert plan.cache_bytes == 5000 - 560 - 400 - 1200
    assert plan.slots == 2840 // 600
    assert plan.fixed_bytes + plan.cache_bytes == plan.gpu_memory_bytes


def test_no_slot_is_legal() -> None:
    plan = plan_memory(SMALL, 560 + KV, batch=1, tokens=1, demand_slots=0)
    assert (plan.cache_bytes, plan.slots, plan.fixed_bytes) == (0, 0, plan.gpu_memory_bytes)


def test_one_byte_less_is_refused_with_the_missing_gb() -> None:
    with pytest.raises(BudgetError, match="GB are missing; use a smaller batch"):
        plan_memory(SMALL, 560 + KV - 1, batch=1, tokens=1, demand_slots=0)


def test_the_message_says_what_takes_how_much() -> None:
    with pytest.raises(BudgetError) as caught:
        plan_memory(MIXTRAL, 4 * 10**9, batch=8, tokens=1000)
    assert "GPU memory of 4.00 GB is below what runs without any cached expert, 4.96 GB" in str(caught.value)
    assert "(non-expert weights 3.21, KV cache 1.05, staging slots 0.70, reserve 0.00): 0.96 GB" in str(caught.value)


def test_cache_never_exceeds_the_model() -> None:
    plan = plan_memory(SMALL, 10**6, batch=1, tokens=1)
    assert plan.cache_bytes == SMALL.routed_bytes
    assert plan.slots == 8
    assert plan.fixed_bytes + plan.cache_bytes < plan.gpu_memory_bytes


@pytest.mark.parametrize(("share", "slots"), [(0.0, 0), (0.25, 2), (0.3, 2), (0.5, 4), (1.0, 8)])
def test_a_share_is_a_share_of_all_experts(share: float, slots: int) -> None:
    plan = plan_memory(SMALL, 10**6, batch=1, tokens=1, cached_share=share)
    assert (plan.slots, plan.cache_bytes) == (slots, slots * 600)


def test_a_share_that_does_not_fit_is_refused() -> None:
    gpu = load_hardware("rtx3090-ddr4").gpu
    with pytest.raises(
        BudgetError, match=r"128 of 256 experts and takes 45.10 GB.*24.81 GB are missing.*fits is 0.222$"
    ):
        plan_memory(MIXTRAL, gpu.memory_bytes, reserve=gpu.reserve_bytes, batch=1, tokens=512, cached_share=0.5)


def test_the_largest_share_that_the_message_names_fits() -> None:
    gpu = load_hardware("rtx3090-ddr4").gpu
    for share in (0.222, None):
        plan = plan_memory(
            MIXTRAL, gpu.memory_bytes, reserve=gpu.reserve_bytes, batch=1, tokens=512, cached_share=share
        )
        assert plan.slots == 57


def test_the_machine_s_reserve_is_kept() -> None:
    gpu = load_hardware("rtx3090-ddr4").gpu
    ours = plan_memory(MIXTRAL, gpu.memory_bytes, batch=1, tokens=512)
    kept = plan_memory(MIXTRAL, gpu.memory_bytes, reserve=gpu.reserve_bytes, batch=1, tokens=512)
    assert ours.cache_bytes - kept.cache_bytes == gpu.reserve_bytes


def test_staging_holds_the_largest_expert_and_shares_are_of_bytes() -> None:
    mixed = replace(SMALL, expert_bytes=(600, 300))
    plan = plan_memory(mixed, 10**6, batch=1, tokens=1, demand_slots=2, cached_share=0.5)
    assert plan.staging_bytes == 1200
    assert plan.cache_bytes == mixed.routed_bytes // 2
    assert plan.slots == 4


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"tokens": 0}, {"demand_slots": -1}, {"prefetch_slots": -2}, {"cached_share": 1.5}]
)
def test_meaningless_requests_are_refused(wrong: dict[str, float]) -> None:
    arguments: dict[str, float] = {"batch": 1, "tokens": 1, **wrong}
    name = next(iter(wrong))
    with pytest.raises(BudgetError, match=name):
        plan_memory(SMALL, 10**6, **arguments)  # type: ignore[arg-type]
