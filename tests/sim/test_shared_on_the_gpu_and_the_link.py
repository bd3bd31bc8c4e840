"""Whole answers: what write-backs take from copies, and the kernels that a layer's experts on the GPU share."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest

from sim.costs.roofline_costs import EXPERT_KERNELS
from sim.runs.columns import columns_of_rows
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from sim.runs.spans import Row
from sim.simulate import spans_of
from trilane.fit.policy_result import decode_steps_of

SMALL, LARGE = "rtx-3060+ddr4-3200+ryzen-5-5600", "rtx-4090+ddr5-5600+ryzen-9-7950x"


@cache
def prepared(machine: str) -> Prepared:
    """Half of the experts of Qwen3-30B are on the GPU, in recorded graphs."""
    return prepare(
        Scenario(
            trace="synthetic:qwen3-30b-a3b", model="qwen3-30b-a3b@q4_k_m", hardware=machine, engine="graphs",
            policy="llama.cpp", cached_share=0.5, prompt_tokens=16, generated_tokens=17,
        )
    )


def tpot_ms(played: Prepared) -> float:
    return decode_steps_of(columns_of_rows(spans_of(played)), played.answer_tokens).mean_ms


def alongside(played: Prepared) -> Prepared:
    """With write-backs alongside the copies."""
    return played.with_composition(replace(played.compose(), writes_back="alongside"))


@pytest.mark.parametrize(("machine", "least", "most"), [(SMALL, 0.05, 0.15), (LARGE, 0.02, 0.07)])
def test_write_backs_cost_a_policy_about_a_tenth_at_most(machine: str, least: float, most: float) -> None:
    """Next to a link and a memory that carry both ways at full rate. (Short answers, which start cold.)"""
    own = prepared(machine).with_policy("mixtral-offloading@impl")
    both = own.with_costs(own.costs.map_experts(lambda expert: expert._replace(both_ways_permille=1000)))
    assert least < tpot_ms(alongside(own)) / tpot_ms(alongside(both)) - 1 < most


@pytest.mark.parametrize("policy", ["llama.cpp", "fiddler", "on-demand"])
def test_a_layer_bears_its_kernels_whole_however_few_of_its_experts_are_on_the_gpu(policy: str) -> None:
    """Those that are there share them; each expert that is copied for its layer has its own."""
    own = prepared(SMALL).with_policy(policy)
    gpu_ns, kernels_ns = own.costs.experts[0].gpu_ns, EXPERT_KERNELS * own.hardware.gpu.kernel_ns
    for (step, layer), rows in experts_on_gpu(own).items():
        shared_ns = sum(row[3] - row[2] - gpu_ns[row[10]] for row in rows)
        assert shared_ns % kernels_ns == 0, (step, layer)
        assert kernels_ns <= shared_ns <= kernels_ns * len(rows), (step, layer)
        if policy == "llama.cpp":  # nothing is copied
            assert shared_ns == kernels_ns, (step, layer)


def experts_on_gpu(played: Prepared) -> dict[tuple[int, int], list[Row]]:
    """Decode steps' experts on the GPU, by step and layer."""
    layers: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in spans_of(played):
        if row[0] == "gpu" and row[4:6] == ("expert", "decode"):
            layers[row[6], row[7]].append(row)
    return layers
