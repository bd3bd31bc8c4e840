"""The map of an idea: its places, the machine's own among them, and what is simulated at each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from policies.registry import ChoiceError
from sim.simulate import simulate
from tests.kit.questions import hand_made_map, narrowed, small_question
from trilane.study.pays import ideas
from trilane.study.pays.break_even import GainAt, Range, paying
from trilane.study.pays.dimensions import RECALL
from trilane.study.pays.gain_map import GainMap, gain_map
from trilane.study.pays.ideas import Candidate, PaysError, PaysQuestion, prepared_with_idea
from trilane.study.sweep.axes import vary


@pytest.fixture(scope="module", autouse=True)
def _small_maps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ideas, "IDEAS", {name: narrowed(idea) for name, idea in ideas.IDEAS.items()})
        yield


@pytest.fixture(scope="module")
def cache() -> GainMap:
    return gain_map(small_question("cache"))


def tokens_per_s(question: PaysQuestion, policy: object, engine: str, share: float | None = 0.25) -> float:
    """On the machine as it is, simulated on its own."""
    scenario = question.scenario().with_(engine=engine, cached_share=share)
    return simulate(vary(scenario, "policy", policy)).metrics.throughput_tokens_per_s or 0.0


def test_the_machine_s_own_cell_is_what_the_two_policies_do_there(cache: GainMap) -> None:
    without = tokens_per_s(cache.question, "llama.cpp", "llama.cpp")
    using = tokens_per_s(cache.question, {"llama-cache-lru": {"start": "popular"}}, "llama.cpp-uploads")
    assert cache.cell.x == 0.25  # of 16 experts, 4 fit
    assert cache.cell.without.tokens_per_s == (without,)
    assert cache.cell.using.tokens_per_s == (using,)
    assert cache.cell.gains == (round(using / without - 1, 3),)


def test_values_ascend_as_they_are_shown_and_an_upload_is_shown_in_us(cache: GainMap) -> None:
    xs, ys = [cell.x for cell in cache.rows[0]], [row[0].y for row in cache.rows]
    assert xs == sorted(xs)
    assert ys == sorted(ys)
    costs = prepared_with_idea(cache.question).costs
    assert cache.cell.y == costs.experts[0].copy_ns / 1e3


@pytest.mark.parametrize("idea", ideas.IDEAS.values(), ids=ideas.IDEAS)
def test_a_map_has_other_values_on_either_side_of_the_machine_s_own(idea: ideas.Idea) -> None:
    """Ascending, or descending where an upload is shown, which is the shorter the faster the link."""
    for dimension in (idea.x, idea.y):
        values = dimension.around(0.5 if dimension.is_share else 3.0)
        assert min(values) < (0.5 if dimension.is_share else 3.0) < max(values)
        assert list(values) in (sorted(set(values)), sorted(set(values), reverse=True))


@pytest.mark.parametrize(("own", "values"), [
    (0.5, (0.2, 0.4, 0.5, 0.6, 0.8, 1.0)), (0.45, (0.2, 0.45, 0.6, 0.8, 1.0)), (0.4, (0.2, 0.4, 0.6, 0.8, 1.0)),
])
def test_a_value_that_is_next_to_the_machine_s_own_gives_way_to_it(own: float, values: tuple[float, ...]) -> None:
    """Fixed values 0.2 apart, of which the nearer than 0.08 is left out."""
    assert RECALL.around(own) == values


def test_a_map_is_about_a_model_and_a_machine_by_its_parts(cache: GainMap) -> None:
    assert cache.about == (
        "mixtral-8x7b@bf16:2 on GTX 1650 Super, generic desktop CPU, DDR4-3200 on 2 channels: answers of 8 tokens "
        "after 64, synthetic routing, 1 draw"
    )


def test_waits_are_shares_of_the_time_of_a_token() -> None:
    """Half of a token's time: tokens take 1 s / 15 without the cache, and 1 s / 20 with it."""
    found = hand_made_map().mechanism
    assert found.cpu_wait_ms == found.copy_wait_ms == pytest.approx((1e3 / 15 / 2, 1e3 / 20 / 2))
    assert (found.link_busy, found.hit_rate, found.late) == ((0.5, 0.5), (0.5, 0.5), 0.5)


def test_the_slower_the_link_the_less_a_cache_gains(cache: GainMap) -> None:
    gains = [cell.gain for cell in cache.own_column if cell.gain is not None]
    assert gains == sorted(gains, reverse=True)


def test_a_link_of_twice_the_bandwidth_is_the_next_place_of_the_map() -> None:
    found = gain_map(small_question("link"))
    for row, faster in zip(found.rows[:-1], found.rows[1:], strict=True):
        assert [cell.using.tokens_per_s for cell in row] == [cell.without.tokens_per_s for cell in faster]


def test_more_memory_holds_more_layers() -> None:
    found = gain_map(small_question("memory"))
    assert found.cell.using.facts["decode_served_hit_rate"] == 0.5
    assert found.cell.gain is not None
    assert found.cell.gain > found.question.idea.worth


def test_forecasts_of_every_recall_are_asked_of_routing_that_has_none() -> None:
    question = small_question("prefetch")
    assert prepared_with_idea(question).trace.forecasts == {}
    found = gain_map(question)
    assert all(cell.gains for cell in found.own_row)
    assert found.cell.x == question.recalls[0]


def test_drafts_are_compared_with_one_token_a_step() -> None:
    found = gain_map(small_question("speculation", x=0.5, y=2, gpu="gtx-1660-super"))
    assert (found.cell.x, found.cell.y) == (0.5, 2)
    assert {cell.without.tokens_per_s for row in found.rows for cell in row} == {found.cell.without.tokens_per_s}
    assert [cell.gain for cell in found.own_row] == sorted(cell.gain or 0.0 for cell in found.own_row)


def test_deferral_is_compared_with_a_layer_that_waits_for_all_of_its_experts() -> None:
    found = gain_map(small_question("deferral"))
    waits = tokens_per_s(found.question, "ktransformers", "ktransformers", share=None)
    assert found.cell.without.tokens_per_s == (waits,)
    assert found.cell.x == 1  # of two


def test_another_policy_may_have_the_idea() -> None:
    found = gain_map(small_question("cache", policy="llama.cpp@cache"))
    assert found.cell.using.policy == "llama.cpp@cache"
    using = tokens_per_s(found.question, "llama.cpp@cache", "llama.cpp-cache")
    assert found.cell.using.tokens_per_s == (using,)


def test_with_the_map_of_a_cache_llama_cpp_s_own_is_played_on_the_machine_itself(cache: GainMap) -> None:
    own, cell = cache.alternative, cache.cell
    assert own is not None
    assert (own.x, own.y, own.without) == (cell.x, cell.y, cell.without)
    using = tokens_per_s(cache.question, "llama.cpp@cache", "llama.cpp-cache")
    assert (own.using.policy, own.using.tokens_per_s) == ("llama.cpp@cache", (using,))
    assert cache.to_dict()["alternative"]["gains"] == own.gains


def test_a_policy_that_was_named_and_other_ideas_have_no_alternative() -> None:
    assert gain_map(small_question("cache", policy="llama.cpp@cache")).alternative is None
    assert small_question("link").alternative is None


def test_every_draw_is_a_gain_of_its_own() -> None:
    found = gain_map(small_question("cache", draws=2))
    assert len(found.cell.gains) == 2
    assert found.cell.gain == pytest.approx(sum(found.cell.gains) / 2, abs=6e-4)  # rounded


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_nothing_pays_where_nothing_is_offloaded() -> None:
    with pytest.raises(PaysError, match=r"all experts of mixtral-8x7b@bf16:2, 5\.6 GB, fit the memory of the GPU"):
        gain_map(small_question(gpu="rtx-3090"))
    with pytest.raises(PaysError, match="no GPU with memory of its own"):
        gain_map(replace(small_question(), fit=small_question(gpu="gb10", ram=None).fit))


def test_an_unknown_idea_and_a_policy_that_cannot_run() -> None:
    with pytest.raises(PaysError, match="there is no idea 'cahce'; did you mean 'cache'"):
        small_question("cahce")
    with pytest.raises(ChoiceError, match="there is no policy 'nobody'"):
        gain_map(small_question("cache", policy="nobody"))


@pytest.mark.parametrize(("idea", "values", "message"), [
    ("deferral", {"x": 0}, "deferred experts of a token: expected a whole number from 1 to 2, got 0"),
    ("deferral", {"x": 20}, "deferred experts of a token: expected a whole number from 1 to 2, got 20"),
    ("deferral", {"y": 0}, r"DRAM bandwidth .*: expected a number from [\d.]+ to [\d.]+, got 0"),
    ("speculation", {"y": 2.5}, r"drafts a step: expected a whole number from 1 to 64, got 2\.5"),
    ("speculation", {"x": 1.5}, r"chance that .*: expected a number from 0 to 1, got 1\.5"),
    ("cache", {"x": 42}, r"experts on the GPU .*: expected a number from 0 to 1, got 42"),
    ("memory", {"x": 0}, r"GPU memory .*: expected a number from 0\.1 to 8000, got 0"),
])
def test_values_that_mean_nothing(idea: str, values: dict[str, float], message: str) -> None:
    with pytest.raises(PaysError, match=message):
        gain_map(small_question(idea, **values))


def test_no_token_has_more_deferred_experts_than_experts() -> None:
    dimension = ideas.IDEAS["deferral"].x
    prepared = prepared_with_idea(small_question("deferral"))
    assert dimension.own(prepared) == 1  # half of two
    assert dimension.values(prepared, 2) == (1, 2)


def test_another_policy_is_on_both_sides_of_an_idea_that_is_no_policy() -> None:
    link = small_question("link", policy="llama.cpp@cache")
    assert link.without == link.using == (Candidate("llama.cpp@cache", "llama.cpp-cache"),)
    cache = small_question("cache", policy="llama.cpp@cache")
    assert [side[0].policy_name for side in (cache.without, cache.using)] == ["llama.cpp", "llama.cpp@cache"]
    with pytest.raises(PaysError, match="compares two compositions of `mix`, and takes no other policy"):
        small_question("prefetch", policy="dali")


def test_deferral_takes_policies_that_can_defer() -> None:
    """Told before anything is played."""
    with pytest.raises(PaysError) as refused:
        small_question("deferral", policy="hybrimoe")
    assert str(refused.value) == (
        "pays: deferral needs a policy with the parameter `deferred`, such as kt-deferral; hybrimoe has none"
    )
    assert small_question("deferral", policy="kt-deferral").using == ideas.IDEAS["deferral"].using
    with pytest.raises(ChoiceError, match="there is no policy 'nobody'"):
        small_question("deferral", policy="nobody")


def test_the_recall_counts_where_the_trace_has_forecasts_of_its_own() -> None:
    fields = {"model": "deepseek-v2-lite:3", "trace": "mini-deepseek:3", "gpu": "gtx-1650-super", "weights": "bf16"}
    found = gain_map(small_question("prefetch", **fields))
    assert len({cell.using.tokens_per_s for cell in found.own_row}) > 1
    assert len({cell.without.tokens_per_s for cell in found.own_row}) == 1


# --- where an idea begins to pay --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gains", "ranges"), [
    ([1.0, 1.0, 1.0], [Range(None, None)]),
    ([-1.0, 0.0, -1.0], []),
    ([0.0, 1.0, 1.0], [Range(10.0, None)]),
    ([-1.0, 1.0, 1.0], [Range(15.0, None)]),
    ([3.0, -1.0, -1.0], [Range(None, 17.5)]),
    ([-1.0, 1.0, -3.0], [Range(15.0, 22.5)]),
    ([1.0, -1.0, 1.0], [Range(None, 15.0), Range(25.0, None)]),
    ([-1.0, None, 1.0], [Range(30.0, None)]),
    ([1.0, None, -1.0], [Range(None, 10.0)]),
    ([1.0, None, 1.0], [Range(None, 10.0), Range(30.0, None)]),
    ([None, 1.0, 1.0], [Range(None, None)]),
    ([None, -1.0, 1.0], [Range(25.0, None)]),
    ([1.0, -1.0, None], [Range(None, 15.0)]),
    ([None, None, None], []),
])
def test_lines_between_values_cross_the_break_even_where_a_gain_is_nothing(
    gains: list[float | None], ranges: list[Range]
) -> None:
    assert paying([GainAt(*step) for step in zip([10.0, 20.0, 30.0], gains, strict=True)]) == ranges


def test_no_line_is_drawn_over_a_jump() -> None:
    """Only the two neighbours are known; beside them lines are drawn as ever."""
    steps = [GainAt(10.0, 1.0), GainAt(20.0, -1.0, jumps=True), GainAt(30.0, 1.0)]
    assert paying(steps) == [Range(None, (10.0, 20.0)), Range(25.0, None)]


def test_no_line_is_drawn_across_a_value_that_cannot_run() -> None:
    gains = [-1.0, None, 1.0, None, -1.0]
    values = [10.0, 20.0, 30.0, 40.0, 50.0]
    assert paying([GainAt(*step) for step in zip(values, gains, strict=True)]) == [Range(30.0, 30.0)]


def test_what_must_be_bought_pays_from_a_gain_on() -> None:
    found = gain_map(small_question("memory"))
    worth, gains = found.question.idea.worth, [cell.gain for cell in found.own_row]
    steps = [GainAt(cell.x, None if cell.gain is None else cell.gain - worth) for cell in found.own_row]
    assert (worth, None in gains, found.paying_x) == (0.05, False, paying(steps))


@pytest.mark.parametrize(("copied", "high"), [((55.0, 0.0), (100.0, 300.0)), ((55.0, 6.0), 250.0)])
def test_a_side_that_begins_to_copy_jumps(copied: tuple[float, float], high: object) -> None:
    """Ten times as much: less is in proportion to misses."""
    found = hand_made_map()
    rows = tuple(
        tuple(replace(cell, without=cell.without._replace(facts={**cell.without.facts, "pcie_bytes_per_token": size}))
              for cell in cells)
        for cells, size in zip(found.rows, copied, strict=True)
    )
    assert replace(found, rows=rows).paying_y == [Range(None, high)]


@pytest.mark.parametrize(("speeds", "verdict"), [
    ((10.01, 20.02), "pays"), ((10.0, 20.02), "may pay"), ((10.0, 20.0), "does not pay"), ((9.0, 20.0), "does not pay"),
])
def test_an_idea_pays_if_every_draw_gains_and_no_change_is_no_gain(speeds: tuple[float, ...], verdict: str) -> None:
    found = hand_made_map()
    cell = replace(found.cell, using=found.cell.using._replace(tokens_per_s=speeds))
    assert found.cell.without.tokens_per_s == (10.0, 20.0)
    assert replace(found, rows=((cell,),), here=(0, 0)).paying == verdict


def test_json_has_the_verdict_and_the_ranges() -> None:
    record = hand_made_map().to_dict()
    assert record["paying"] == "pays"
    assert record["paying_at"] == {"x": [{"low": None, "high": None}], "y": [{"low": None, "high": 250.0}]}
