"""Strata on several cards: windows and prompts worked by hand, limits in which two cards are one, and splits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.costs.engine import load_fitted
from sim.machine.hardware import Hardware, load_hardware
from traces.models.catalogue import load_model
from trilane.engines.strata.card_predictions import PredictedOnCards
from trilane.engines.strata.helpers import (
    LAUNCH_NS,
    LAUNCHES,
    Helped,
    exchange_ns,
    helped_slots,
    helped_time,
    helpers_ns,
)
from trilane.engines.strata.predicted import QUANTITIES
from trilane.engines.strata.predictions import predictions
from trilane.engines.strata.prompt import prompt_ms
from trilane.engines.strata.requests import StrataRequest, read_requests
from trilane.engines.strata.split import (
    Stage,
    auto_layers,
    best_range,
    card_slots,
    hand_over_ns,
    hits_of,
    ranges,
    split_time,
)
from trilane.engines.strata.split_prompt import pipelined_ns, split_prompt_ms
from trilane.engines.strata.window import WindowCosts, window_time

SHAPE = replace(load_model("qwen3.8-flash-next@gsq-iq3_s"), kv_bits=8.25)
MACHINE = load_hardware("rtx-4090+ddr5-5600+ryzen-9-7950x")
PAIRS, CONTEXT = 48 * 512, 4096


def at_once(machine: Hardware = MACHINE) -> Hardware:
    """The machine with hand-overs that take no time."""
    ways = ("h2d_latency_ns", "d2h_latency_ns")
    free = {f"link.{way}": 0 for way in ways} | {"link.d2h_bytes_per_s": 1e30, "host.launch_ns": 0}
    return machine.with_numbers(free)


def costs(machine: Hardware = MACHINE, **changed: float) -> WindowCosts:
    engine = load_fitted("strata").with_numbers({f"window.{name}": value for name, value in changed.items()})
    return WindowCosts(SHAPE, machine, engine, 16)


def two(of: WindowCosts, slots: int, layers: int = 24) -> tuple[Stage, Stage]:
    return Stage(of, layers, slots), Stage(of, 48 - layers, slots)


def test_two_cards_that_hold_all_are_one_card_of_twice_the_memory() -> None:
    """All experts are there, and a hand-over takes no time beyond its bytes to the second card."""
    of = costs(at_once(), handshake_ns=0)
    both = split_time(two(of, PAIRS // 2), 3.0, 2.0, CONTEXT, [0.5, 0.5])
    one = window_time(of, Stage(of, 48, PAIRS).counts(3.0, 2.0), CONTEXT, 0.5)
    assert both.total_ns - both.hand_over_ns == pytest.approx(one.total_ns, rel=1e-12)
    size = 3 * 4 * 2560 * 4
    assert both.hand_over_ns == pytest.approx(size / of.hardware.link.h2d_bytes_per_s * 1e9, rel=1e-6)


def test_a_broken_twin_with_a_head_on_each_card_is_not_one_card() -> None:
    of = costs(at_once(), handshake_ns=0)
    one = window_time(of, Stage(of, 48, PAIRS).counts(3.0, 2.0), CONTEXT, 0.5)
    twins = [window_time(of, stage.counts(3.0, 2.0), CONTEXT, 0.5, layers=24) for stage in two(of, PAIRS // 2)]
    assert sum(twin.total_ns for twin in twins) > one.total_ns * 1.02


@pytest.mark.parametrize("layers", [8, 24, 40])
def test_wherever_equal_cards_that_hold_all_are_split_a_window_takes_as_long(layers: int) -> None:
    split = split_time(two(costs(), PAIRS, layers), 3.0, 2.0, CONTEXT, [0.5, 0.5])
    assert split.total_ns == pytest.approx(split_time(two(costs(), PAIRS), 3.0, 2.0, CONTEXT, [0.5, 0.5]).total_ns)


def test_two_halves_hit_as_often_as_one_cache_of_both() -> None:
    assert hits_of(two(costs(), 5000), 3.0) == hits_of([Stage(costs(), 48, 10000)], 3.0)


def test_a_hand_over_is_two_copies_of_four_streams_and_a_start() -> None:
    link, of = MACHINE.link, costs()
    size = 2 * 4 * 2560 * 4
    copies = link.d2h_latency_ns + link.h2d_latency_ns
    copies += size / link.d2h_bytes_per_s * 1e9 + size / link.h2d_bytes_per_s * 1e9
    assert hand_over_ns(of, of, 2.0) == pytest.approx(copies + of.work.handshake_ns.value + MACHINE.host.launch_ns)


def test_head_drafts_and_commit_are_the_last_cards() -> None:
    """A slow first card has none of them."""
    slow = load_hardware("rtx-3060+ddr5-5600+ryzen-9-7950x")
    first = split_time((Stage(costs(slow), 1, 512), Stage(costs(), 47, PAIRS)), 3.0, 2.0, CONTEXT, [0.0, 0.0])
    last = split_time((Stage(costs(), 47, PAIRS), Stage(costs(slow), 1, 512)), 3.0, 2.0, CONTEXT, [0.0, 0.0])
    assert first.drafts_ns < last.drafts_ns
    assert first.total_ns < last.total_ns


def test_pieces_follow_one_another_through_the_cards() -> None:
    """Two pieces of 3 and 5 on the first card, 4 and 2 on the second: 3 + 4, then the second piece's 2 after 8."""
    assert pipelined_ns([[3.0, 4.0], [5.0, 2.0]]) == 10.0
    assert pipelined_ns([[3.0, 4.0], [1.0, 2.0]]) == 9.0
    assert pipelined_ns([[3.0, 4.0]]) == 7.0
    assert sum(map(sum, [[3.0, 4.0], [5.0, 2.0]])) == 14.0  # a broken twin, whose cards take turns


def test_a_prompt_of_one_piece_gains_nothing_and_one_of_many_nearly_half() -> None:
    of, both = costs(), two(costs(), PAIRS // 2)
    assert split_prompt_ms(both, 4096, 0, [0.5, 0.5]) == pytest.approx(prompt_ms(of, 4096, 0, 1.0, 0.5), rel=0.06)
    assert split_prompt_ms(both, 131072, 0, [0.5, 0.5]) < 0.62 * prompt_ms(of, 131072, 0, 1.0, 0.5)


def test_one_stage_reads_a_prompt_as_one_card_does() -> None:
    of = costs()
    for tokens in (3000, 20000):
        whole = split_prompt_ms([Stage(of, 48, 8000)], tokens, 0, [0.5])
        assert whole == pytest.approx(prompt_ms(of, tokens, 0, 8000 / PAIRS, 0.5), rel=2e-3)


def test_auto_gives_a_card_with_more_room_more_layers_and_equal_ones_as_many() -> None:
    assert auto_layers(SHAPE, [6000, 6000]) == (24, 24)
    assert auto_layers(SHAPE, [PAIRS, PAIRS]) == (24, 24)  # whatever holds all: the fullest has the most room
    small, large = auto_layers(SHAPE, [3000, 9000])
    assert (small < large, small + large) == (True, 48)
    assert len(auto_layers(SHAPE, [3000] * 4)) == 4


def test_of_more_than_four_cards_layers_are_in_proportion() -> None:
    assert list(ranges(48, [1000] * 6)) == [(8,) * 6]
    assert len(list(ranges(48, [1000] * 2))) == 47


def test_the_best_range_is_the_least_of_all() -> None:
    assert best_range(5, [1, 1], lambda card, layers: layers * (1 + card), lambda card, layers: 0.0) == (4, 1)


def test_only_the_last_card_has_the_draft_layer() -> None:
    first, last = card_slots(SHAPE, [MACHINE, MACHINE], 32768, 0)
    held = (first - last) * SHAPE.routed_bytes / PAIRS
    assert 1048 * 2**20 < held < 1300 * 2**20


# --- helpers ----------------------------------------------------------------------------------------------------------


def test_a_helper_is_beside_the_first_card_not_after_it() -> None:
    """Experts move from the pool to a helper that is quicker."""
    alone, helped = Helped(costs(), (), (4000,)), Helped(costs(), (MACHINE,), (4000, 4000))
    times = [helped_time(one, 3.0, 2.0, CONTEXT, 0.0) for one in (alone, helped)]
    assert times[1].total_ns < times[0].total_ns
    assert times[1].gpu_experts_ns == times[0].gpu_experts_ns


def test_a_helper_without_experts_changes_nothing() -> None:
    alone, idle = Helped(costs(), (), (4000,)), Helped(costs(), (MACHINE,), (4000, 0))
    assert helped_time(idle, 3.0, 2.0, CONTEXT, 0.3) == helped_time(alone, 3.0, 2.0, CONTEXT, 0.3)
    assert helpers_ns(idle, 3.0, 0.0) == 0


def test_an_exchange_crosses_the_link_both_ways_in_each_layer() -> None:
    link, size = MACHINE.link, 3 * 2560 * 4
    by_hand = 2 * link.h2d_latency_ns + link.d2h_latency_ns + 5000
    by_hand += size / link.h2d_bytes_per_s * 1e9 + size / link.d2h_bytes_per_s * 1e9
    assert exchange_ns(costs(), MACHINE, 3.0) == pytest.approx(by_hand)
    helped = Helped(costs(), (MACHINE,), (4000, 4000))
    assert helpers_ns(helped, 3.0, 1.0) > by_hand + LAUNCHES * LAUNCH_NS


def test_cards_together_hold_no_more_than_there_is() -> None:
    assert helped_slots(SHAPE, PAIRS - 10, [MACHINE, MACHINE]) == (PAIRS - 10, 10, 0)


# --- requests ---------------------------------------------------------------------------------------------------------

ROW = StrataRequest(
    id="one", quant="iq3_s", gpu="RTX 3060", n_gpus=2, gpu_vram_gb=12, cpu="Ryzen 9 7950X", context=65536,
    prompt_tokens=4000, gen_tokens=256, tg_tok_s=40.0, pp_tok_s=800.0,
)


def asked(**changed: object) -> PredictedOnCards:
    (one,) = predictions([replace(ROW, **changed)]).asked  # type: ignore[arg-type]
    assert isinstance(one, PredictedOnCards)
    return one


def test_bundled_rows_of_two_cards_are_asked() -> None:
    rows = [row for row in read_requests() if row.n_gpus > 1]
    found = predictions(rows)
    assert not found.left_out
    assert all(set(one.pairs) == {QUANTITIES[4], QUANTITIES[5]} for one in found.asked)


def test_a_row_says_its_split_and_slots_or_auto_chooses() -> None:
    assert sum(stage.layers for stage in asked().stages) == 48
    given = asked(note="layer split 30", cache_slots=3000, cache_gib=5.7).stages
    assert [stage.layers for stage in given] == [30, 18]
    assert given[0].slots == 3000  # of the first card, by their size
    whole = asked(note="layer split 24", cache_slots=24576).stages
    assert [stage.slots for stage in whole] == [12288, 12288]


def test_cards_of_two_kinds_are_named_by_both() -> None:
    stages = asked(gpu="RTX 3060 + RTX 3090", gpu_vram_gb=None).stages
    assert [stage.costs.hardware.gpu.name for stage in stages] == ["RTX 3060 12GB", "RTX 3090"]


def test_windows_pins_eight_gib_and_says_nothing_of_prompts() -> None:
    linux, windows = asked(pcie_frac=0.5), asked(pcie_frac=0.5, os="Windows")
    assert windows.shares[0] == pytest.approx(0.5 * 8 * 2**30 / SHAPE.routed_bytes)
    assert linux.shares == [0.5, 0.5]
    assert (windows.prompt_ms, QUANTITIES[5] in windows.pairs) == (None, False)


@pytest.mark.parametrize(("note", "reason"), [
    ("expert-cache-device1 5000", "helpers, whose experts no log counts"),
    ("layer split 60", "a split at 60 that 2 GPUs cannot have"),
    ("layer split 12,24", "a split at 12, 24 that 2 GPUs cannot have"),
])
def test_other_uses_of_cards_are_refused_in_words(note: str, reason: str) -> None:
    assert predictions([replace(ROW, note=note)]).left_out == {"one": reason}
