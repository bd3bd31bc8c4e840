"""Times of steps from measured kernels, worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from realrun.llama_cpp.kernel_engine import piece_ns
from sim.costs.engine import load_engine
from sim.costs.kernel_costs import (
    AttentionTimes,
    BlockRates,
    Kernels,
    KernelSteps,
    ProductRates,
    kernel_costs,
    kernel_steps,
    longest_share,
)
from sim.machine.hardware import load_hardware
from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Sourced
from traces.models.attention import Attention
from traces.models.shape import ModelShape
from trilane.engines.split_speed import StaticSplit, decode_time, prompt_time

SHAPE = ModelShape(
    name="toy@q8_0", moe_layers=2, dense_layers=0, experts=4, top_k=2, hidden=32, expert_width=32, heads=2, kv_heads=1,
    head_dim=4, kv_width=8, attention_params=1000, vocab=100, weight_bits=8, dense_bits=8, kv_bits=16,
)


def of(value: object) -> Sourced:  # type: ignore[type-arg]
    return Sourced(value, "made up", "low")


def rates(*flops_per_s: tuple[float, ...]) -> BlockRates:
    return BlockRates(*[of(ProductRates((1, 4)[: len(flops_per_s[0])], flops_per_s))] * 2)


KERNELS = Kernels(
    threads=(1, 4),
    products={"q8_0": rates((1e9, 2e9), (4e9, 8e9)), "f32": rates((1e9,), (4e9,))},
    attention=AttentionTimes(
        (1000, 4000), *(of(((ns, 3 * ns), (ns / 2, ns * 3 / 2))) for ns in (1.0, 10.0, 1.0, 4.0, 0.5)), of(8)
    ),
    chosen_ns=of((0.5, 0.25)),
    layer_ns={"grouped": of((700.0, 100.0))},
    token_ns={"grouped": of((30.0, 10.0))},
    step_ns=of((900.0, 300.0)),
)


def steps(threads: int = 1) -> KernelSteps:
    return kernel_steps(SHAPE, KERNELS, threads)


def test_a_token_reads_its_weights_its_cache_and_pairs_with_every_key() -> None:
    """2,000 operations at one a ns; 10 keys of 8 elements of 2 bytes; 2 heads x 10 pairs x (10 + 8 x 1 ns)."""
    step = steps().step(1, (10,))
    assert step.attention_ns == 2000 + 160 + 360 + 700 + 30
    assert (step.gate_ns, step.shared_ns, step.dense_ns) == (256, 0, 0)
    assert step.combine_ns == 2 * 32 * 0.5  # two experts, whose outputs have 32 elements
    assert step.head_ns == 6400 + 900


def test_four_threads_have_their_own_numbers_and_three_those_of_one() -> None:
    assert steps(4).step(1, (10,)).attention_ns == 500 + 80 + 180 + 100 + 10
    assert steps(3).step(1, (10,)) == steps(1).step(1, (10,))


def test_each_thread_has_an_equal_part_of_the_cells_of_a_token() -> None:
    """The first of two threads has 1,152 of 2,049 keys in 2,304 cells, and of 257 in 512 all but one; up to 256 cells
    are not split, and three threads have 171 of 512 cells."""
    assert longest_share(2049, 2) == 2304 / 2049
    assert longest_share(257, 2) == 512 / 257
    assert longest_share(300, 3) == 171 * 3 / 300
    assert longest_share(300, 1) == longest_share(256, 2) == 1


def test_the_longest_share_of_keys_takes_its_time_unless_there_is_a_window() -> None:
    keys = 300 * 16 * 0.5 + 2 * 300 * 9
    assert steps(4).step(1, (300,)).attention_ns == 500 + round(128 * 4 / 300 * keys) + 110
    two, first = (steps(4).step(2, (length, length)).attention_ns for length in (300, 1))
    assert two - first == 2 * 299 / 300 * keys
    window = Attention("window", 1000, heads=2, head_dim=4, kv_width=8, span=300)
    shape = replace(SHAPE, attention=(window,), attention_layers=(0, 0))
    assert kernel_steps(shape, KERNELS, 4).step(1, (900,)).attention_ns == 500 + keys + 110


def test_a_product_of_more_rows_takes_the_time_between_those_measured() -> None:
    """3,072 weights: 6,144 ns of one row, 3,072 ns a row of four and more; of two rows, half-way by their logarithm."""
    ns = steps().expert_ns(np.array([0.0, 1.0, 2.0, 4.0, 8.0]))
    np.testing.assert_allclose(ns, [0, 6144, 2 * 4608, 4 * 3072, 8 * 3072])


def test_keys_take_the_time_between_the_depths_at_which_they_were_measured() -> None:
    """A key takes 52 ns behind up to 1,000, three times as long behind 4,000 and more; half-way by their logarithm."""
    ns = [steps().step(1, (depth + 1,)).attention_ns - 2730 for depth in (1000, 2000, 4000, 8000)]
    assert ns == [1001 * 52, 2001 * 2 * 52, 4001 * 3 * 52, 8001 * 3 * 52]
    two = steps().step(2, (1001, 4001)).attention_ns - steps().step(2, (1, 1)).attention_ns
    mean = 1 + 2 * np.log(2.5) / np.log(4)  # 2,500 in the cache of a sequence
    assert two == pytest.approx(5002 * 52 * mean - 2 * 52, abs=1)


def test_a_window_has_the_times_of_the_keys_that_it_reads() -> None:
    window = Attention("window", 1000, heads=2, head_dim=4, kv_width=8, span=1000)
    shape = replace(SHAPE, attention=(window,), attention_layers=(0, 0))
    assert kernel_steps(shape, KERNELS, 1).step(1, (8000,)).attention_ns == 2730 + 1000 * 52


def test_many_tokens_attend_in_tiles() -> None:
    """8 tokens in 8: 36 pairs of 2 heads, each 4 + 8 x 0.5 ns; their rows at 2 operations a ns."""
    assert steps().step(8, (8,)).attention_ns == 8 * 1000 + 128 + 72 * 8 + 700 + 8 * 30


def test_the_last_layer_goes_on_with_one_token() -> None:
    """A piece is the steps' parts, but that one of the two layers has the experts of one token alone."""
    costs, one = steps().step(8, (8,)), steps().step(1, (1,))
    active = 4 * (1 - 0.5**8)  # experts that any of the 8 tokens chooses
    of_all, of_one = active * steps().expert_ns(np.array([16 / active]))[0], 2 * steps().expert_ns(np.array([1.0]))[0]
    gates = costs.gate_ns + costs.combine_ns + one.gate_ns + one.combine_ns
    wanted = 2 * costs.attention_ns + gates + of_all + of_one + costs.head_ns
    assert piece_ns(steps(), 8, 8) == pytest.approx(wanted)


def test_weights_that_were_not_measured_are_refused() -> None:
    hardware = load_hardware("none+ddr5-4800+2-cores")
    with pytest.raises(HardwareError, match=r"weights were not measured: .*'q4_0'.*q8_0"):
        kernel_costs(replace(SHAPE, name="toy@q4_0"), hardware, KERNELS, 4, threads=1)


def test_an_engine_with_kernels_answers_for_a_machine_without_a_gpu() -> None:
    """Through the engine, the machine's cores are the threads, and the parts of a token are those of the steps."""
    engine = replace(load_engine("llama.cpp"), kernels=KERNELS)
    machine = load_hardware("none+ddr5-4800+4-cores")
    found = decode_time(SHAPE, machine, engine, StaticSplit(0), 10)
    assert found.attention_ns == 2 * steps(4).step(1, (10,)).attention_ns
    assert found.gpu_experts_ns == 2 * 2 * round(steps(4).expert_ns(np.array([1.0]))[0])
    alone = decode_time(SHAPE, machine, engine, StaticSplit(0, threads=1), 10)
    assert alone.attention_ns == 2 * steps(1).step(1, (10,)).attention_ns


def test_a_prompt_on_such_a_machine_is_the_pieces_of_the_kernels() -> None:
    engine, machine = replace(load_engine("llama.cpp"), kernels=KERNELS), load_hardware("none+ddr5-4800+4-cores")
    found = prompt_time(SHAPE, machine, engine, StaticSplit(0, piece_tokens=8), 16)
    assert found.total_ns == pytest.approx(piece_ns(steps(4), 8, 8) + piece_ns(steps(4), 8, 16), rel=1e-3)


def test_the_engine_of_the_committed_validation_is_read_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    from trilane.verbs.engines import engines

    engines("docs/validation/llama.cpp/engine.yaml")
    assert "kernels.products.q4_0.experts" in capsys.readouterr().out
