"""Cost tables: the roofline against published times, its shape, scaling, and the checks."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.costs.cost_table import LAUNCHES, RATES, CostError, CostTable, StepCosts
from sim.costs.engine import load_engine
from sim.costs.engine_costs import costs_on
from sim.costs.fitted_costs import fitted_costs
from sim.costs.roofline_costs import roofline
from sim.machine.hardware import hardware_names, load_hardware
from tests.kit.toys import uniform_costs
from traces.models.attention import Attention
from traces.models.shape import ModelShape, PartBits
from trilane.testing.random_worlds import scaled

MIXTRAL = ModelShape(
    "mixtral", moe_layers=32, dense_layers=0, experts=8, top_k=2, hidden=4096, expert_width=14336, heads=32,
    kv_heads=8, head_dim=128, kv_width=2048, attention_params=41_943_040, vocab=32000,
)
DEEPSEEK = ModelShape(
    "deepseek-v2-lite", moe_layers=26, dense_layers=1, experts=64, top_k=6, hidden=2048, expert_width=1408,
    shared_experts=2, shared_width=2816, dense_width=10944, heads=16, kv_heads=16, head_dim=128, kv_width=576,
    attention_params=13_762_560, vocab=102400,
)


def costs_of(preset: str, shape: ModelShape = MIXTRAL, max_tokens: int = 512, **overrides: float) -> CostTable:
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    return roofline(shape, load_hardware(preset, keys), max_tokens)


def test_mixtral_expert_copy_as_daop_table_1() -> None:
    assert costs_of("a100-xeon6326").experts[0].copy_ns == pytest.approx(39.87e6, rel=0.02)


def test_mixtral_expert_copy_as_fiddler_issue_7() -> None:
    """On one host; the link's rate is that of several, 23.6 to 26.5 GB/s."""
    assert costs_of("rtx4090-ddr5").experts[0].copy_ns == pytest.approx(13.30e6, rel=0.07)


def test_mixtral_expert_on_the_4090_as_fiddler_issue_7() -> None:
    """In eager PyTorch, whose kernels reach less of the bandwidth than those of engines."""
    costs = costs_of("rtx4090-ddr5", gpu__bandwidth_fraction=0.61)
    assert costs.experts[0].gpu_ns[1] == pytest.approx(0.59e6, rel=0.02)


def test_mixtral_block_on_the_gpu_as_daop_table_1() -> None:
    costs = costs_of("a100-xeon6326")
    step = costs.step(1, [256])
    block = step.attention_ns + step.gate_ns + 2 * costs.experts[0].gpu_ns[1] + step.combine_ns
    assert block == pytest.approx(1.24e6, rel=0.02)


def test_mixtral_block_on_the_cpu_as_daop_table_1() -> None:
    expert = costs_of("a100-xeon6326").experts[0]
    weights = 2 * MIXTRAL.attention_params  # attention on the CPU too, read at the same rate
    assert expert.cpu_ns[1] * (2 + weights / expert.expert_bytes) == pytest.approx(8.02e6, rel=0.02)


@pytest.mark.parametrize("preset", hardware_names())
@pytest.mark.parametrize("shape", [MIXTRAL, DEEPSEEK], ids=lambda shape: shape.name)
def test_every_table_is_valid_and_monotone(preset: str, shape: ModelShape) -> None:
    costs = costs_of(preset, shape)
    costs.validate()
    assert costs.max_tokens == 512
    for expert in costs.experts:
        assert expert.gpu_ns[0] == expert.cpu_ns[0] == 0
        assert list(expert.gpu_ns) == sorted(expert.gpu_ns)
        assert list(expert.cpu_ns) == sorted(expert.cpu_ns)
        assert expert.gpu_ns[1] < expert.cpu_ns[1] < expert.copy_ns * 2


def test_tables_are_shared_between_equal_layers() -> None:
    assert len({id(expert) for expert in costs_of("rtx3090-ddr4").experts}) == 1
    mixed = replace(DEEPSEEK, moe_layers=3, expert_bytes=(17_000_000, 9_000_000, 17_000_000))
    costs = costs_of("rtx3090-ddr4", mixed)
    assert costs.experts[0] is costs.experts[2]
    assert costs.experts[0].copy_ns > costs.experts[1].copy_ns
    assert [expert.expert_bytes for expert in costs.experts] == [17_000_000, 9_000_000, 17_000_000]


def test_workload_is_free_until_the_device_runs_out_of_flops() -> None:
    expert = costs_of("rtx3090-ddr4", max_tokens=4096).experts[0]
    assert expert.gpu_ns[1] == expert.gpu_ns[32]
    assert expert.cpu_ns[1] == expert.cpu_ns[16]
    flops_bound = 2 * 3 * 4096 * 14336 * 4096 / (71.2e12 * 0.85) * 1e9
    assert expert.gpu_ns[4096] == pytest.approx(flops_bound + 15_000, abs=1)


def test_bandwidth_and_fixed_time_enter_as_documented() -> None:
    costs = costs_of("rtx3090-ddr4", cpu__read_bytes_per_s=35.2321536e9, link__h2d_bytes_per_s=17.6160768e9)
    assert costs.experts[0].cpu_ns[1] == 10_000_000
    assert costs.experts[0].copy_ns == 20_003_000
    assert costs.experts[0].first_cpu_ns == 60_000
    assert costs.launch_ns == 15 * 5000


def test_the_gpu_starts_on_the_first_kernel_and_ends_with_the_last() -> None:
    costs, hardware = costs_of("rtx3090-ddr4", DEEPSEEK), load_hardware("rtx3090-ddr4")
    assert (costs.attention_launch_ns, costs.gate_launch_ns, costs.shared_launch_ns) == (60_000, 15_000, 25_000)
    assert (costs.lead_ns, costs.tail_ns) == (hardware.host.launch_ns, hardware.gpu.kernel_ns)


def test_weights_of_fewer_bits_are_read_at_their_formats_fraction() -> None:
    """At 4.84 bits the CPU reads at 0.88 of its rate, at 6.56 bits the GPU at 0.92 of its; copies are not unpacked."""
    costs = costs_of("rtx3090-ddr4", replace(MIXTRAL, weight_bits=4.84))
    size = 3 * 4096 * 14336 * 4.84 / 8
    assert costs.experts[0].cpu_ns[1] == pytest.approx(size / (40.11 * 0.88), abs=1)
    assert costs.experts[0].copy_ns == pytest.approx(3000 + size / 25, abs=1)
    six = costs_of("rtx3090-ddr4", replace(MIXTRAL, weight_bits=6.56)).experts[0]
    read = 936 * 0.85 * 0.92
    assert six.gpu_ns[1] == pytest.approx(3 * 4096 * 14336 * 6.56 / 8 / read + 15_000, abs=2)


def test_the_rest_of_a_quantised_model_is_slower_to_read_too_but_its_cache_is_not() -> None:
    """Head and gate in 5.7 bits at 0.94 of the rate; the cache of a long context stays in 16 bits."""
    quantised = replace(MIXTRAL, dense_bits=5.7, kv_bits=16.0)
    whole, packed = (costs_of("rtx3090-ddr4", shape).step(1, [65536]) for shape in (MIXTRAL, quantised))
    head = 32000 * 4096 * 5.7 / 8 / (936 * 0.85 * 0.94)
    assert packed.head_ns == pytest.approx(head + 6000, abs=2)
    saved = 41_943_040 * (2 - 5.7 / 8 / 0.94) / (936 * 0.85)
    assert whole.attention_ns - packed.attention_ns == pytest.approx(saved, abs=2)


PARTS = {  # times that a part's bits move; a dense layer has attention too
    "attention": {"attention_ns", "dense_ns"}, "state": set(), "router": {"gate_ns", "speculate_ns"},
    "shared": {"shared_ns"}, "dense": {"dense_ns"}, "embedding": set(), "head": {"head_ns"},
}


@pytest.mark.parametrize("engine", [None, "llama.cpp"])
@pytest.mark.parametrize("part", PARTS)
def test_bits_of_a_part_move_its_own_times(part: str, engine: str | None) -> None:
    wide = PartBits.uniform(8.0)
    shapes = [replace(DEEPSEEK, kv_bits=16.0, part_bits=bits) for bits in (wide, replace(wide, **{part: 4.0}))]
    hardware = load_hardware("rtx-3090+ddr5-5600+16-cores" if engine else "rtx3090-ddr4")
    tables = (fitted_costs(each, hardware, load_engine(engine), 1) if engine else roofline(each, hardware, 1)
              for each in shapes)
    before, after = (table.step(1, [64]) for table in tables)
    moved = {name for name in StepCosts._fields if getattr(after, name) < getattr(before, name)}
    assert moved - {"estimator_ns"} == PARTS[part]
    assert after == before._replace(**{name: getattr(after, name) for name in moved})


def test_linear_attention_is_read_in_the_bits_of_states() -> None:
    wide, kind = PartBits.uniform(8.0), Attention("state", 13_762_560, state_bytes=64)
    bits = wide, replace(wide, state=4.0), replace(wide, attention=4.0)
    shapes = [replace(DEEPSEEK, attention=(kind,), attention_layers=(0,) * 27, part_bits=each) for each in bits]
    whole, halved, same = (costs_of("rtx3090-ddr4", shape).step(1, [64]).attention_ns for shape in shapes)
    assert halved < whole == same


def test_attention_reads_its_cache_and_writes_the_new_token() -> None:
    """A token of 2,048 elements, 100 of them to read and one to write; 41.9 million weights of 2 bytes."""
    size = 2 * 41_943_040 + 2 * 2048 * (100 + 1)
    assert costs_of("rtx3090-ddr4").step(1, [100]).attention_ns == pytest.approx(size / (936 * 0.85) + 36_000, abs=1)


def test_attention_over_a_long_prompt_is_bound_by_its_products() -> None:
    """4,096 tokens: 2 flops a weight and token, 4 a pair of tokens, head and element; at 0.85 of 71.2 TFLOPS."""
    flops = 2 * 41_943_040 * 4096 + 4 * 32 * 128 * 4096 * 4097 / 2
    expected = pytest.approx(flops / (71.2e3 * 0.85) + 36_000, abs=1)
    assert costs_of("rtx3090-ddr4").step(4096, [4096]).attention_ns == expected


def test_an_expert_that_is_written_back_takes_the_other_direction_of_the_link() -> None:
    assert costs_of("rtx3090-ddr4").experts[0].writeback_ns == pytest.approx(10_000 + 352_321_536 / 26.3, abs=1)


def test_the_rates_of_a_cost_table_are_listed() -> None:
    assert [field.name for field in fields(CostTable) if field.name.endswith("_permille")] == list(RATES)


def test_context_costs_attention_and_nothing_else() -> None:
    costs = costs_of("rtx3090-ddr4")
    short, long = costs.step(1, [64]), costs.step(1, [65536])
    assert long.attention_ns > short.attention_ns
    assert long._replace(attention_ns=0) == short._replace(attention_ns=0)


def test_prefill_costs_more_than_a_decode_step_and_less_than_one_per_token() -> None:
    costs = costs_of("rtx3090-ddr4")
    decode, prefill = costs.step(1, [512]), costs.step(512, [512])
    assert decode.attention_ns < prefill.attention_ns < 512 * decode.attention_ns
    assert prefill.head_ns == decode.head_ns  # only the last token of a sequence has a next one


def test_layers_of_several_kinds_cost_their_mean() -> None:
    """Half of the layers have a window of 1,024 tokens, and take the time of that context."""
    full = Attention("full", 41_943_040, 32, 128, 2048)
    window = replace(full, reach="window", span=1024)
    mixed = replace(MIXTRAL, attention=(window, full), attention_layers=(0, 1) * 16)
    alone, first, both = (
        costs_of("rtx3090-ddr4", shape).step(1, [context]).attention_ns
        for shape, context in ((MIXTRAL, 65536), (MIXTRAL, 1024), (mixed, 65536))
    )
    assert both == pytest.approx((alone + first) / 2, abs=1)


def test_a_batch_of_two_reads_both_caches() -> None:
    costs = costs_of("rtx3090-ddr4")
    one, two = costs.step(1, [32768]), costs.step(2, [32768, 32768])
    weights_ns = costs.step(1, [1]).attention_ns
    assert two.attention_ns - weights_ns == pytest.approx(2 * (one.attention_ns - weights_ns), rel=0.01)


def test_dense_layers_and_shared_experts() -> None:
    plain, deep = costs_of("rtx3090-ddr4").step(1, [64]), costs_of("rtx3090-ddr4", DEEPSEEK).step(1, [64])
    assert plain.dense_ns == plain.shared_ns == 0
    assert deep.dense_ns > deep.attention_ns
    assert deep.shared_ns > 0
    assert deep.speculate_ns == deep.gate_ns


def test_the_estimator_of_speculating_experts_is_one_of_17_million_weights() -> None:
    """For Qwen3-30B: in, an MLP of four times the width, out; read at 2 bytes each, and 8 kernels."""
    qwen3 = replace(DEEPSEEK, hidden=2048, experts=128)
    width = 1331  # 0.65 x 2048
    weights = 2048 * width + 2 * width * 4 * width + width * 128
    assert weights == pytest.approx(17e6, rel=0.005)
    assert costs_of("rtx3090-ddr4", qwen3).step(1, [1]).estimator_ns == round(weights * 2 / (936 * 0.85) + 8 * 3000)


def test_results_and_activations_grow_with_tokens() -> None:
    costs = costs_of("rtx3090-ddr4")
    one, many = costs.step(1, [64]), costs.step(4096, [4096])
    assert many.activations_ns - 10_000 == pytest.approx(4096 * 4096 * 2 / 26.3, rel=0.001)
    assert many.result_ns > one.result_ns
    assert many.routing_ns > one.routing_ns


@pytest.mark.parametrize(("tokens", "context"), [(0, [1]), (1, [])])
def test_a_step_needs_tokens_and_sequences(tokens: int, context: list[int]) -> None:
    with pytest.raises(CostError, match="expected >= 1 token and one context per sequence"):
        costs_of("rtx3090-ddr4").step(tokens, context)


def test_max_tokens_must_be_positive() -> None:
    with pytest.raises(CostError, match="max_tokens must be >= 1"):
        costs_on(load_hardware("rtx3090-ddr4"), MIXTRAL, 0)


def test_plan_costs_scale_with_the_host() -> None:
    plain, slow = costs_of("rtx3090-ddr4"), costs_of("rtx3090-ddr4", host__plan_factor=2.5)
    slower_ns, plain_ns = (costs.decision_ns("plan", "default", 6) for costs in (slow, plain))
    assert abs(slower_ns - 2.5 * plain_ns) <= 2.5  # each is rounded by itself
    assert plain.decision_ns("plan", "oracle", 6) == plain.decision_ns("foresee", "oracle", 6) == 0


@given(st.integers(1, 1000), st.integers(1, 512), st.lists(st.integers(1, 9999), min_size=1, max_size=9))
def test_scaled_multiplies_every_time_exactly(c: int, tokens: int, context: list[int]) -> None:
    costs = costs_of("rtx3090-ddr4", DEEPSEEK, max_tokens=32)
    big = scaled(costs, c)
    big.validate()
    assert big.step(tokens, context) == StepCosts(*(ns * c for ns in costs.step(tokens, context)))
    for name in (*LAUNCHES, "sync_ns", "lead_ns", "tail_ns"):
        assert getattr(big, name) == c * getattr(costs, name)
    for name in ("gpu_ns", "cpu_ns"):
        assert list(getattr(big.experts[0], name)) == [c * ns for ns in getattr(costs.experts[0], name)]
    assert big.experts[0].copy_ns == c * costs.experts[0].copy_ns
    assert big.experts[0].first_cpu_ns == c * costs.experts[0].first_cpu_ns
    assert big.experts[0].expert_bytes == costs.experts[0].expert_bytes
    assert big.decision_ns("plan", "dali", 7) == c * costs.decision_ns("plan", "dali", 7)
    assert big.decision_ns("foresee", "dali", 7) == c * costs.decision_ns("foresee", "dali", 7)
    assert big.decision_ns("observe", "hybrimoe", 7) == c * costs.decision_ns("observe", "hybrimoe", 7)


def test_scaling_twice_is_scaling_by_the_product() -> None:
    costs = uniform_costs()
    assert scaled(scaled(costs, 3), 5) == scaled(costs, 15)


@pytest.mark.parametrize("c", [0, -2, 1.5])
def test_scaled_refuses_what_leaves_no_whole_times(c: Any) -> None:
    with pytest.raises(CostError, match="c must be a whole number >= 1"):
        scaled(uniform_costs(), c)


def test_uniform_costs_are_what_they_say() -> None:
    costs = uniform_costs(3, max_tokens=4, plan_ns=9)
    assert len(costs.experts) == 3
    assert costs.experts[2].gpu_ns == (0, 5, 5, 5, 5)
    assert costs.experts[2].cpu_ns == (0, 7, 14, 21, 28)
    assert costs.experts[2].copy_ns == 20
    assert costs.step(1, [1]).attention_ns == 10
    assert costs.decision_ns("plan", "any", 64) == 9


def test_a_table_of_one_token_is_valid() -> None:
    uniform_costs(max_tokens=1).validate()


@pytest.mark.parametrize(("changed", "expected"), [
    ({"gpu_ns": (1, 5, 5)}, r"layer 0: gpu_ns\[0\] is the time of no token and must be 0, got 1"),
    ({"cpu_ns": (0, 7, 6)}, r"layer 0: cpu_ns\[2\] = 6: expected whole ns, >= 7"),
    ({"cpu_ns": (0, 7.5, 8)}, r"layer 0: cpu_ns\[1\] = 7.5: expected whole ns"),
    ({"gpu_ns": (0, 0, 5)}, r"layer 0: gpu_ns\[1\] = 0: expected whole ns, >= 1"),
    ({"cpu_ns": (0, 7)}, "cpu_ns must have max_tokens . 1 >= 2 entries.*expected 3, got 2"),
    ({"copy_ns": 0}, "copy_ns: expected a whole number >= 1, got 0"),
    ({"expert_bytes": 1.5}, "expert_bytes: expected a whole number >= 1, got 1.5"),
    ({"cpu_permille": 0}, "cpu_permille: expected a whole number from 1 to 1000, got 0"),
    ({"copy_permille": 1001}, "copy_permille: expected a whole number from 1 to 1000, got 1001"),
])
def test_validate_names_the_broken_entry(changed: dict[str, Any], expected: str) -> None:
    costs = uniform_costs(max_tokens=2)
    broken = replace(costs, experts=(costs.experts[0]._replace(**changed), costs.experts[1]))
    with pytest.raises(CostError, match=expected):
        broken.validate()


@pytest.mark.parametrize(("changed", "expected"), [
    ({"experts": ()}, "experts: expected a list .* that is not empty"),
    ({"sync_ns": -1}, "sync_ns: expected a whole number >= 0, got -1"),
    ({"result_path": "queue"}, "result_path: expected 'direct' or 'h2d', got 'queue'"),
])
def test_validate_names_the_broken_number(changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(CostError, match=expected):
        replace(uniform_costs(), **changed).validate()
