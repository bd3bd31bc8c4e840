"""Times of a model on a GPU with some layers' experts on the CPU, from measured kernels, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sim.costs.engine import EngineError, InferenceEngine, load_engine
from sim.costs.fitted_costs import fitted_costs
from sim.costs.kernel_costs import AttentionTimes, BlockRates, ExpertCopies, Kernels, ProductRates, SplitKernels
from sim.machine.hardware import load_hardware
from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Sourced
from traces.models.shape import ModelShape
from trilane.engines.split_speed import StaticSplit, decode_time, prompt_time

SHAPE = ModelShape(
    name="toy@q8_0", moe_layers=3, dense_layers=0, experts=4, top_k=2, hidden=32, expert_width=32, heads=2, kv_heads=1,
    head_dim=4, kv_width=8, attention_params=1000, vocab=100,
)
MATRICES = 2.0 * 3 * 32 * 32  # operations of an expert with one row
MACHINE = load_hardware("rtx-4090+ddr5-5600+8-cores")


def of(value: object) -> Sourced:  # type: ignore[type-arg]
    return Sourced(value, "made up", "low")


def rates(*flops_per_s: float) -> Sourced[ProductRates]:
    return of(ProductRates((1,), tuple((each,) for each in flops_per_s)))


GPU = Kernels(
    threads=(1,), products={block: BlockRates(rates(8e9), rates(8e9)) for block in ("q8_0", "f32")},
    attention=AttentionTimes((6144,), *(of(((ns,),)) for ns in (1.0, 10.0, 1.0, 4.0, 0.5)), of(2)),
    chosen_ns=of((0.5,)), layer_ns={"grouped": of((700.0,))}, token_ns={"grouped": of((30.0,))}, step_ns=of((900.0,)),
)
SPLIT = SplitKernels(
    threads=(4, 8), experts={"q8_0": rates(1e9, 2e9)}, chosen_ns=of((2.0, 1.0)), layer_ns=of((5000.0, 4000.0)),
    mapped=ExpertCopies(of(100.0), of(0.5)), pinned=ExpertCopies(of(50.0), of(0.25)),
)
ENGINE = replace(load_engine("llama.cpp"), name="mine", gpu_kernels=GPU, split=SPLIT)


def test_an_expert_takes_its_products_and_what_becomes_of_its_outputs() -> None:
    """With 8 threads, 6,144 operations at 2 a ns and 32 elements at 1 ns; with 4, twice as long."""
    eight, four, five = (fitted_costs(SHAPE, MACHINE, ENGINE, 4, threads=count).experts[0] for count in (8, 4, 5))
    assert eight.cpu_ns[:3] == (0, 3072 + 32, 2 * (3072 + 32))
    assert four.cpu_ns[1] == 2 * eight.cpu_ns[1]
    assert five == four
    assert eight.gpu_ns[1] == MATRICES / 8
    assert (eight.first_cpu_ns, four.first_cpu_ns) == (4000, 5000)


@pytest.mark.parametrize(("copies", "fixed", "byte"), [("pageable", 100, 0.5), ("pinned", 50, 0.25)])
def test_experts_are_copied_from_the_memory_that_the_engine_says(copies: str, fixed: int, byte: float) -> None:
    engine = ENGINE.with_numbers({"prompt.copies": copies})  # type: ignore[dict-item]
    [expert, *_] = fitted_costs(SHAPE, MACHINE, engine, 1).experts
    assert expert.copy_ns == round(fixed + byte * expert.expert_bytes)


def test_a_token_is_handed_over_in_each_layer_of_the_cpu() -> None:
    none, two = (decode_time(SHAPE, MACHINE, ENGINE, StaticSplit(count, threads=8), 10) for count in (0, 2))
    assert (none.gpu_experts_ns, none.cpu_experts_ns, none.handing_over_ns) == (3 * 2 * 768, 0, 0)
    assert (two.gpu_experts_ns, two.cpu_experts_ns, two.handing_over_ns) == (2 * 768, 2 * 2 * 3104, 2 * 4000)
    assert (two.attention_ns, two.others_ns) == (none.attention_ns, none.others_ns)


def test_a_long_piece_copies_the_experts_of_all_layers_but_the_last_which_has_one_token() -> None:
    """All experts are chosen by any of 64 tokens."""
    [expert, *_] = fitted_costs(SHAPE, MACHINE, ENGINE, 64).experts
    found = prompt_time(SHAPE, MACHINE, ENGINE, StaticSplit(3, threads=8, piece_tokens=64), 64)
    assert found.copies_ns == 2 * 4 * expert.copy_ns
    assert found.cpu_experts_ns == 2 * 3104 + 4000
    assert found.gpu_experts_ns == pytest.approx(2 * 4 * np.interp(32, range(65), expert.gpu_ns), rel=1e-6)


def test_a_short_piece_is_computed_where_its_experts_are() -> None:
    found = prompt_time(SHAPE, MACHINE, ENGINE, StaticSplit(3, threads=8, piece_tokens=31), 31)
    assert (found.copies_ns, found.gpu_experts_ns) == (0, 0)
    assert found.cpu_experts_ns == pytest.approx(2 * 62 * 3104 + 2 * 3104 + 3 * 4000, rel=1e-3)


def test_an_engine_that_was_fitted_computes_all_tokens_in_the_last_layer_and_hands_over_for_nothing() -> None:
    """Its form is that of whole layers: as before."""
    engine = load_engine("llama.cpp")
    [expert, *_] = fitted_costs(SHAPE, MACHINE, engine, 64).experts
    long = prompt_time(SHAPE, MACHINE, engine, StaticSplit(3, piece_tokens=64), 64)
    assert (long.copies_ns, long.cpu_experts_ns) == (3 * 4 * expert.copy_ns, 0)


def test_on_a_machine_without_a_gpu_they_say_nothing() -> None:
    bare = load_hardware("none+ddr5-5600+8-cores")
    assert not ENGINE.measured_on(bare)
    assert decode_time(SHAPE, bare, ENGINE, StaticSplit(0), 10) == decode_time(
        SHAPE, bare, load_engine("llama.cpp"), StaticSplit(0), 10
    )


def test_weights_that_were_not_measured_next_to_the_gpu_are_refused() -> None:
    others = replace(ENGINE, split=SPLIT._replace(experts={"q4_0": rates(1e9, 2e9)}))
    with pytest.raises(HardwareError, match=r"were not measured on the CPU next to a GPU: .*'q8_0'.*q4_0"):
        fitted_costs(SHAPE, MACHINE, others, 1)


@pytest.mark.parametrize("missing", ["gpu_kernels", "split"])
def test_one_side_alone_is_refused(missing: str) -> None:
    with pytest.raises(EngineError, match="expected gpu_kernels and split together"):
        replace(ENGINE, **{missing: None})  # type: ignore[arg-type]


def test_every_number_of_both_sides_can_be_changed_by_its_key() -> None:
    changed: InferenceEngine = ENGINE.with_numbers({"split.mapped.byte_ns": 2.0})
    assert changed.split is not None
    assert changed.split.mapped.ns(10) == 120
    assert "gpu_kernels.products.q8_0.experts" in ENGINE.flat()
