"""Costs from a profile: every number of a step, worked out by hand from the tables of ``hand_measured``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sim.costs.cost_table import CostError, StepCosts
from sim.costs.engine_costs import costs_on
from sim.costs.roofline_costs import roofline
from sim.machine.hardware import HardwareError, load_hardware, write_hardware
from sim.machine.profile import MeasuredRate
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.hand_measured import TOY, decode_grid, table, toy_machine, toy_model
from traces.library import load_trace
from trilane.testing.worlds import toy_shape

LATER: dict[str, Any] = dict.fromkeys(("launch_lead", "launch_tail", "gpu_with_cpu_permille", "cpu_with_gpu_permille"))
COSTS = costs_on(toy_machine(), TOY, 10)


def test_a_machine_without_profile_has_a_roofline() -> None:
    machine = load_hardware("rtx3090-ddr4")
    assert costs_on(machine, TOY, 10) == roofline(TOY, machine, 10)


def test_expert_times_never_fall_with_the_workload() -> None:
    """Measured: 140 ns for 2 tokens, 120 for 4. The line would give 130 for 3 and reach 140 again at 5."""
    expert = COSTS.experts[0]
    assert expert.gpu_ns == (0, 100, 140, 140, 140, 140, 160, 180, 200, 220, 240)
    assert expert.cpu_ns[:5] == (0, 1000, 1250, 1500, 1750)
    COSTS.validate()


def test_one_table_serves_all_layers() -> None:
    assert len(COSTS.experts) == 3
    assert len({id(expert) for expert in COSTS.experts}) == 1


def test_what_an_expert_costs_beside_its_time() -> None:
    expert = COSTS.experts[0]
    assert (expert.copy_ns, expert.writeback_ns, expert.first_cpu_ns) == (7000, 8000, 300)
    shared = costs_on(toy_machine(models={"toy": toy_model(gpu_permille=MeasuredRate(950, 940, 960))}), TOY, 10)
    assert (COSTS.gpu_permille, shared.gpu_permille) == (1000, 950)
    assert (COSTS.gpu_with_cpu_permille, COSTS.cpu_with_gpu_permille) == (970, 880)
    before = costs_on(toy_machine(models={"toy": toy_model(**LATER)}),
                      TOY, 10)
    assert (before.gpu_with_cpu_permille, before.cpu_with_gpu_permille) == (1000, 1000)
    assert (expert.cpu_permille, expert.copy_permille) == (800, 900)
    assert expert.expert_bytes == 3 * 8 * 4 * 2
    assert expert.between_ns == 30 + 1000 + 20 + 40 + 80  # combine, attention of one token, gate, routing, sync


def test_the_token_between_two_layers_attends_to_itself_alone() -> None:
    model = toy_model(attention_decode=decode_grid((1,), (1, 3), (1000, 3000)))
    assert costs_on(toy_machine(models={"toy": model}), TOY, 10).experts[0].between_ns == 30 + 1000 + 20 + 40 + 80


def test_launches_and_synchronisation() -> None:
    launches = (COSTS.launch_ns, COSTS.expert_launch_ns, COSTS.combine_launch_ns, COSTS.head_launch_ns)
    assert launches == (70, 71, 72, 73)
    assert COSTS.dense_launch_ns == 2 * 74
    assert COSTS.sync_ns == 80


def test_a_layers_launch_is_shared_out_by_kernels() -> None:
    """Measured as a whole: 70 ns for 12 kernels of attention, 3 of the gate, 5 of shared experts; rests go first."""
    parts = (COSTS.attention_launch_ns, COSTS.gate_launch_ns, COSTS.shared_launch_ns)
    assert parts == (70 - 10 - 17, 10, 17)
    shape = replace(TOY, shared_width=0)
    alone = costs_on(toy_machine(models={"toy": toy_model(shape, shared=None)}), shape, 10)
    assert (alone.attention_launch_ns, alone.gate_launch_ns, alone.shared_launch_ns) == (70 - 14, 14, 0)


def test_the_gpu_starts_after_the_lead_and_has_the_tail_left() -> None:
    assert (COSTS.lead_ns, COSTS.tail_ns) == (25, 9)
    assert [COSTS.lead_of(launch_ns) for launch_ns in (0, 20, 70)] == [0, 20, 25]
    assert [COSTS.tail_of(gpu_ns) for gpu_ns in (0, 5, 1000)] == [0, 5, 9]


def test_without_a_measured_lead_the_gpu_starts_when_all_is_launched() -> None:
    before = costs_on(toy_machine(models={"toy": toy_model(**LATER)}), TOY, 10)
    assert (before.lead_ns, before.tail_ns, before.lead_of(70)) == (None, 0, 70)


def test_a_decode_step_by_hand() -> None:
    """2 sequences, whose caches hold 10 and 60 tokens: both attend over 60, halfway between 1400 and 2400 ns."""
    assert COSTS.step(2, (10, 60)) == StepCosts(
        attention_ns=1900, dense_ns=2 * (1900 + 500), gate_ns=20, speculate_ns=21, estimator_ns=22, shared_ns=100,
        combine_ns=30, head_ns=500, routing_ns=40, activations_ns=50, result_ns=60,
    )


@pytest.mark.parametrize(("tokens", "context", "ns"), [
    (12, (12,), 4500),  # prefill, between 8 and 16 tokens
    (28, (12, 16), 9500),  # 8000 for two of 12, 11000 for two of 16
    (16, (8, 8), 5000),
    (2, (1, 1), 1400),  # a prompt of one token is a decode step
    (1, (60,), 1250),
    (1, (210,), 2000),  # beyond the table: 5 ns a token
    (8, (108,), 3000 + 490),  # a chunk of 8 after 100: 1490 - 1000 for the earlier ones
    (16, (58, 108), (5000 + 480 + 5000 + 980) // 2),  # chunks of 8 each: 1880 and 2380, less 1400
])
def test_attention_by_hand(tokens: int, context: tuple[int, ...], ns: int) -> None:
    assert COSTS.step(tokens, context).attention_ns == ns


def test_times_are_rounded_half_up() -> None:
    machine = toy_machine(models={"toy": toy_model(gate=table((1, 10), (3, 13)))})
    assert costs_on(machine, TOY, 1).step(2, (5, 5)).gate_ns == 12  # 11.5


def test_measured_decisions_are_not_scaled_and_the_others_are() -> None:
    machine = toy_machine()
    slow = costs_on(replace(machine, host=replace(machine.host, plan_factor=2.0)), TOY, 1)
    assert slow.decision_ns("plan", "dali", 4) == slow.decision_ns("plan", "dali@impl", 4) == 11 + 2 * 4
    assert slow.decision_ns("foresee", "a new idea", 4) == 5  # the measured default
    fiddler = load_hardware("rtx3090-ddr4").plan_costs.of("plan", "fiddler")
    assert slow.decision_ns("plan", "fiddler", 4) == int(2 * (fiddler.base_ns + 4 * fiddler.per_active_expert_ns) + 0.5)


def test_the_way_of_results_is_the_machine_s() -> None:
    machine = toy_machine()
    queued = replace(machine, link=replace(machine.link, result_path="h2d"))
    assert costs_on(queued, TOY, 1).result_path == "h2d"


def test_a_cut_model_has_the_times_of_the_whole() -> None:
    cut = replace(TOY, name="toy:2", moe_layers=2)
    assert costs_on(toy_machine(), cut, 10).experts == COSTS.experts[:2]


def test_a_model_without_dense_layers_and_shared_expert() -> None:
    plain = toy_shape(2, 4, 2)
    model = toy_model(plain, shared=None, dense_ffn=None, dense_launch=None)
    costs = costs_on(toy_machine(models={"toy": model}), plain, 4)
    step = costs.step(1, (60,))
    assert (step.dense_ns, step.shared_ns, costs.dense_launch_ns) == (0, 0, 0)
    with pytest.raises(HardwareError, match="'toy' has dense layers, of which none was measured"):
        costs_on(toy_machine(models={"toy": model}), replace(plain, dense_layers=1), 4)


def test_a_model_that_was_not_measured() -> None:
    machine = toy_machine(models={"toy": toy_model(), "other": toy_model()})
    with pytest.raises(
        HardwareError,
        match=r"profile 'lanes': model 'mini-moe' has not been measured; measured: toy, other; "
        r"add it: trilane profile --model mini-moe -o FILE",
    ):
        costs_on(machine, replace(TOY, name="mini-moe:2"), 4)


def test_a_model_of_other_sizes() -> None:
    with pytest.raises(HardwareError, match=r"model 'toy' was measured with hidden = 8, expected 16; expert_bytes"):
        costs_on(toy_machine(), replace(TOY, hidden=16), 4)


def test_experts_of_several_sizes_are_not_measured() -> None:
    with pytest.raises(HardwareError, match="measures experts of one size, those of its layers have 2 sizes"):
        costs_on(toy_machine(), replace(TOY, expert_bytes=(192, 100, 192)), 4)


def test_no_tokens_no_costs() -> None:
    with pytest.raises(CostError, match=r"max_tokens must be >= 1, the most tokens of any step, got 0"):
        costs_on(toy_machine(), TOY, 0)
    with pytest.raises(CostError, match=r"expected >= 1 token and one context per sequence, got 0"):
        COSTS.step(0, (1,))


def test_a_simulation_on_a_profile(tmp_path: Path) -> None:
    """Whatever the preset says that the machine was made from, a copy lasts 7 us and an expert 100 ns."""
    shape = load_trace("mini-moe").shape
    absent: dict[str, Any] = {} if shape.shared_width else {"shared": None}
    absent |= {} if shape.dense_width else {"dense_ffn": None, "dense_launch": None}
    write_hardware(toy_machine(models={shape.name: toy_model(shape, **absent)}), tmp_path / "lanes.yaml")
    scenario = Scenario(
        trace="mini-moe", model=None, hardware=str(tmp_path / "lanes.yaml"), policy="on-demand", cached_share=0.25,
        prompt_tokens=4, generated_tokens=2,
    )
    spans = simulate(scenario).spans
    assert lasted(spans, "demand") == {7000}
    assert lasted(spans[spans["phase"] == "decode"], "expert") == {100}


def lasted(spans: pd.DataFrame, kind: str) -> set[int]:
    """How long the spans of one kind were."""
    chosen = spans[spans["kind"] == kind]
    return set(chosen["end_ns"] - chosen["start_ns"])
