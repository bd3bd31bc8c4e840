"""Times from measured kernels, by hand: of steps, and of a model on a GPU with some experts on the CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from realrun.llama_cpp.kernel_numbers import piece_ns
from sim.costs.engine import EngineError, InferenceEngine, load_engine
from sim.costs.fitted_costs import fitted_costs
from sim.costs.kernel_costs import (
    AttentionTimes,
    BlockRates,
    ExpertCopies,
    Kernels,
    KernelSteps,
    ProductRates,
    SplitKernels,
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
    from trilane.verbs.catalogues import engines

    engines("docs/validation/llama.cpp/engine.yaml")
    assert "kernels.products.q4_0.experts" in capsys.readouterr().out


# --- experts on the CPU, next to a GPU --------------------------------------------------------------------------------


SPLIT_SHAPE = ModelShape(
    name="toy@q8_0", moe_layers=3, dense_layers=0, experts=4, top_k=2, hidden=32, expert_width=32, heads=2, kv_heads=1,
    head_dim=4, kv_width=8, attention_params=1000, vocab=100,
)
MATRICES = 2.0 * 3 * 32 * 32  # operations of an expert with one row
MACHINE = load_hardware("rtx-4090+ddr5-5600+8-cores")


def one_row(*flops_per_s: float) -> Sourced[ProductRates]:
    return of(ProductRates((1,), tuple((each,) for each in flops_per_s)))


GPU = Kernels(
    threads=(1,), products={block: BlockRates(one_row(8e9), one_row(8e9)) for block in ("q8_0", "f32")},
    attention=AttentionTimes((6144,), *(of(((ns,),)) for ns in (1.0, 10.0, 1.0, 4.0, 0.5)), of(2)),
    chosen_ns=of((0.5,)), layer_ns={"grouped": of((700.0,))}, token_ns={"grouped": of((30.0,))}, step_ns=of((900.0,)),
)
SPLIT = SplitKernels(
    threads=(4, 8), experts={"q8_0": one_row(1e9, 2e9)}, chosen_ns=of((2.0, 1.0)), layer_ns=of((5000.0, 4000.0)),
    mapped=ExpertCopies(of(100.0), of(0.5)), pinned=ExpertCopies(of(50.0), of(0.25)),
)
ENGINE = replace(load_engine("llama.cpp"), name="mine", gpu_kernels=GPU, split=SPLIT)


def test_an_expert_takes_its_products_and_what_becomes_of_its_outputs() -> None:
    """With 8 threads, 6,144 operations at 2 a ns and 32 elements at 1 ns; with 4, twice as long."""
    eight, four, five = (fitted_costs(SPLIT_SHAPE, MACHINE, ENGINE, 4, threads=count).experts[0] for count in (8, 4, 5))
    assert eight.cpu_ns[:3] == (0, 3072 + 32, 2 * (3072 + 32))
    assert four.cpu_ns[1] == 2 * eight.cpu_ns[1]
    assert five == four
    assert eight.gpu_ns[1] == MATRICES / 8
    assert (eight.first_cpu_ns, four.first_cpu_ns) == (4000, 5000)


@pytest.mark.parametrize(("copies", "fixed", "byte"), [("pageable", 100, 0.5), ("pinned", 50, 0.25)])
def test_experts_are_copied_from_the_memory_that_the_engine_says(copies: str, fixed: int, byte: float) -> None:
    engine = ENGINE.with_numbers({"prompt.copies": copies})  # type: ignore[dict-item]
    [expert, *_] = fitted_costs(SPLIT_SHAPE, MACHINE, engine, 1).experts
    assert expert.copy_ns == round(fixed + byte * expert.expert_bytes)


def test_a_token_is_handed_over_in_each_layer_of_the_cpu() -> None:
    none, two = (decode_time(SPLIT_SHAPE, MACHINE, ENGINE, StaticSplit(count, threads=8), 10) for count in (0, 2))
    assert (none.gpu_experts_ns, none.cpu_experts_ns, none.handing_over_ns) == (3 * 2 * 768, 0, 0)
    assert (two.gpu_experts_ns, two.cpu_experts_ns, two.handing_over_ns) == (2 * 768, 2 * 2 * 3104, 2 * 4000)
    assert (two.attention_ns, two.others_ns) == (none.attention_ns, none.others_ns)


def test_a_long_piece_copies_the_experts_of_all_layers_but_the_last_which_has_one_token() -> None:
    """All experts are chosen by any of 64 tokens."""
    [expert, *_] = fitted_costs(SPLIT_SHAPE, MACHINE, ENGINE, 64).experts
    piece = prompt_time(SPLIT_SHAPE, MACHINE, ENGINE, StaticSplit(3, threads=8, piece_tokens=64), 64)
    assert piece.copies_ns == 2 * 4 * expert.copy_ns
    assert piece.cpu_experts_ns == 2 * 3104 + 4000
    assert piece.gpu_experts_ns == pytest.approx(2 * 4 * np.interp(32, range(65), expert.gpu_ns), rel=1e-6)


def test_a_short_piece_is_computed_where_its_experts_are() -> None:
    piece = prompt_time(SPLIT_SHAPE, MACHINE, ENGINE, StaticSplit(3, threads=8, piece_tokens=31), 31)
    assert (piece.copies_ns, piece.gpu_experts_ns) == (0, 0)
    assert piece.cpu_experts_ns == pytest.approx(2 * 62 * 3104 + 2 * 3104 + 3 * 4000, rel=1e-3)


def test_an_engine_that_was_fitted_computes_all_tokens_in_the_last_layer_and_hands_over_for_nothing() -> None:
    """Its form is that of whole layers: as before."""
    engine = load_engine("llama.cpp")
    [expert, *_] = fitted_costs(SPLIT_SHAPE, MACHINE, engine, 64).experts
    long = prompt_time(SPLIT_SHAPE, MACHINE, engine, StaticSplit(3, piece_tokens=64), 64)
    assert (long.copies_ns, long.cpu_experts_ns) == (3 * 4 * expert.copy_ns, 0)


def test_on_a_machine_without_a_gpu_they_say_nothing() -> None:
    bare = load_hardware("none+ddr5-5600+8-cores")
    assert not ENGINE.measured_on(bare)
    assert decode_time(SPLIT_SHAPE, bare, ENGINE, StaticSplit(0), 10) == decode_time(
        SPLIT_SHAPE, bare, load_engine("llama.cpp"), StaticSplit(0), 10
    )


def test_weights_that_were_not_measured_next_to_the_gpu_are_refused() -> None:
    others = replace(ENGINE, split=SPLIT._replace(experts={"q4_0": one_row(1e9, 2e9)}))
    with pytest.raises(HardwareError, match=r"were not measured on the CPU next to a GPU: .*'q8_0'.*q4_0"):
        fitted_costs(SPLIT_SHAPE, MACHINE, others, 1)


@pytest.mark.parametrize("missing", ["gpu_kernels", "split"])
def test_one_side_alone_is_refused(missing: str) -> None:
    with pytest.raises(EngineError, match="expected gpu_kernels and split together"):
        replace(ENGINE, **{missing: None})  # type: ignore[arg-type]


def test_every_number_of_both_sides_can_be_changed_by_its_key() -> None:
    changed: InferenceEngine = ENGINE.with_numbers({"split.mapped.byte_ns": 2.0})
    assert changed.split is not None
    assert changed.split.mapped.ns(10) == 120
    assert "gpu_kernels.products.q8_0.experts" in ENGINE.flat()
