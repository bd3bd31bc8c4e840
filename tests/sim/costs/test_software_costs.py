"""Systems of papers: what their own programs make of a machine, computed by hand, and the laws of their tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.costs.engine import CountedEngine, Software, engine_names, load_engine
from sim.costs.engine_costs import costs_on
from sim.costs.roofline_costs import roofline
from sim.machine.hardware import Hardware, load_hardware
from sim.machine.sourced import Sourced
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape

SHAPE = load_model("mini-moe")
PAPERS = (
    "daop-2024", "daop-2024-phi", "dali-2025", "dali-2025-ktransformers", "dali-2025-llama.cpp", "fiddler-2024",
    "hybrimoe-2025", "se-2025", "smoe-2025",
)
MOST = 40


def machine() -> Hardware:
    """A CPU that reads an expert in 1 us, and needs 0.5 us of arithmetic a token."""
    size, flops = SHAPE.expert_bytes_by_layer[0], _flops(SHAPE)
    numbers = {"cpu.read_bytes_per_s": size / 1e-6, "cpu.flops_per_s": flops / 0.5e-6}
    return load_hardware("rtx3090-ddr4").with_numbers({**numbers, "cpu.first_expert_ns": 60_000})


def _flops(shape: ModelShape) -> float:
    return 2.0 * shape.matrices_per_expert * shape.hidden * shape.expert_width


def engine(**numbers: Any) -> CountedEngine:
    """``pytorch`` with these numbers of a program."""
    software = Software(**{name: Sourced(value, "test", "high") for name, value in numbers.items()})
    engine = load_engine("pytorch")
    assert isinstance(engine, CountedEngine)
    return replace(engine, software=software)


def cpu_ns(**numbers: Any) -> list[int]:
    """Times of a CPU expert with 0, 1, 2, 4, 8, 9, 16 and 40 tokens."""
    table = costs_on(machine(), SHAPE, MOST, engine(**numbers)).experts[0].cpu_ns
    return [table[w] for w in (0, 1, 2, 4, 8, 9, 16, 40)]


def test_few_tokens_are_slow_and_many_as_fast_as_the_machine() -> None:
    assert cpu_ns() == [0, 1000, 1000, 2000, 4000, 4500, 8000, 20_000]
    assert cpu_ns(cpu_expert_ns=300) == [0, 1300, 1300, 2300, 4300, 4800, 8300, 20_300]
    # a quarter of the arithmetic: 2 us a token up to 8 tokens; from 9 on 0.5, and never less than with 8
    small = {"small_batch_tokens": 8, "small_batch_flops_share": 0.25}
    assert cpu_ns(**small) == [0, 2000, 4000, 8000, 16_000, 16_000, 16_000, 20_000]
    assert cpu_ns(cpu_expert_ns=300, **small)[1:] == [2300, 4300, 8300, 16_300, 16_300, 16_300, 20_300]
    # and 100 ns more for each of the 8
    assert cpu_ns(cpu_token_ns=100, **small) == [0, 2100, 4200, 8400, 16_800, 16_800, 16_800, 20_000]
    assert cpu_ns(cpu_share=0.5) == [0, 2000, 2000, 4000, 8000, 9000, 16_000, 40_000]


def test_the_first_expert_copies_layers_and_decisions() -> None:
    own, theirs = (costs_on(machine(), SHAPE, 1, used) for used in (
        "pytorch", engine(first_cpu_ns=790_000, layer_ns=1_000_000, plan_factor=2.5)
    ))
    assert (own.experts[0].first_cpu_ns, theirs.experts[0].first_cpu_ns) == (60_000, 790_000)
    assert theirs.experts[0].copy_ns == own.experts[0].copy_ns
    assert costs_on(machine(), SHAPE, 1, engine(serial=True)).serial > own.serial
    assert (own.layer_ns, theirs.layer_ns) == (0, 1_000_000)
    assert theirs.decision_ns("plan", "dali", 6) == pytest.approx(2.5 * own.decision_ns("plan", "dali", 6), abs=2)
    pageable = costs_on(machine(), SHAPE, 1, engine(copies="pageable"))
    latency_ns, fraction = machine().link.h2d_latency_ns, machine().link.pageable_fraction
    bytes_ns = own.experts[0].copy_ns - latency_ns
    assert pageable.experts[0].copy_ns - latency_ns == pytest.approx(bytes_ns / fraction, abs=1)


def test_a_copy_has_no_more_than_the_copied_bits_of_each_weight() -> None:
    latency_ns = machine().link.h2d_latency_ns
    whole, quarter, more = (costs_on(machine(), SHAPE, 1, engine(**numbers)).experts[0].copy_ns for numbers in (
        {}, {"copied_bits": SHAPE.weight_bits / 4, "copy_ns": 5000}, {"copied_bits": 64.0}
    ))
    assert quarter - latency_ns - 5000 == pytest.approx((whole - latency_ns) / 4, abs=1)
    assert more == whole


def test_a_gpu_expert_takes_no_less_than_its_kernels_take_to_be_started() -> None:
    own = costs_on(machine(), SHAPE, MOST, "pytorch").experts[0].gpu_ns
    least = own[1] + 1
    theirs = costs_on(machine(), SHAPE, MOST, engine(gpu_expert_ns=least)).experts[0].gpu_ns
    assert theirs == tuple(max(ns, least) if w else 0 for w, ns in enumerate(own))


def test_a_prompt_waits_for_the_program_before_each_layer() -> None:
    scenario = Scenario(trace="mini-moe", model=None, policy="layer-wise", generated_tokens=2, cached_share=0.5)
    plain, slow = (simulate(scenario.with_(engine=name)).metrics for name in ("daop-2024", "daop-2024-phi"))
    assert slow.tpot_ms == plain.tpot_ms
    assert slow.ttft_ms is not None
    assert plain.ttft_ms is not None
    assert slow.ttft_ms - plain.ttft_ms == pytest.approx(232 * SHAPE.moe_layers, rel=1e-3)


def test_a_program_without_numbers_changes_nothing() -> None:
    used = costs_on(machine(), SHAPE, MOST, engine())
    assert used.experts == roofline(SHAPE, machine(), MOST).experts
    assert used.layer_ns == 0


def test_nothing_is_launched_while_the_host_works_between_layers() -> None:
    scenario = Scenario(trace="mini-moe", model=None, policy="layer-wise", generated_tokens=2, cached_share=0.5)
    layers = SHAPE.moe_layers
    plain = simulate(scenario).metrics.tpot_ms
    slow = simulate(scenario.with_(engine="daop-2024")).metrics.tpot_ms
    assert plain is not None
    assert slow is not None
    assert slow >= layers * 0.5  # ms
    assert slow - plain >= 0.45 * layers


@given(
    st.integers(1, 64), st.integers(1, 64), st.sampled_from((0.05, 0.3, 1.0)), st.sampled_from((0, 700)),
    st.sampled_from((0.1, 1.0)),
)
def test_more_tokens_never_take_less_time(
    most: int, few: int, flops_share: float, fixed_ns: int, share: float
) -> None:
    numbers = {"cpu_expert_ns": fixed_ns, "cpu_token_ns": fixed_ns // 7, "cpu_share": share}
    costs = costs_on(
        machine(), SHAPE, most, engine(**numbers, small_batch_tokens=few, small_batch_flops_share=flops_share)
    )
    costs.validate()
    own = roofline(SHAPE, machine(), most).experts[0].cpu_ns
    assert all(theirs >= ours for theirs, ours in zip(costs.experts[0].cpu_ns, own, strict=True))


@pytest.mark.parametrize("name", PAPERS)
def test_systems_of_papers_say_what_they_were_set_by(name: str) -> None:
    engine = load_engine(name)
    assert isinstance(engine, CountedEngine)
    assert all(number.source for number in engine.flat().values())
    paper = name.partition("-")[0]
    assert all(row.startswith(f"{paper}-") for row in engine.set_by)
    assert bool(engine.set_by) == (paper not in ("se", "fiddler"))  # whose paper or code says all that differs
    costs_on(load_hardware("rtx3090-epyc7532"), load_model("deepseek-v2-lite@q4_k_m"), 64, name).validate()


def test_other_engines_were_set_by_no_published_figure() -> None:
    assert not any(load_engine(name).set_by for name in engine_names() if name not in PAPERS)


def test_the_papers_cpu_experts_are_several_times_slower_than_the_machines() -> None:
    shape = load_model("deepseek-v2-lite@q4_k_m")
    for name, preset, least in (("dali-2025", "rtx3090-epyc7532", 8), ("hybrimoe-2025", "a6000-xeon5220r", 4)):
        own, theirs = (costs_on(load_hardware(preset), shape, 4, used).experts[0] for used in ("pytorch", name))
        assert theirs.cpu_ns[2] > least * own.cpu_ns[2]
        assert theirs.gpu_ns == (0, *(max(ns, 500_000) for ns in own.gpu_ns[1:]))
