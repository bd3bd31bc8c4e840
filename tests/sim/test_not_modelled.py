"""How large two things are that the simulator leaves out (docs/design.md, Not modelled): bounds on whole answers."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from policies.mechanism.views import ExpertCosts
from sim.costs.roofline_costs import EXPERT_KERNELS
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from sim.simulate import spans_of
from trilane.study.fit.policy_result import decode_steps_of

SMALL, LARGE = "rtx-3060+ddr4-3200+ryzen-5-5600", "rtx-4090+ddr5-5600+ryzen-9-7950x"
BOTH_WAYS = 50.9 / 56.3  # rate of copies while others run back (nvbandwidth, tinygrad/open-gpu-kernel-modules issue 29)


@cache
def prepared(machine: str) -> Prepared:
    """Half of the experts of Qwen3-30B are on the GPU, in recorded graphs."""
    return prepare(
        Scenario(
            trace="synthetic:qwen3-30b-a3b", model="qwen3-30b-a3b@q4_k_m", hardware=machine, engine="ideal",
            policy="llama.cpp", cached_share=0.5, prompt_tokens=16, generated_tokens=17,
        )
    )  # fmt: skip


def tpot_ms(played: Prepared) -> float:
    return decode_steps_of(spans_of(played), played.answer_tokens).mean_ms


@pytest.mark.parametrize(("machine", "least", "most"), [(SMALL, 0.05, 0.15), (LARGE, 0.02, 0.07)])
def test_write_backs_would_cost_about_a_tenth_at_most(machine: str, least: float, most: float) -> None:
    """If every copy and every write-back ran at the rate that is left while the other runs: on the link, and in the
    DRAM, which one of them reads and the other writes. (Those of one slot begin at the same time.)"""
    own = prepared(machine).with_policy("mixtral-offloading@impl")
    link = own.hardware.link
    in_dram = own.hardware.cpu.read_bytes_per_s / (link.h2d_bytes_per_s + link.d2h_bytes_per_s)
    rate = min(BOTH_WAYS, in_dram)

    def slower(expert: ExpertCosts) -> ExpertCosts:
        return expert._replace(copy_ns=round(expert.copy_ns / rate), writeback_ns=round(expert.writeback_ns / rate))

    slowed = own.with_costs(own.costs.map_experts(slower))
    assert least < tpot_ms(slowed) / tpot_ms(own) - 1 < most


@pytest.mark.parametrize("machine", [SMALL, LARGE])
@pytest.mark.parametrize(("policy", "most"), [("fiddler", 0.02), ("dali", 0.01), ("best-exact", 0.005)])
def test_kernels_that_experts_do_not_share_are_two_hundredths_of_a_token(
    machine: str, policy: str, most: float
) -> None:
    """In graphs an expert bears one part in ``top_k`` of a layer's kernels, however few of the layer are on the GPU."""
    own = prepared(machine).with_policy(policy)
    rows = [row for row in spans_of(own) if row[5] == "decode"]
    on_gpu = Counter((row[6], row[7]) for row in rows if (row[0], row[4]) == ("gpu", "expert"))
    kernels_ns = EXPERT_KERNELS * own.hardware.gpu.kernel_ns
    left_out_ns = sum(kernels_ns * (1 - experts / own.shape.top_k) for experts in on_gpu.values())
    decode_ns = max(row[3] for row in rows) - min(row[2] for row in rows)
    assert 0 < left_out_ns / decode_ns < most
