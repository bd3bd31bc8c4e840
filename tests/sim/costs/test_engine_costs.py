"""Counted engines: recorded graphs, numbers that a scenario changes, and the systems of papers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.costs.cost_table import CostError
from sim.costs.engine import CountedEngine, EngineError, engine_names, load_engine
from sim.costs.engine_costs import MOST_TOKENS, costs_on, graph_costs
from sim.costs.roofline_costs import roofline
from sim.costs.software import Software
from sim.machine.hardware import Hardware, load_hardware
from sim.machine.sourced import Sourced
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from trilane.study.papers.figures import published

GRAPHS = load_engine("graphs")
REPLAY_NS, SPIN_NS = (number.value for number in GRAPHS.flat().values())
SHORT = Scenario(policy="on-demand", prompt_tokens=8, generated_tokens=4, cached_share=0.5)
CHANGED = {
    "experts", "attention_launch_ns", "gate_launch_ns", "shared_launch_ns", "expert_launch_ns", "combine_launch_ns",
    "head_launch_ns", "dense_launch_ns", "sync_ns", "lead_ns", "first_expert_launch_ns",
}


def test_launches_are_replays_and_experts_share_their_kernels() -> None:
    setting = prepare(SHORT)
    eager, hardware = setting.costs, setting.hardware
    graphs = graph_costs(eager, hardware, GRAPHS, 6)
    assert (graphs.launch_ns, graphs.sync_ns) == (REPLAY_NS, SPIN_NS)
    assert (graphs.first_expert_launch_ns, graphs.expert_launch_ns) == (REPLAY_NS, 0)  # one graph for a layer's experts
    assert graphs.attention_launch_ns == graphs.lead_of(graphs.launch_ns) == REPLAY_NS  # then the GPU has all of it
    own, shared = eager.experts[0], graphs.experts[0]
    assert (own.first_gpu_ns, shared.first_gpu_ns) == (0, 5 * hardware.gpu.kernel_ns)
    assert own.gpu_ns[1:] == tuple(ns + shared.first_gpu_ns for ns in shared.gpu_ns[1:])  # an expert by itself
    assert graphs.experts[0].cpu_ns == eager.experts[0].cpu_ns
    assert graphs.experts[0].copy_ns == eager.experts[0].copy_ns
    same = {field.name for field in fields(eager)} - CHANGED
    assert all(getattr(graphs, name) == getattr(eager, name) for name in same)


def test_copied_experts_that_run_with_the_others_share_their_kernels() -> None:
    setting = prepare(SHORT)
    alone, together = (
        graph_costs(setting.costs, setting.hardware, replace(GRAPHS, copied_run=how), 6)
        for how in ("alone", "together")
    )
    kernels_ns = alone.experts[0].first_gpu_ns
    assert (together.experts[0].first_gpu_ns, together.first_expert_launch_ns) == (0, 0)
    assert together.expert_launch_ns == REPLAY_NS // 6
    assert together.experts[0].gpu_ns[1:] == tuple(ns + round(kernels_ns / 6) for ns in alone.experts[0].gpu_ns[1:])


def test_the_engine_is_a_key_of_a_scenario() -> None:
    eager, graphs = (simulate(SHORT.with_(engine=engine)).metrics.tpot_ms for engine in ("pytorch", "graphs"))
    assert graphs is not None
    assert eager is not None
    assert graphs < eager
    with pytest.raises(EngineError, match=r"no engine 'vulkan'; .*`trilane engines` lists"):
        prepare(Scenario(engine="vulkan"))


def test_numbers_of_the_engine_are_changed_by_a_scenario() -> None:
    plain, changed = prepare(SHORT), prepare(SHORT.with_(engine_overrides={"software.layer_ns": 1e6}))
    assert (plain.costs.layer_ns, changed.costs.layer_ns) == (0, 1_000_000)
    assert plain.costs == prepare(SHORT.with_(engine_overrides={})).costs
    slower, longer = {"gpu.layer_ns.grouped": 1e6, "gpu.layer_ns.latent": 1e6}, SHORT.with_(engine="llama.cpp")
    own, theirs = (prepare(one).costs.step(1, (1,)) for one in (longer, longer.with_(engine_overrides=slower)))
    assert theirs.attention_ns > own.attention_ns + 900_000
    graphs = SHORT.with_(engine="graphs", engine_overrides={"replay_ns": 5000})
    assert prepare(graphs).costs.attention_launch_ns == 5000
    dali = load_engine("dali-2025", {"software.cpu_token_ns": 7})
    changed_numbers = {key for key, number in dali.flat().items() if number.source == "override"}
    assert changed_numbers == {"software.cpu_token_ns"}
    assert dali.flat().keys() == load_engine("dali-2025").flat().keys()


@pytest.mark.parametrize(("engine", "overrides", "says"), [
    ("pytorch", {"software.layer": 1}, r"engine 'pytorch', overrides: there is no key 'software.layer'; did you mean"),
    ("pytorch", {"gpu.read_share": 1}, r"engine 'pytorch', overrides: there is no key 'gpu.read_share'"),
    ("llama.cpp", {"software.layer_ns": 1}, r"engine 'llama.cpp', overrides: there is no key 'software.layer_ns'"),
    ("pytorch", {"software.layer_ns": -1}, r"'pytorch', overrides: software.layer_ns.value: expected .* got -1"),
    ("pytorch", {"software.copies": "paged"}, r"overrides: software.copies.value: expected .*pinned.* got 'paged'"),
    ("pytorch", {"software.serial": 1}, r"overrides: software.serial.value: expected .* got 1"),
    ("pytorch", {"software.small_batch_tokens": 8}, r"overrides: .*small_batch_tokens and small_batch_flops_share"),
])
def test_overrides_that_no_engine_has(engine: str, overrides: dict[str, bool | float | str], says: str) -> None:
    with pytest.raises(EngineError, match=says):
        prepare(SHORT.with_(engine=engine, engine_overrides=overrides))


def test_a_profile_keeps_the_engine_that_it_measured() -> None:
    profile = "docs/validation/host-lanes/profile.yaml"
    scenario = Scenario(trace="mini-deepseek:6", model="deepseek-v2-lite:6", hardware=profile, engine="graphs")
    with pytest.raises(EngineError, match="is a profile, whose times are those of the engine"):
        prepare(scenario.with_(cached_share=0.5, prompt_tokens=16, generated_tokens=4))
    changed = scenario.with_(engine="pytorch", engine_overrides={"software.layer_ns": 1}, cached_share=0.5)
    with pytest.raises(EngineError, match="expected 'pytorch' without overrides"):
        prepare(changed.with_(prompt_tokens=16, generated_tokens=4))


def test_the_numbers_of_every_engine_say_where_they_are_from() -> None:
    for name in engine_names():
        assert all(len(number.source) > 10 for number in load_engine(name).flat().values()), name


def test_a_step_of_more_tokens_than_a_table_has_room_for_is_refused() -> None:
    for prompt_tokens in (MOST_TOKENS + 4, 2**63 - 1):
        huge = SHORT.with_(prompt_tokens=prompt_tokens, sampled_prompt_tokens=4)
        with pytest.raises(CostError, match=r"a step of [\d,]+ tokens: expected 2,097,152 at most"):
            prepare(huge)


# --- systems of papers ------------------------------------------------------------------------------------------------


SHAPE = load_model("mini-moe")
PAPERS = (
    "daop-2024", "daop-2024-phi", "dali-2025", "dali-2025-ktransformers", "dali-2025-llama.cpp",
    "fiddler-2024", "hybrimoe-2025", "se-2025", "smoe-2025",
)
RELEASED = ("deepspeed", "imp", "mixtral-offloading", "mixtral-offloading-hqq", "moe-infinity")
KINDS_OF_PROTOTYPES = ("eager", "eager-4bit", "eager-cpp")  # among whose programs are those of papers
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
    # a rate of the program on any machine: a quarter of this one's, whatever share of the CPU's rates it has
    typed_in = {"small_batch_tokens": 8, "small_batch_flops_per_s": _flops(SHAPE) / 2e-6}
    assert cpu_ns(**typed_in) == cpu_ns(**small)
    assert cpu_ns(**typed_in, cpu_share=0.5)[1:6] == [2000, 4000, 8000, 16_000, 16_000]
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


def test_weights_are_unpacked_before_every_use_of_an_expert() -> None:
    own, theirs = (
        costs_on(machine(), SHAPE, MOST, used).experts[0].gpu_ns for used in ("pytorch", engine(unpack_bytes=14))
    )
    weights = SHAPE.matrices_per_expert * SHAPE.hidden * SHAPE.expert_width
    unpack_ns = round(weights * 14 / machine().gpu.read_bytes_per_s * 1e9)
    assert unpack_ns > 0
    assert theirs == tuple(ns + unpack_ns if w else 0 for w, ns in enumerate(own))
    least = costs_on(machine(), SHAPE, MOST, engine(unpack_bytes=14, gpu_expert_ns=10**9)).experts[0].gpu_ns
    assert set(least[1:]) == {10**9 + unpack_ns}


def test_copies_reach_a_share_of_the_link() -> None:
    own, half = (costs_on(machine(), SHAPE, 1, used).experts[0] for used in ("pytorch", engine(link_share=0.5)))
    link = machine().link
    assert half.copy_ns - link.h2d_latency_ns == pytest.approx(2 * (own.copy_ns - link.h2d_latency_ns), abs=1)
    assert half.writeback_ns - link.d2h_latency_ns == pytest.approx(2 * (own.writeback_ns - link.d2h_latency_ns), abs=1)
    assert costs_on(machine(), SHAPE, 1, engine(serial_copies=True)).serial_copies
    assert not costs_on(machine(), SHAPE, 1, "pytorch").serial_copies


def test_other_weights_are_copied_with_the_experts_a_part_with_each() -> None:
    own, theirs = (costs_on(machine(), SHAPE, 1, used).experts[0] for used in ("pytorch", engine(other_weights=True)))
    layers, latency_ns = SHAPE.moe_layers, machine().link.h2d_latency_ns
    others_ns = SHAPE.non_expert_bytes / (layers * SHAPE.experts) / machine().link.h2d_bytes_per_s * 1e9
    assert theirs.copy_ns == pytest.approx(own.copy_ns + others_ns, abs=1)
    assert own.copy_ns > latency_ns
    assert theirs.expert_bytes == own.expert_bytes


def test_hooks_around_modules_take_the_hosts_time_before_each_layer() -> None:
    assert costs_on(machine(), SHAPE, 1, engine(layer_ns=500, module_ns=1000)).layer_ns == 500 + SHAPE.experts * 1000


def test_few_tokens_have_one_rate() -> None:
    both = {"small_batch_tokens": 8, "small_batch_flops_share": 0.5, "small_batch_flops_per_s": 1e9}
    with pytest.raises(EngineError, match="small_batch_flops_share or small_batch_flops_per_s, got both"):
        engine(**both)


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
def test_more_tokens_never_take_less_time(most: int, few: int, flops_share: float, fixed_ns: int, share: float) -> None:
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
    known = (*PAPERS, *RELEASED, *KINDS_OF_PROTOTYPES)
    assert not any(load_engine(name).set_by for name in engine_names() if name not in known)


@pytest.mark.parametrize("name", RELEASED)
def test_released_programs_have_one_number_that_one_figure_set(name: str) -> None:
    """Next to those that set the kind of programs whose other numbers it has; a number that another figure shows, too,
    names that figure."""
    engine = load_engine(name)
    assert isinstance(engine, CountedEngine)
    kinds = {figure for kind in KINDS_OF_PROTOTYPES for figure in load_engine(kind).set_by}
    figure, *shown = [one for one in engine.set_by if one not in kinds]
    assert published()[figure].kind in ("exact", "derived")
    assert all(any(one in number.source for number in engine.flat().values()) for one in shown)
    assert engine.calibrated[0].number in engine.flat()
    costs_on(load_hardware("rtx3090-epyc7532"), load_model("deepseek-v2-lite@q4_k_m"), 64, name).validate()


def test_the_papers_cpu_experts_are_several_times_slower_than_the_machines() -> None:
    shape = load_model("deepseek-v2-lite@q4_k_m")
    for name, preset, least in (("dali-2025", "rtx3090-epyc7532", 8), ("hybrimoe-2025", "a6000-xeon5220r", 4)):
        own, theirs = (costs_on(load_hardware(preset), shape, 4, used).experts[0] for used in ("pytorch", name))
        assert theirs.cpu_ns[2] > least * own.cpu_ns[2]
        assert theirs.gpu_ns == (0, *(max(ns, 500_000) for ns in own.gpu_ns[1:]))
