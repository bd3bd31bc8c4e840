"""Strata's windows in closed form: one worked by hand, and laws that every window obeys."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sim.costs.engine import load_fitted
from sim.costs.window_costs import missed_kv
from sim.machine.hardware import Hardware, load_hardware
from traces.models.catalogue import load_model
from trilane.engines.question import FitError
from trilane.engines.strata.order import distinct_share
from trilane.engines.strata.requests import WindowCounts
from trilane.engines.strata.window import (
    WindowCosts,
    between_rows,
    draft_ns,
    drafts_made,
    spread,
    window_time,
    with_selected,
)

ENGINE = load_fitted("strata")
SHAPE = replace(load_model("qwen3.8-flash-next@gsq-iq3_s"), kv_bits=8.5)
MACHINE = load_hardware("rtx-4090+ddr5-5600+ryzen-9-7950x")
COUNTS = WindowCounts(rows=3.0, drafts=2.0, hits=20.0, cpu=6.0, pcie=4.0)
CONTEXT = 4096


def costs(hardware: Hardware = MACHINE, threads: int = 16, **changed: float) -> WindowCosts:
    engine = ENGINE.with_numbers({f"window.{name}": value for name, value in changed.items()})
    return WindowCosts(SHAPE, hardware, engine, threads)


def total_ms(of: WindowCosts, counts: WindowCounts = COUNTS, share: float | None = None) -> float:
    return window_time(of, counts, CONTEXT, share).total_ns / 1e6


def test_a_window_without_misses_is_worked_by_hand() -> None:
    counts, of = WindowCounts(1.0, 0.0, 10.0, 0.0, 0.0), costs()
    step, work, layers = of.step(1.0, CONTEXT), ENGINE.window, SHAPE.moe_layers
    assert work is not None
    call = work.group_ns.value + 10 * of.expert_bytes / (1008e9 * work.group_read_share.value) * 1e9
    layer = step.attention_ns + of.selection_ns(CONTEXT) + step.gate_ns + step.combine_ns + step.shared_ns
    by_hand = layers * (layer + work.handshake_ns.value + call) + step.head_ns
    by_hand += work.commit_ns.value + work.host_ns.value
    assert window_time(of, counts, CONTEXT).total_ns == pytest.approx(by_hand, rel=1e-9)


def test_parts_of_a_window_add_up_and_none_is_negative() -> None:
    time = window_time(costs(), COUNTS, CONTEXT)
    assert min(vars(time).values()) >= 0
    assert time.drafts_ns == pytest.approx(drafts_made(COUNTS.drafts, 4) * draft_ns(costs()))
    assert sum(vars(time).values()) == time.total_ns


@pytest.mark.parametrize("more", ["rows", "drafts", "hits", "cpu", "pcie"])
def test_more_of_anything_never_takes_less_time(more: str) -> None:
    larger = COUNTS._replace(**{more: getattr(COUNTS, more) * 1.5})
    assert total_ms(costs(), larger) >= total_ms(costs()) - 1e-9


@pytest.mark.parametrize("key", ["cpu.read_bytes_per_s", "link.h2d_bytes_per_s", "gpu.bandwidth_bytes_per_s"])
def test_a_better_part_never_takes_more_time(key: str) -> None:
    better = MACHINE.with_numbers({key: 2 * MACHINE.flat()[key]})
    assert total_ms(costs(better)) <= total_ms(costs())


def test_a_layer_waits_for_the_longer_of_gpu_and_pool() -> None:
    """Each is hidden behind the other where that is much longer."""
    few, many = WindowCounts(3.0, 0.0, 29.0, 1.0, 0.0), WindowCounts(3.0, 0.0, 5.0, 25.0, 0.0)
    assert window_time(costs(pool_ns=0), few, CONTEXT).waiting_ns < 0.05 * window_time(costs(), few, CONTEXT).total_ns
    quick = MACHINE.with_numbers({"gpu.bandwidth_bytes_per_s": 2e12})
    lost = window_time(costs(), many, CONTEXT).gpu_experts_ns - window_time(costs(quick), many, CONTEXT).gpu_experts_ns
    longer = window_time(costs(quick), many, CONTEXT).waiting_ns - window_time(costs(), many, CONTEXT).waiting_ns
    assert longer == pytest.approx(lost, rel=0.02)  # what the GPU saves, it waits


def test_a_share_moves_misses_from_the_pool_to_the_link_and_rounds_down_in_each_layer() -> None:
    none, half, all_of_them = (window_time(costs(), COUNTS, CONTEXT, share) for share in (0.0, 0.5, 1.0))
    assert none.copies_ns == 0
    assert 0 < half.copies_ns < all_of_them.copies_ns
    assert all_of_them.waiting_ns == 0
    number, chance = spread((COUNTS.cpu + COUNTS.pcie) * distinct_share(3.0, 0.4))
    mean = float(chance @ (number * 0.5 // 1))
    assert half.copies_ns == pytest.approx(SHAPE.moe_layers * mean * costs().fetch_ns, rel=1e-6)


def test_a_window_waits_for_swaps_only_as_long_as_drafts_and_commit_do_not_hide_them() -> None:
    of, work = costs(), ENGINE.window
    assert work is not None
    none, few, many = (window_time(of, COUNTS, CONTEXT, None, swaps) for swaps in (0, 5, 96))
    assert none.swaps_ns == few.swaps_ns == 0
    assert many.swaps_ns == pytest.approx((96 * of.swap_ns - many.drafts_ns - work.commit_ns.value) / 4)


def streamed(context: int, tokens: int = 32768, rows: float = 3.0) -> float:
    """Time in ms of a window's keys and values that come from the host."""
    return window_time(costs(kv_tokens=tokens), COUNTS._replace(rows=rows), context).kv_ns / 1e6


def test_keys_and_values_from_the_host_are_worked_by_hand() -> None:
    """In 12 of 48 layers 3 rows select 2,048 of 131,072 tokens, of which 14.7 % are missed with room for 8,192; a token
    has two heads of 256 keys and 256 values in 8.5 bits."""
    assert streamed(131072, 0) == 0
    by_hand = 12 * (10e-3 + 3 * 2048 * 0.147 * 2 * 512 * 8.5 / 8 / (MACHINE.link.h2d_bytes_per_s * 0.88) * 1e3)
    assert streamed(131072, 8192) == pytest.approx(by_hand, rel=1e-9)
    assert streamed(131072, 8192, rows=1.0) == pytest.approx((by_hand - 0.12) / 3 + 0.12, rel=1e-9)


def test_with_room_for_the_whole_context_nothing_is_missed() -> None:
    assert streamed(32768) == pytest.approx(12 * 10e-3) == streamed(1000)
    assert streamed(32769) > streamed(32768)


@pytest.mark.parametrize("context", [40_000, 131_072, 1_048_576])
def test_more_room_and_shorter_contexts_miss_less(context: int) -> None:
    assert streamed(context, 20480) > streamed(context, 32768)
    assert streamed(context) < streamed(2 * context)
    assert missed_kv(costs(kv_tokens=1).work, context) <= 1


def test_logs_missed_as_many_or_fewer() -> None:
    """94 to 99 % hit, most with 32,768 tokens on the card; LRU sets of single tokens were kept in the notes."""
    shares = [missed_kv(costs(kv_tokens=32768).work, context) for context in (65536, 131072, 262144)]
    assert [round(share, 3) for share in shares] == [0.032, 0.052, 0.084]


def test_drafts_are_made_that_are_not_verified() -> None:
    """Two windows of three verify all of three drafts, one none, for which it made one."""
    assert drafts_made(2.0, 4) == pytest.approx((3 + 3 + 1) / 3)
    assert drafts_made(0.0, 4) == 0
    assert drafts_made(3.0, 4) == 3
    assert drafts_made(4.2, 4) == 4.2  # longer windows, by look-up in the prompt


def test_numbers_of_missed_experts_are_spread_around_their_mean() -> None:
    for mean in (0.0, 0.3, 4.0, 25.0):
        number, chance = spread(mean)
        assert chance.sum() == pytest.approx(1)
        assert float(chance @ number) == pytest.approx(mean, abs=1e-3)


def test_quantities_of_whole_rows_lie_on_a_line_between_them() -> None:
    assert between_rows(lambda number: number**2, 2.5) == 6.5


def test_sparse_attention_reads_a_bounded_part_of_the_context() -> None:
    selected = with_selected(SHAPE, 2048)
    kinds = {kind.reach: kind for kind in selected.attention or ()}
    assert set(kinds) == {"state", "window"}
    assert (kinds["window"].span, kinds["window"].kv_width) == (2048, 1024)
    short, long = (window_time(costs(), COUNTS, context).routing_ns for context in (4096, 131072))
    assert 0 < long - short < 0.2 * short  # the choice of what it reads


def test_an_engine_without_windows_is_refused() -> None:
    with pytest.raises(FitError, match=r"llama.cpp: expected an engine of windows"):
        _ = WindowCosts(SHAPE, MACHINE, load_fitted("llama.cpp"), 8).work
