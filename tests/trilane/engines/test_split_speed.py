"""Speeds of a static split: sums by hand, the simulator's own times, and better machines that are never slower."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.costs.engine import load_engine, load_fitted
from sim.costs.fitted_costs import fitted_costs
from sim.machine.hardware import Hardware, load_hardware
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from traces.models.catalogue import load_model
from traces.models.shape import ModelShape
from trilane.engines.split_speed import ExpertCache, StaticSplit, decode_time, mean_decode_time, prompt_time

ENGINES = ("llama.cpp", "llama.cpp-2025", "llama.cpp-vulkan", "ik_llama.cpp", "ktransformers")
BETTER_UPWARDS = ("gpu.bandwidth_bytes_per_s", "gpu.integer_ops_per_s", "cpu.read_bytes_per_s", "link.h2d_bytes_per_s")

SPLIT = StaticSplit(26, piece_tokens=512)


@cache
def model(name: str = "deepseek-v2-lite@q4_k_m") -> ModelShape:
    return load_model(name)


@cache
def machine(name: str = "rtx-3060+ddr4-3200+ryzen-5-5600") -> Hardware:
    return load_hardware(name)


def test_a_token_is_the_sum_of_its_layers() -> None:
    shape, engine = model(), load_engine("llama.cpp")
    costs = fitted_costs(shape, machine(), engine, 1)
    step, expert = costs.step(1, (500,)), costs.experts[0]
    found = decode_time(shape, machine(), engine, StaticSplit(cpu_layers=10), 500)
    assert found.attention_ns == 26 * step.attention_ns
    assert found.gpu_experts_ns == 16 * 6 * expert.gpu_ns[1]
    assert (found.cpu_experts_ns, found.handing_over_ns) == (10 * 6 * expert.cpu_ns[1], 10 * expert.first_cpu_ns)
    assert found.others_ns == 26 * (step.gate_ns + step.shared_ns + step.combine_ns) + step.dense_ns + step.head_ns
    assert found.total_ns == sum(vars(found).values())


def test_a_step_of_three_sequences_is_the_sum_of_its_layers() -> None:
    """Of 64 experts a token has 6: 3 tokens come to 64 (1 - (58/64)^3) of them, with 18 rows together."""
    shape, engine, active = model(), load_engine("ktransformers"), 64 * (1 - (58 / 64) ** 3)
    costs = fitted_costs(shape, machine(), engine, 2)
    step, expert, more = costs.step(3, (7, 7, 7)), costs.experts[0], 18 / active - 1
    gpu_ns, cpu_ns = (active * ((1 - more) * ns[1] + more * ns[2]) for ns in (expert.gpu_ns, expert.cpu_ns))
    found = decode_time(shape, machine(), engine, StaticSplit(10, gpu_experts=16), 7, batch=3)
    assert found.attention_ns == 26 * step.attention_ns
    assert found.others_ns == 26 * (step.gate_ns + step.shared_ns + step.combine_ns) + step.dense_ns + step.head_ns
    assert found.gpu_experts_ns == pytest.approx((16 + 10 / 4) * gpu_ns, abs=1)
    assert found.cpu_experts_ns == pytest.approx(10 * 3 / 4 * cpu_ns, abs=1)
    assert found.handing_over_ns == 10 * expert.first_cpu_ns


def test_the_first_token_has_itself_in_the_cache() -> None:
    shape, engine = model(), load_engine("llama.cpp")
    none, one, two = (decode_time(shape, machine(), engine, SPLIT, context) for context in (0, 1, 2))
    assert none == one
    assert one.attention_ns < two.attention_ns


def test_a_prompt_comes_in_pieces_of_the_engine_after_what_is_cached() -> None:
    """1,100 tokens after 300: two pieces of 512 and one of 76, each with its own experts and its own context."""
    shape, engine = model(), load_engine("llama.cpp").with_numbers({"prompt.piece_tokens": 512})
    found = prompt_time(shape, machine(), engine, StaticSplit(26), 1100, before=300)
    pieces = [
        prompt_time(shape, machine(), engine, StaticSplit(26, piece_tokens=2048), tokens, before)
        for tokens, before in ((512, 300), (512, 812), (76, 1324))
    ]
    for name, value in vars(found).items():
        assert value == pytest.approx(sum(getattr(piece, name) for piece in pieces), abs=2), name
    assert found.total_ns == sum(vars(found).values())
    costs = fitted_costs(shape, machine(), engine, 48).step(512, (812,))
    one = pieces[0]
    assert one.attention_ns == 26 * costs.attention_ns
    assert one.others_ns == 26 * (costs.gate_ns + costs.shared_ns + costs.combine_ns) + costs.dense_ns + costs.head_ns


def test_experts_that_the_gpu_has_in_cpu_layers_are_computed_there() -> None:
    shape, engine = model(), load_engine("ktransformers")
    half = decode_time(shape, machine(), engine, StaticSplit(26, gpu_experts=32), 64)
    none = decode_time(shape, machine(), engine, StaticSplit(26), 64)
    assert half.cpu_experts_ns * 2 == none.cpu_experts_ns
    assert half.handing_over_ns == none.handing_over_ns


@pytest.mark.parametrize("engine", ["llama.cpp", "llama.cpp-vulkan"])
@pytest.mark.parametrize("cached", [0.0001, 0.5])
def test_the_simulator_comes_to_the_same_time(engine: str, cached: float) -> None:
    """It also moves activations and results over the link, and computes shared experts next to the CPU's."""
    scenario = Scenario(
        trace="synthetic:deepseek-v2-lite", model="deepseek-v2-lite@q4_k_m", hardware="rtx-3060+ddr4-3200+ryzen-5-5600",
        engine=engine, policy="llama.cpp@impl", cached_share=cached, prompt_tokens=16, generated_tokens=6,
    )
    simulated = simulate(scenario).metrics.tpot_ms
    slots = prepare(scenario).memory.slots
    cpu_layers = 26 - slots // 64
    closed = decode_time(model(), machine(), load_engine(engine), StaticSplit(cpu_layers), 16 + 3)
    assert simulated == pytest.approx(closed.total_ns / 1e6, rel=0.04)


@pytest.mark.parametrize("cached", [0.1, 0.4])
def test_the_simulator_is_up_to_a_tenth_faster_with_a_cache_of_experts(cached: float) -> None:
    """With the hit rate that it had. It computes hits and shared experts while the misses are copied; the engine has
    one stream for all of them."""
    scenario = Scenario(
        trace="synthetic:deepseek-v2-lite", model="deepseek-v2-lite@q4_k_m", hardware="rtx-3060+ddr4-3200+ryzen-5-5600",
        engine="llama.cpp-cache", policy="llama.cpp@cache", cached_share=cached, prompt_tokens=16, generated_tokens=40,
    )
    found = simulate(scenario).metrics
    assert found.decode_resident_hit_rate is not None
    split = StaticSplit(26, cache=ExpertCache(found.decode_resident_hit_rate, cached))
    closed = decode_time(model(), machine(), load_engine("llama.cpp-cache"), split, 16 + 20)
    assert 0.9 < found.tpot_ms / (closed.total_ns / 1e6) < 1


def test_a_token_whose_experts_come_from_a_cache_waits_for_those_that_are_missing() -> None:
    shape, engine = model(), load_engine("llama.cpp-cache")
    costs = fitted_costs(shape, machine(), engine, 1)
    found = decode_time(shape, machine(), engine, StaticSplit(10, cache=ExpertCache(0.75, 0.5)), 500)
    all_there = decode_time(shape, machine(), engine, StaticSplit(0), 500)
    assert found.copies_ns == pytest.approx(10 * 6 * 0.25 * costs.experts[0].copy_ns)
    assert found.handing_over_ns == 10 * (costs.sync_ns + costs.step(1, (500,)).routing_ns)
    assert (found.gpu_experts_ns, found.cpu_experts_ns) == (all_there.gpu_experts_ns, 0)


def test_a_prompt_copies_from_the_cache_what_it_holds() -> None:
    shape, engine = model(), load_engine("llama.cpp-cache")
    without, with_cache = (
        prompt_time(shape, machine(), engine, StaticSplit(10, cache=cached), 512)
        for cached in (None, ExpertCache(0.9, 0.25))
    )
    assert with_cache.copies_ns == pytest.approx(0.75 * without.copies_ns, rel=1e-6)


@pytest.mark.parametrize("repacked", [False, True])
def test_a_piece_of_a_prompt_is_the_sum_of_its_layers(repacked: bool) -> None:
    """512 tokens come to all 64 experts of a layer, 48 tokens each; a quarter of them is on the GPU in CPU layers."""
    shape, engine = model(), load_engine("ik_llama.cpp")
    expert = fitted_costs(shape, machine(), engine, 48, repacked=repacked).experts[0]
    found = prompt_time(shape, machine(), engine, StaticSplit(10, gpu_experts=16, repacked=repacked), 512)
    there, elsewhere = 16 * 64 + 10 * 16, 10 * 48
    copied, computed = (0, elsewhere) if repacked else (elsewhere, 0)
    assert found.gpu_experts_ns == pytest.approx((there + copied) * expert.gpu_ns[48])
    assert found.cpu_experts_ns == pytest.approx(computed * expert.cpu_ns[48])
    assert found.copies_ns == pytest.approx(copied * expert.copy_ns)


def test_a_prompt_in_pieces_copies_the_experts_for_each_of_them() -> None:
    shape, engine = model(), load_engine("llama.cpp")
    one = prompt_time(shape, machine(), engine, StaticSplit(26, piece_tokens=512), 512)
    four = prompt_time(shape, machine(), engine, StaticSplit(26, piece_tokens=512), 2048)
    whole = prompt_time(shape, machine(), engine, StaticSplit(26, piece_tokens=2048), 2048)
    assert four.copies_ns == pytest.approx(4 * one.copies_ns, rel=1e-6)
    assert whole.copies_ns == pytest.approx(one.copies_ns, rel=1e-3)  # all 64 experts are active in either
    assert whole.total_ns < four.total_ns
    assert four.attention_ns > 4 * one.attention_ns  # later pieces look back farther


def test_the_last_piece_of_a_prompt_copies_its_own_experts() -> None:
    shape, engine = model(), load_engine("llama.cpp")
    first, both = (prompt_time(shape, machine(), engine, SPLIT, tokens) for tokens in (512, 612))
    rest = prompt_time(shape, machine(), engine, SPLIT, 100, before=512)
    assert both.total_ns == pytest.approx(first.total_ns + rest.total_ns, abs=5)
    assert rest.copies_ns > 0.99 * first.copies_ns


def test_experts_of_fewer_tokens_than_are_copied_for_are_computed_on_the_cpu() -> None:
    shape, engine = model(), load_engine("llama.cpp")
    few, more = (prompt_time(shape, machine(), engine, SPLIT, tokens) for tokens in (31, 32))
    assert (few.copies_ns, more.cpu_experts_ns) == (0, 0)
    assert few.cpu_experts_ns > 0 < more.copies_ns


def test_repacked_weights_are_computed_where_they_are() -> None:
    shape, engine = model(), load_engine("ik_llama.cpp")
    copied, computed = (
        prompt_time(shape, machine(), engine, StaticSplit(26, repacked=repacked), 512) for repacked in (False, True)
    )
    assert copied.cpu_experts_ns == 0 < copied.copies_ns
    assert computed.copies_ns == 0 < computed.cpu_experts_ns
    assert copied.attention_ns == computed.attention_ns


@pytest.mark.parametrize("engine", ["llama.cpp", "llama.cpp-2025"])
@pytest.mark.parametrize("name", ["deepseek-v2-lite@q4_k_m", "qwen3-30b-a3b@q4_k_m"])
def test_each_token_of_a_prompt_takes_a_little_more_time_and_is_no_slower_than_those_before(
    engine: str, name: str
) -> None:
    """With all experts on the GPU. Where some are in host memory, 32 tokens are the first for which they are copied."""
    shape, software = model(name), load_engine(engine)
    times = [prompt_time(shape, machine(), software, StaticSplit(0), tokens).total_ns for tokens in range(1, 513)]
    assert all(less < more for less, more in pairwise(times))
    per_token = [time / tokens for tokens, time in enumerate(times, start=1)]
    assert all(more <= 1.04 * less for less, more in pairwise(per_token))


@pytest.mark.parametrize(("hardware", "engine", "name", "measured"), [
    ("gb10", "llama.cpp", "gpt-oss-120b@mxfp4", 59.02),
    ("gb10", "llama.cpp", "qwen3-30b-a3b@q8_0", 60.92),
    ("strix-halo", "llama.cpp-vulkan", "gpt-oss-120b@mxfp4", 55.29),
    ("strix-halo", "llama.cpp-vulkan", "qwen3.6-35b-a3b@q4_k_m", 60.78),
    ("apple-m2-ultra", "llama.cpp-metal", "qwen3-30b-a3b@q8_0", 76.31),
])
def test_unified_memory_is_as_fast_as_it_was_measured(hardware: str, engine: str, name: str, measured: float) -> None:
    """Fixed times of layers do not grow as bandwidth falls. Sources: rows 303 to 326 of measured_speeds.csv."""
    time = decode_time(model(name), machine(hardware), load_engine(engine), StaticSplit(0), 64)
    assert 1e9 / time.total_ns == pytest.approx(measured, rel=0.12)


def test_pieces_of_early_builds_have_a_long_fixed_time() -> None:
    """DeepSeek-V2-Lite on an RTX 4080: 4,180 tokens/s in pieces of 512, 7,200 of 2,048 (ik_llama.cpp PR 241)."""
    shape, hardware = model("deepseek-v2-lite@iq4_nl"), machine("rtx-4080+ddr5-4000+ryzen-9-7950x")
    for tokens, measured in ((512, 4180), (1024, 5876), (2048, 7200)):
        split = StaticSplit(0, piece_tokens=2048)
        time = prompt_time(shape, hardware, load_engine("ik_llama.cpp-2025"), split, tokens)
        assert tokens * 1e9 / time.total_ns == pytest.approx(measured, rel=0.15)


def test_copies_ahead_are_waited_for_only_where_they_take_longer() -> None:
    shape, engine = model(), load_engine("ktransformers")
    apart = replace(engine, prompt=load_engine("llama.cpp").prompt)
    one, other = (prompt_time(shape, machine(), each, StaticSplit(26), 512) for each in (engine, apart))
    computed = one.attention_ns + one.others_ns + one.gpu_experts_ns
    assert one.total_ns == max(one.total_ns, computed)
    assert one.copies_ns + computed < other.copies_ns + computed


def test_prompts_of_an_early_engine_are_computed_where_the_experts_are() -> None:
    """Nothing is copied, and a second socket's cores make them quicker."""
    shape, engine = model(), load_engine("ktransformers-2025")
    one, two = (
        prompt_time(shape, load_hardware(f"rtx-4090+ddr5-4800-ecc+xeon-gold-6454s{more}"), engine, StaticSplit(26), 512)
        for more in ("", "+2-sockets")
    )
    assert one.copies_ns == two.copies_ns == 0
    assert one.cpu_experts_ns / two.cpu_experts_ns == pytest.approx(2, rel=0.3)


def test_sequences_that_decode_together_share_the_reading_of_their_experts() -> None:
    """As measured on GB10: Qwen3-30B in Q8_0, 512 tokens of each sequence (ggml-org/llama.cpp benches/dgx-spark.md)."""
    shape, hardware, engine = model("qwen3-30b-a3b@q8_0"), machine("gb10"), load_engine("llama.cpp")
    speeds = {
        batch: batch * 1e9 / decode_time(shape, hardware, engine, StaticSplit(0), 528, batch).total_ns
        for batch in (1, 2, 4, 8, 16, 32)
    }
    measured = {1: 57.63, 2: 64.11, 4: 102.01, 8: 154.91, 16: 232.98, 32: 345.01}
    for batch, speed in speeds.items():
        assert speed == pytest.approx(measured[batch], rel=0.35)
    assert list(speeds.values()) == sorted(speeds.values())


def test_threads_and_a_machine_without_a_gpu() -> None:
    shape, engine = model(), load_engine("llama.cpp")
    times = [decode_time(shape, machine(), engine, StaticSplit(26, threads=n), 64).total_ns for n in (1, 2, 4, 6)]
    assert times == sorted(times, reverse=True)
    alone = load_hardware("none+ddr4-3200+ryzen-5-5600")
    split = decode_time(shape, alone, engine, StaticSplit(26), 64)
    assert (split.cpu_experts_ns, split.handing_over_ns) == (0, 0)  # the CPU is all that computes
    assert split == decode_time(shape, alone, engine, StaticSplit(0), 64)


@given(
    engine=st.sampled_from(ENGINES),
    key=st.sampled_from(BETTER_UPWARDS),
    factor=st.floats(1.01, 8),
    cpu_layers=st.integers(0, 26),
    tokens=st.integers(1, 4096),
    repacked=st.booleans(),
)
def test_law_a_machine_better_in_one_number_is_never_slower(
    engine: str, key: str, factor: float, cpu_layers: int, tokens: int, repacked: bool
) -> None:
    shape, software, base = model(), load_engine(engine), machine()
    better = base.with_numbers({key: base.flat()[key] * factor})
    split = StaticSplit(cpu_layers, repacked=repacked and engine == "ik_llama.cpp")
    for one in (decode_time, prompt_time):
        before, after = (one(shape, each, software, split, tokens).total_ns for each in (base, better))  # type: ignore[operator]
        assert after <= before + len(vars(one(shape, base, software, split, tokens))), key  # type: ignore[operator]
    more = replace(base, cpu=replace(base.cpu, cores=base.cpu.cores + 2))
    assert (
        decode_time(shape, more, software, split, tokens).total_ns
        <= decode_time(shape, base, software, split, tokens).total_ns
    )


@pytest.mark.parametrize(("name", "lengths"), [
    ("llama-4-scout@q4_k_m", range(8100, 8356)),  # a chunk of 8,192 tokens ends in the answer
    ("llama-4-scout@q4_k_m", range(16000, 16100)),
    ("gpt-oss-20b", range(100, 300)),  # windows of 128 tokens become full
    ("gemma-4-26b-a4b@q4_k_m", range(900, 1200)),
    ("deepseek-v2-lite@q4_k_m", range(500, 700)),
])
def test_the_time_of_an_answer_is_the_mean_of_its_steps(name: str, lengths: range) -> None:
    asked = model(name), load_hardware("rtx-3060+ddr4-3200"), load_engine("llama.cpp"), StaticSplit(8)
    steps = [decode_time(*asked, length).total_ns for length in lengths]
    assert mean_decode_time(*asked, lengths).total_ns == pytest.approx(sum(steps) / len(steps), rel=1e-4)


def test_where_a_chunk_ends_the_step_in_the_middle_is_not_the_mean() -> None:
    asked = model("llama-4-scout@q4_k_m"), load_hardware("rtx-3060+ddr4-3200"), load_engine("llama.cpp"), StaticSplit(8)
    lengths = range(8100, 8356)
    middle, mean = decode_time(*asked, lengths[128]).total_ns, mean_decode_time(*asked, lengths).total_ns
    assert abs(middle / mean - 1) > 0.001


def test_a_small_piece_copies_the_experts_that_it_uses_or_in_older_builds_all() -> None:
    """33 tokens come to 64 (1 - (58/64)^33) of 64 experts."""
    shape, engine = model(), load_fitted("llama.cpp")
    number = engine.prompt.copied_experts
    older = replace(engine, prompt=engine.prompt._replace(copied_experts=number._replace(value="all")))
    used, every = (prompt_time(shape, machine(), one, StaticSplit(10), 33) for one in (engine, older))
    assert used.copies_ns / every.copies_ns == pytest.approx(1 - (58 / 64) ** 33)
    assert used.gpu_experts_ns == every.gpu_experts_ns
    assert load_fitted("llama.cpp-2025").prompt.copied_experts.value == "all"
