"""The cache of experts as a setting: its size, hit rates against those that were logged, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.costs.engine import load_engine
from sim.machine.hardware import load_hardware
from traces.batches import LayerUse, layer_uses
from trilane.common.units import MIB
from trilane.engines.hit_curve import HitCurve, lru_hit_rates
from trilane.engines.question import FitError, Question
from trilane.engines.routing import routing_for
from trilane.engines.tune.expert_cache import CachedSpeed
from trilane.study.cache_curve import CacheCurve

# logged on an R9700: repository audiagentic/bigcherry, patch 1337 (docs/planning, BCOP39)
FLASH_NEXT = {0.0427: 0.454, 0.0853: 0.61, 0.171: 0.79, 0.256: 0.879, 0.299: 0.902}
CURVE = HitCurve((0.5, 1.0), (0.8, 1.0))
ASKED = Question(
    model="deepseek-v2-lite", gpu="rtx-3060", ram="ddr4-3200", prompt_tokens=64, generated=16, ubatch=512, n_cpu_moe=27
)


def speed(question: Question = ASKED, memory_gib: float = 12) -> CachedSpeed:
    hardware = load_hardware(question.hardware).with_numbers({"gpu.memory_bytes": memory_gib * 2**30})
    return CachedSpeed(question, question.model_shape, hardware, load_engine("llama.cpp-cache"), curve=CURVE)


def test_hit_rates_are_near_those_that_were_logged() -> None:
    """Below them: of a short answer from an empty cache. Logged was a long run; the routing is fitted to it."""
    curve = CacheCurve(routing_for(Question(model="qwen3.8-flash-next", gpu="rtx-3060", ram="ddr4-3200")).trace)
    size = curve.trace.shape.routed_bytes
    for share, logged in FLASH_NEXT.items():
        assert 0.05 < logged - curve.point("lru", round(share * size)).hit_rate_decode < 0.075


def test_rates_between_two_sizes_are_on_a_straight_line() -> None:
    held = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
    assert CURVE.rates(held).tolist() == pytest.approx([0.0, 0.4, 0.8, 0.9, 1.0])


def test_all_memory_that_is_left_is_the_cache_but_for_a_spare_slot() -> None:
    own = speed(memory_gib=8)
    memory, shape = own.splitter.memory(own.split), own.shape
    left = -memory.missing_bytes
    assert own.cache_mib == left // MIB
    assert own.split.cache is not None
    spare = shape.expert_bytes_by_layer[0]
    assert own.split.cache.held == pytest.approx((own.cache_mib * MIB - spare) / memory.host_bytes)
    assert own.split.cache.hit_rate == CURVE.rates(np.array([own.split.cache.held]))[0]
    assert own.words[-1] == f"--moe-cache-mib {own.cache_mib}"


def test_a_cache_is_no_larger_than_what_it_caches() -> None:
    own = speed(memory_gib=80)
    assert own.split.cache is not None
    assert own.split.cache.held == 1.0
    assert own.cache_mib * MIB <= 1.1 * own.splitter.memory(own.split).host_bytes


def test_experts_of_less_than_a_mib_have_no_cache() -> None:
    asked = Question(model="mini-moe", weights="q4_0", gpu="rtx-3060", ram="ddr4-3200", prompt_tokens=64, n_cpu_moe=1)
    with pytest.raises(FitError, match="no room for a cache of the experts of one token"):
        _ = speed(asked).split
    two = speed(replace(asked, n_cpu_moe=4))
    assert two.cache_mib == 1
    assert two.words[-1] == "--moe-cache-mib 1"


@pytest.mark.parametrize(("slots", "runs"), [(6.9, False), (7.1, True)], ids=["six experts", "and a spare slot"])
def test_no_room_for_the_experts_of_a_token_is_refused(slots: float, runs: bool) -> None:
    large = speed()
    memory = large.splitter.memory(large.split)
    held = memory.gpu_bytes + memory.missing_bytes
    own = speed(memory_gib=(held + slots * large.shape.expert_bytes_by_layer[0]) / 2**30)
    if runs:
        assert own.split.cache is not None
        return
    with pytest.raises(FitError, match="no room for a cache of the experts of one token"):
        _ = own.split


@pytest.mark.parametrize("model", ["deepseek-v2-lite:4", "mixtral-8x7b:3", "gpt-oss-20b:4"])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.3, 0.6, 1.0])
def test_hit_rates_are_those_of_the_simulators_lru_cache(model: str, share: float) -> None:
    curve = CacheCurve(routing_for(Question(model=model, gpu="rtx-3060", ram="ddr4-3200")).trace)
    shape = curve.trace.shape
    size = round(share * shape.routed_bytes)
    rates = lru_hit_rates(layer_uses(curve.trace), shape.expert_bytes_by_layer, [size])
    assert rates == [curve.point("lru", size).hit_rate_decode]


def test_an_lru_cache_by_hand() -> None:
    """Room for two experts of layer 0, or one of layer 1: A B, C, A, then both layers in turn."""
    uses = [
        LayerUse(0, 0, "prefill", (0, 1), (1, 1)), LayerUse(1, 0, "decode", (1,), (1,)),  # hit
        LayerUse(2, 0, "decode", (2,), (1,)),  # in place of 0
        LayerUse(3, 0, "decode", (1, 2), (1, 1)),  # two hits
        LayerUse(3, 1, "decode", (5,), (1,)),  # in place of both
        LayerUse(4, 0, "decode", (0, 1, 2), (1, 1, 1)),  # room for two, none of which makes room for the third
        LayerUse(5, 0, "decode", (0, 2), (1, 1)),  # one hit
    ]
    assert lru_hit_rates(uses, (10, 20), [20]) == [4 / 10]
