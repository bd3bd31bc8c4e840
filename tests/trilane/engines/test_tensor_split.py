"""Splits of tensors and rows: a case by hand, limits of the form, units that are not divided, and a broken twin."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import numpy as np
import pytest

from sim.costs.engine import EngineError, FittedEngine, load_fitted
from sim.costs.software import SplitMode
from sim.machine.cards import load_machine
from traces.models.catalogue import load_model
from traces.models.shape import ExpertWork, ModelShape
from trilane.engines.layer_split import LayerSplit
from trilane.engines.question import FitError, Question, check_setting, engine_of
from trilane.engines.refusals import missing
from trilane.engines.speed import EngineSpeed
from trilane.engines.split_speed import DecodeTime, PromptTime, StaticSplit, decode_time, prompt_time
from trilane.engines.tensor_split import (
    CardWork,
    PartTime,
    RowSplit,
    Shares,
    Sums,
    TensorSplit,
    busiest_share,
    shares_in_units,
)

MODEL = load_model("qwen3-30b-a3b@q8_0")
TINY = ModelShape(
    "tiny", moe_layers=4, dense_layers=0, experts=8, top_k=2, hidden=1024, expert_width=1024, vocab=1024, heads=8,
    kv_heads=8, head_dim=128, kv_width=2048, attention_params=4_194_304, tied_embeddings=False,
)


def engine_with(name: str = "llama.cpp", **numbers: float) -> FittedEngine:
    return load_fitted(name).with_numbers({f"cards.{key}": value for key, value in numbers.items()})


def decode(gpu: str, by_card: tuple[int, ...] | None, mode: SplitMode, engine: FittedEngine, **more: Any) -> DecodeTime:
    split = StaticSplit(more.get("cpu_layers", 0), by_card=by_card, mode=mode)
    return decode_time(MODEL, load_machine(f"{gpu}+ddr4-3200"), engine, split, 2048)


def prompt(gpu: str, by_card: tuple[int, ...] | None, mode: SplitMode, engine: FittedEngine) -> PromptTime:
    return prompt_time(MODEL, load_machine(f"{gpu}+ddr4-3200"), engine, StaticSplit(0, by_card=by_card, mode=mode), 999)


def by_hand(sum_ns: float) -> TensorSplit:
    """Two cards, the second at half the speed of the first, without experts on the host but for one layer of 50 ns."""
    cards = tuple(
        CardWork(PartTime(80.0 * slow, 20.0), PartTime(0.0, 4.0), PartTime(0.0), PartTime(200.0 * slow, 6.0),
                 slow * np.array([0.0, 40.0, 80.0, 120.0, 160.0])) for slow in (1, 2)
    )
    none = np.zeros(5)
    host = LayerSplit(TINY, (), np.array([0.0, 50.0, 100.0, 150.0, 200.0]), none, none, (), (), (), 0.0, False)
    return TensorSplit(TINY, cards, host, sum_ns, 1, copied=False)


def test_two_unequal_cards_by_hand() -> None:
    """Shares of 3/4 and 1/4: the first takes 20 + 60 ns of attention, the second 20 + 40; 120 and 80 of all experts."""
    attention, others, experts, cpu, handing, copies = by_hand(7.0).parts(0, (3, 1))
    assert (attention, experts, cpu, copies) == (4 * 80.0, 120.0, 0.0, 0.0)
    assert others == 4 * 4.0 + 6.0 + 150.0
    assert handing == 8 * 7.0  # one sum after attention, one after the mixture


def test_a_layer_whose_experts_the_host_has_needs_one_sum_less() -> None:
    attention, _, experts, cpu, handing, _ = by_hand(7.0).parts(1, (3, 1))
    assert (attention, experts, cpu, handing) == (320.0, 90.0, 50.0, 7 * 7.0)


def test_the_slower_card_is_waited_for() -> None:
    """Halves: 20 + 80 ns of attention on the second, 160 ns of experts. A twin that takes the first card's is noticed.
    """
    attention, _, experts, *_ = by_hand(7.0).parts(0, (1, 1))
    assert (attention, experts) == (4 * 100.0, 160.0)
    split = by_hand(7.0)
    broken = replace(split, cards=(split.cards[0],) * 2).parts(0, (1, 1))
    assert broken[0] == 4 * 60.0


def test_sums_take_what_was_measured() -> None:
    """Two RTX 5070 Ti over slots of 26 GB/s: 10 KB 39 us, 20 MB 10.9 ms (sgl-project/sglang PR 39605)."""
    work = load_fitted("llama.cpp").cards
    assert work is not None
    assert work.sums is not None
    cards = load_machine("2x-rtx-5070-ti+ddr5-5600+pcie-4x16").cards
    assert Sums.over(cards, work.sums).ns(10e3) == pytest.approx(39e3, rel=0.15)
    assert Sums.over(cards, work.sums).ns(20e6) == pytest.approx(10.9e6, rel=0.05)
    assert Sums.over(cards[:1], work.sums) == (0.0, 0.0)


def test_linked_cards_sum_over_their_link() -> None:
    """In two steps of 5 us; 9 us were measured of two linked cards. More cards take more steps."""
    work = load_fitted("llama.cpp").cards
    assert work is not None
    assert work.sums is not None
    found = [Sums.over(load_machine(f"{n}x-rtx-3090+ddr4-3200+p2p").cards, work.sums).latency_ns for n in (2, 4)]
    assert found == [10e3, 30e3]


@pytest.mark.parametrize(("mode", "engine"), [("row", "llama.cpp"), ("tensor", "llama.cpp"), ("graph", "ik_llama.cpp")])
def test_one_card_takes_its_own_time(mode: SplitMode, engine: str) -> None:
    alone, first = ("rtx-3090", None), ("rtx-3090+rtx-3060", (49, 0))
    for time in (decode, prompt):
        assert time(*first, mode, load_fitted(engine)) == time(*alone, "layer", load_fitted(engine))


def test_equal_cards_with_links_that_take_no_time_divide_the_work() -> None:
    """All but the fixed time of a layer. Of 768 in units of 128, four cards take 1, 2, 1 and 2."""
    free = engine_with(**{"sums.step_ns": 0.0, "sums.host_bytes_per_s": 1e18})
    one = decode("rtx-3090", None, "layer", free)
    two, four = (decode(f"{cards}x-rtx-3090", (1,) * cards, "tensor", free) for cards in (2, 4))
    assert two.handing_over_ns < 0.02 * two.total_ns  # what crosses the slots
    assert two.gpu_experts_ns == pytest.approx(one.gpu_experts_ns / 2, abs=48)
    assert four.gpu_experts_ns == pytest.approx(one.gpu_experts_ns / 3, abs=48)
    work = 2 * (one.attention_ns - two.attention_ns)
    fixed = one.attention_ns - work
    assert fixed == pytest.approx(48 * 45_000, rel=0.15)  # launches, norms: gpu.layer_ns
    assert four.attention_ns == pytest.approx(fixed + work / 4, abs=96)


def test_sums_that_take_longer_take_it_in_every_layer() -> None:
    slow, quick = (decode("2x-rtx-3090", (1, 1), "tensor", engine_with(**{"sums.step_ns": ns})) for ns in (3e4, 1e4))
    assert slow.handing_over_ns - quick.handing_over_ns == 48 * 2 * 2 * 20_000


def test_what_is_not_divided_is_counted_in_whole_units() -> None:
    """An expert of Qwen3-30B-A3B is 768 wide: three super-blocks of 256, or six units of 128."""
    of = {weights: Shares.of(load_model(f"qwen3-30b-a3b@{weights}"), (1, 1)).experts for weights in ("q4_k_m", "q8_0")}
    assert of == {"q4_k_m": (1 / 3, 2 / 3), "q8_0": (0.5, 0.5)}
    assert Shares.of(load_model("qwen3.6-35b-a3b@q4_k_m"), (1, 1, 1, 1)).attention == (0.5,) * 4  # two heads of keys
    assert shares_in_units(10, (3, 1)) == (0.7, 0.3)


def test_the_busiest_of_two_cards_with_whole_experts_is_that_of_all_draws() -> None:
    """All ways to draw 2 of 8 experts, 4 of which are on each card: 12 of 28 are on one card, the others on both."""
    draws = [*combinations(range(8), 2)]
    exact = sum(max(sum(one < 4 for one in draw), sum(one >= 4 for one in draw)) for draw in draws) / len(draws) / 2
    assert busiest_share(8, 2, 2) == pytest.approx(exact)
    assert busiest_share(8, 8, 2) == pytest.approx(0.5)
    assert busiest_share(256, 8, 4) == pytest.approx(0.455, abs=0.02)  # 3.6 of 8 experts where the mean is 2


def test_rows_gather_each_product() -> None:
    """Four products of attention and the router's in each of 48 layers, and the head's."""
    slow, quick = (decode("2x-rtx-3090", (25, 24), "row", engine_with(gather_ns=ns)) for ns in (30e3, 20e3))
    assert slow.total_ns - quick.total_ns == pytest.approx((48 * 5 + 1) * 10e3, abs=3)


def test_a_products_input_goes_to_each_other_card() -> None:
    """Of a prompt of 128 tokens: its input to one card of two, or to two of three."""
    split = {cards: RowSplit.on(MODEL, load_machine(f"{cards}x-rtx-3090+ddr4-3200"), load_fitted("llama.cpp"),
                                ExpertWork.of(MODEL, 128), 128, [(128,)], threads=None) for cards in (2, 3)}
    input_ns = 4 * 128 * MODEL.hidden * 36 / 32 * split[2].ns_per_byte  # of attention's four products
    own = split[2].products[0][0]
    result_ns = 128 * own.results * 4 * split[2].ns_per_byte
    for cards, one in split.items():
        moved = own.ns - own.divided_ns / cards - 4 * one.gather_ns - one._saved(0, 0, [1 / cards] * cards)
        assert moved == pytest.approx((cards - 1) * input_ns + (1 - 1 / cards) * result_ns)


def test_rows_divide_no_experts() -> None:
    layer, row = (decode("2x-rtx-3090", (25, 24), mode, load_fitted("llama.cpp")) for mode in ("layer", "row"))
    assert row.gpu_experts_ns == layer.gpu_experts_ns
    assert row.total_ns > layer.total_ns


def test_llama_cpp_leaves_a_prompts_experts_to_the_cpu_and_ik_copies_them() -> None:
    for engine, mode in (("llama.cpp", "tensor"), ("ik_llama.cpp", "graph")):
        split = StaticSplit(20, by_card=(1, 1), mode=mode)  # type: ignore[arg-type]
        time = prompt_time(MODEL, load_machine("2x-rtx-3090+ddr4-3200"), load_fitted(engine), split, 2048)
        assert (time.cpu_experts_ns > 0, time.copies_ns > 0) == (engine == "llama.cpp", engine != "llama.cpp")


def test_an_engine_without_sums_is_refused() -> None:
    engine = load_fitted("llama.cpp")
    assert engine.cards is not None
    without = replace(engine, cards=engine.cards._replace(sums=None, gather_ns=None))
    for kind, words in ((TensorSplit, "no other split"),):
        with pytest.raises(EngineError, match=words):
            kind.on(MODEL, load_machine("2x-rtx-3090+ddr4-3200"), without, ExpertWork.of(MODEL, 1), 1, [(9,)],
                    threads=None)


# --- what is chosen and said ------------------------------------------------------------------------------------------

HOST: dict[str, Any] = {"ram": "ddr4-3200", "cpu": "ryzen-9-5950x", "ram_gb": 64, "prompt_tokens": 512}


def speed_of(model: str = "gpt-oss-20b", gpu: str = "2x-rtx-3090", **others: Any) -> EngineSpeed:
    question = Question(model, gpu=gpu, **{**HOST, **others})
    check_setting(question, engine_of(question, question.load_machine()), question.load_machine())
    return EngineSpeed.asked(question, question.model_shape, question.load_machine())


@pytest.mark.parametrize(("others", "flags"), [
    ({"sm": "tensor"}, "-sm tensor -ts 1,1"), ({"sm": "row"}, "-sm row -ts 13,12"),
    ({"sm": "tensor", "ts": (3, 1)}, "-sm tensor -ts 3,1"), ({"sm": "layer", "ts": (13, 12)}, "-sm layer -ts 13,12"),
    ({"sm": "graph", "engine": "ik_llama.cpp"}, "-sm graph -ts 1,1"),
    ({"engine": "llama.cpp-vulkan"}, "-sm none -mg 0"),
])
def test_the_command_line_names_the_mode(others: dict[str, Any], flags: str) -> None:
    assert flags in " ".join(speed_of(**others).words)


@pytest.mark.parametrize(("others", "words"), [
    ({"sm": "tensor", "kv": "q8_0"}, "expected a KV cache in f16"),
    ({"sm": "tensor", "model": "deepseek-v2-lite"}, "has not implemented it for deepseek-v2-lite"),
    ({"sm": "graph"}, "llama.cpp has layer, row, tensor; use layer"),
    ({"sm": "row", "engine": "llama.cpp-vulkan"}, "llama.cpp-vulkan has layer; use layer"),
    ({"sm": "graph", "engine": "ik_llama.cpp", "model": "olmoe-1b-7b"}, "by layers alone, as far as is known"),
    ({"sm": "tensor", "ts": (1, 1, 1)}, "expected a proportion for each of 2 GPUs"),
    ({"sm": "tensor", "ts": (1, 0)}, "expected a proportion for each of 2 GPUs"),
    ({"sm": "row", "gpu": "rtx-3090"}, "expected several GPUs with it"),
])
def test_what_an_engine_cannot_divide_is_refused_in_words(others: dict[str, Any], words: str) -> None:
    with pytest.raises(FitError, match=words):
        speed_of(**others)


def test_a_machine_with_links_is_divided_like_its_parts() -> None:
    linked = Question("qwen3-30b-a3b", machine="2x-rtx-3090+ddr4-3200+nvlink", sm="tensor")
    speeds = [EngineSpeed.asked(one, one.model_shape, one.load_machine()).decode.total_ns
              for one in (linked, replace(linked, machine="2x-rtx-3090+ddr4-3200"))]
    assert speeds[0] < speeds[1]
    alone = replace(linked, machine="rtx-3090+ddr4-3200")
    with pytest.raises(FitError, match="sm tensor: expected several GPUs with it, as 2x-rtx-3090, got rtx-3090"):
        check_setting(alone, load_fitted("llama.cpp"), alone.load_machine())


def test_parts_of_each_card_add_up_to_the_whole() -> None:
    """Three quarters and one of weights, experts and, in whole heads, keys and values; norms and routers on both."""
    one, both = speed_of(gpu="rtx-3090"), speed_of(sm="tensor", ts=(3, 1))
    whole, cards = one.splitter.memory(one.split), both.splitter.memory(both.split).cards
    assert [card.experts_bytes for card in cards] == [round(part * whole.experts_bytes) for part in (0.75, 0.25)]
    assert [card.kv_bytes / whole.kv_bytes for card in cards] == pytest.approx([0.75, 0.25], rel=0.01)
    assert sum(card.every_token_bytes for card in cards) == pytest.approx(whole.every_token_bytes, rel=0.02)
    assert [card.part for card in cards] == [0.75, 0.25]


def test_layers_are_divided_where_no_mode_is_named_as_engines_do_by_themselves() -> None:
    """A mode with room for more experts is not taken for that: it may be slower. Search compares them."""
    two = "2x-rtx-3060", "rtx-3090+rtx-3060"
    for engine, gpu in product(("llama.cpp", "ik_llama.cpp"), two):
        assert speed_of(engine=engine, gpu=gpu).split == speed_of(engine=engine, gpu=gpu, sm="layer").split


def test_unequal_cards_have_parts_by_their_bandwidth_or_memory() -> None:
    """An RTX 3090 reads 2.6 times as fast as a 3060 and has twice its memory, less what is kept free."""
    found = {split.by_card for split in speed_of(gpu="rtx-3090+rtx-3060", sm="tensor").splitter.splits}
    assert found == {(1, 1), (72, 28), (68, 32)}


@pytest.mark.parametrize("named", [{"sm": "graph"}, {"ts": (40, 22)}])
def test_a_refusal_of_a_named_division_tells_ways_that_help(named: dict[str, Any]) -> None:
    """The CPU alone is tried among others, and has no division."""
    found = missing(Question("deepseek-v3", gpu="2x-rtx-3090", engine="ik_llama.cpp", **{**HOST, **named}))
    assert found.short
    assert [way.options for way in found.ways or ()] != []
