"""Plays of caches on hand-worked events and rows, and what is said of predictions and measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.mechanism.cache_replay import ReplayEvent
from sim.costs.engine_costs import costs_on
from sim.machine.hardware import load_hardware
from traces.models.catalogue import load_model
from trilane.output.pages.cache_logs import cache_logs_page, record_of
from trilane.output.pages.output import show
from trilane.study.cache_logs import played
from trilane.study.cache_logs.comparison import GIVEN, HIT_RATE, LOADS, STEP, Compared, ComparedLogs, compared
from trilane.study.cache_logs.played import Played, play, step_ms
from trilane.study.cache_logs.rows import CacheRow

H100 = "h100-pcie+ddr5-4800-ecc"
ROW = CacheRow(
    id="a", model="mixtral-8x7b", policy="lru", slots=2 / 32, machine=H100, compute_ms=40.0, loads=10.0,
    prefetched=4.0, step_ms=100.0, hit_rate=0.5,
)
COPY_MS = costs_on(load_hardware(H100), load_model("mixtral-8x7b"), 1).experts[0].copy_ns / 1e6


def events(*active: tuple[int, ...]) -> tuple[ReplayEvent, ...]:
    """Steps of a model of 32 layers that use experts in the first layer alone."""
    return tuple(
        ReplayEvent(step, layer, "decode", used if layer == 0 else ())
        for step, used in enumerate(active) for layer in range(32)
    )


@pytest.mark.parametrize(("policy", "misses"), [("lru", 6), ("belady", 5), ("lfu", 5)])
def test_two_slots_of_all_layers_by_hand(monkeypatch: pytest.MonkeyPatch, policy: str, misses: int) -> None:
    """Of 1 2 1 3 1 2 4 1 LRU misses 1 2 3 2 4 1; the others keep 1 but for the last use."""
    text = events((1,), (2,), (1,), (3,), (1,), (2,), (4,), (1,))
    monkeypatch.setattr(played, "_texts", lambda *asked: (text,))
    found = play(replace(ROW, policy=policy, machine="", start="empty"))
    assert found.hit_rate == pytest.approx(1 - misses / 8)
    assert found.loads == pytest.approx(misses / 8)


def test_as_many_misses_of_a_layer_are_prefetched_as_the_row_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played, "_texts", lambda *asked: (events((1, 2, 3), (1, 2, 3)),))
    found = play(replace(ROW, slots=0.0, prefetch=2))
    assert (found.loads, found.prefetched) == (3, 2)


def test_loads_that_are_waited_for_add_up_and_others_run_next_to_the_work() -> None:
    assert step_ms(ROW, 10, 0) == pytest.approx(10 * COPY_MS + 40)
    assert step_ms(ROW, 10, 4) == pytest.approx(10 * COPY_MS + 0.6 * 40)
    assert step_ms(ROW, 10, 10) == pytest.approx(10 * COPY_MS)
    assert step_ms(ROW, 2, 2) == 40
    assert step_ms(ROW, 0, 0) == 40
    assert step_ms(replace(ROW, link_gb_s=10.0), 10, 0) == pytest.approx(10 * 35.2 + 40, rel=0.01)  # of 352 MB


def test_without_a_stated_time_the_work_is_a_step_with_all_experts_on_the_gpu() -> None:
    row = replace(ROW, compute_ms=None, engine="fused", steps=4)
    work_ms = step_ms(row, 0, 0)
    assert 10 < work_ms < 40  # 25 GB of weights at 2 TB/s
    assert step_ms(row, 20, 0) - work_ms == pytest.approx(2 * (step_ms(row, 10, 0) - work_ms))


def test_a_batch_that_runs_out_meets_both_of_its_means() -> None:
    """19.1 texts and 6.27 experts in the mean: fewer than 19 texts at a time would use."""
    def mean_active(active: float | None) -> float:
        [text] = played._texts("mixtral-8x7b", 19, 1, 64, active)
        return sum(len(event.active) for event in text) / len(text)

    assert mean_active(None) > 7.5
    assert mean_active(6.27) == pytest.approx(6.27, abs=0.2)


def test_a_registered_policy_is_simulated() -> None:
    row = CacheRow(
        id="a", model="deepseek-v2-lite@q4_k_m", policy="hybrimoe@impl{prefetch_size: 4}", slots=64, steps=2,
        engine="hybrimoe-2025", machine="rtx-4090-d+ddr5-4800-ecc+server", prefetch=4,
    )
    assert play(row).hit_rate == 1
    assert play(replace(row, slots=16)).hit_rate < 0.8


def of(row: CacheRow, **values: float) -> Compared:
    return Compared(row, Played(**{"hit_rate": 0.5, "loads": 10.0, "prefetched": 0.0, **values}))


def test_errors_by_hand() -> None:
    found = ComparedLogs((of(ROW, hit_rate=0.6, loads=12.0, step_ms=110.0, given_ms=95.0),), {})
    assert found.errors(HIT_RATE) == pytest.approx([0.1])
    assert found.errors(LOADS) == pytest.approx([0.2])
    assert found.errors(STEP) == pytest.approx([0.1])
    assert found.errors(GIVEN) == pytest.approx([-0.05])


def test_times_of_an_assumed_machine_and_of_a_number_put_in_count_in_no_error() -> None:
    for row in (replace(ROW, assumed="the CPU"), replace(ROW, put_in="a number")):
        found = ComparedLogs((of(row, step_ms=110.0, given_ms=95.0),), {})
        assert (found.errors(STEP), found.errors(GIVEN)) == ([], [])
        assert found.errors(HIT_RATE) == [0.0]


def test_pairs_differ_in_one_setting_and_tell_directions() -> None:
    more = replace(ROW, id="b", slots=3 / 32, step_ms=80.0)
    other = replace(ROW, id="c", slots=3 / 32, policy="lfu", step_ms=70.0)
    asked = (of(ROW, step_ms=100.0), of(more, step_ms=90.0), of(other, step_ms=95.0))
    pairs = {(pair.first, pair.second): pair for pair in ComparedLogs(asked, {}).pairs}
    assert set(pairs) == {("a", "b"), ("b", "c")}  # a and c differ in two
    assert (pairs["a", "b"].setting, pairs["a", "b"].right) == ("slots", True)
    assert pairs["a", "b"].measured == pytest.approx(-0.2)
    assert (pairs["b", "c"].setting, pairs["b", "c"].right) == ("policy", False)


def test_a_twin_whose_slots_are_swapped_is_wrong_in_direction_and_size() -> None:
    """The broken twin: the same rows, each with the other's slots."""
    few = CacheRow(id="few", model="qwen3-30b-a3b", policy="layer-lru", slots=16, steps=32)
    many = replace(few, id="many", slots=64)
    right = compared(replace(row, hit_rate=play(row).hit_rate) for row in (few, many))
    twin = compared(
        replace(row, hit_rate=play(other).hit_rate) for row, other in ((few, many), (many, few))
    )
    assert [pair.right for pair in right.pairs] == [True]
    assert right.errors(HIT_RATE) == [0, 0]
    assert [pair.right for pair in twin.pairs] == [False]
    assert min(map(abs, twin.errors(HIT_RATE))) > 0.1


def test_a_row_that_cannot_be_played_says_why() -> None:
    unknown = replace(ROW, policy="mru"), replace(ROW, id="b", model="gpt-9")
    found = compared([*unknown, replace(ROW, id="c", left_out="x")])
    assert found.asked == ()
    assert found.left_out["a"].startswith("policy: ")
    assert "gpt-9" in found.left_out["b"]
    assert found.left_out["c"] == "x"


def test_page_and_record_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = ComparedLogs((of(ROW, hit_rate=0.6, step_ms=110.0, given_ms=95.0),), {"z": "no slots"})
    show(None, *cache_logs_page(found, "log.csv"))
    text = capsys.readouterr().out
    assert "hit rate, points" in text
    assert "10.0" in text
    assert "1 rows are not asked: no slots" in text
    record = record_of(found)
    assert record["rows"][0]["compared"]["step_ms"] == {"predicted": 110.0, "measured": 100.0, "counts": True}
    assert record["left_out"] == {"z": "no slots"}
