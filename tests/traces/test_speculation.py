"""Speculative decoding: which drafts are accepted, the steps that verify them, their costs, and what TPOT is then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.costs.cost_table import DraftCosts, DraftWork
from sim.runs.metrics import step_times
from sim.runs.prepare import prepare
from sim.runs.sampling import Weights, weights_of
from sim.runs.scenario import Scenario, ScenarioError
from sim.runs.vocabulary import Label
from sim.simulate import play, simulate
from tests.kit.hand_worked import LAYERS, Placed, lines, registered, step, told
from tests.kit.hand_worked import play as play_by_hand
from tests.kit.toys import uniform_costs
from traces.batches import StepRows
from traces.library import load_trace
from traces.trace import Trace
from traces.windows import accepted_shares, drawn_windows, tokens_per_step, verifying_steps
from trilane.study.draws import draws_of
from trilane.testing.laws import law_12_accounting
from trilane.verbs.inputs import describe

MINI: dict[str, Any] = {"trace": "mini-moe", "model": None, "cached_share": 0.25, "prompt_tokens": 8}
DRAFTS: dict[str, Any] = {"draft_tokens": 3, "draft_acceptance": (0.7, 0.5, 0.4)}


def decode_of(tokens: int) -> list[StepRows]:
    """Steps of one token each, whose rows are 100, 101, ..., after a prompt of 4 tokens and a prefill."""
    return [StepRows(1 + i, "decode", np.array([100 + i]), (0,), (1,), (4 + i,)) for i in range(tokens)]


def verified(
    decode: list[StepRows], tokens: int, shares: Sequence[float], seed: int, again: bool = False
) -> list[StepRows]:
    """Steps that make ``tokens`` tokens with these shares of accepted drafts."""
    return verifying_steps(decode, tokens, drawn_windows(shares, seed), seed, again)


# --- acceptance -------------------------------------------------------------------------------------------------------


def test_a_rate_holds_for_each_draft_after_the_one_before() -> None:
    assert accepted_shares(3, 0.5) == (0.5, 0.25, 0.125)
    assert tokens_per_step(3, 0.5) == 1.875
    assert tokens_per_step(0, 0.5) == 1


def test_shares_are_by_position_and_those_of_further_drafts_are_not_read() -> None:
    assert accepted_shares(2, (0.85, 0.7, 0.1)) == (0.85, 0.7)
    assert tokens_per_step(2, (0.85, 0.7, 0.1)) == pytest.approx(2.55)


@given(st.integers(0, 8), st.floats(0, 0.99))
def test_the_mean_of_a_rate_is_the_published_closed_form(drafts: int, rate: float) -> None:
    """(1 - a^(K+1)) / (1 - a): Leviathan et al., Eq. 1."""
    assert tokens_per_step(drafts, rate) == pytest.approx((1 - rate ** (drafts + 1)) / (1 - rate))


@pytest.mark.parametrize("acceptance", [0.6, (0.696, 0.445, 0.326, 0.212), (0.9, 0.0), (1.0, 1.0)])
def test_steps_make_as_many_tokens_as_expected(acceptance: Any) -> None:
    shares = accepted_shares(len(acceptance) if isinstance(acceptance, tuple) else 3, acceptance)
    steps = verified(decode_of(20_000), 15_000, shares, seed=3)
    made = [step.generated for step in steps]
    assert fmean(made) == pytest.approx(tokens_per_step(len(shares), acceptance), rel=1e-3)
    for place, share in enumerate(shares):
        assert fmean(made_here > 1 + place for made_here in made) == pytest.approx(share, abs=1e-3)


@pytest.mark.parametrize("acceptance", [0.42, 0.7, (0.9, 0.5, 0.3), (1.0, 0.0)])
def test_few_steps_have_the_stated_shares_whatever_the_seed(acceptance: Any) -> None:
    """Within 3 of up to 100 steps; independent draws miss one by more for some of these seeds."""
    shares = accepted_shares(3, acceptance) if isinstance(acceptance, float) else acceptance
    answers = [verified(decode_of(204), 100, shares, seed) for seed in range(200)]
    for steps in answers:
        for place, share in enumerate(shares):
            assert abs(sum(step.generated > 1 + place for step in steps) - share * len(steps)) <= 3
    different = {tuple(step.generated for step in steps) for steps in answers}
    assert (len(different) == 1) == (set(shares) <= {0.0, 1.0})


# --- the steps --------------------------------------------------------------------------------------------------------


def facts(steps: list[StepRows]) -> list[tuple[Any, ...]]:
    return [(s.index, s.rows.tolist(), s.tokens, s.context, s.drafted, s.generated) for s in steps]


def test_steps_whose_drafts_are_all_accepted_follow_one_another() -> None:
    assert facts(verified(decode_of(7), 7, (1.0, 1.0), seed=0)) == [
        (1, [100, 101, 102], (3,), (4,), 2, 3),
        (2, [103, 104, 105], (3,), (7,), 2, 3),
        (3, [106], (1,), (10,), 0, 1),
    ]


def test_rejected_drafts_are_computed_and_the_next_step_begins_behind_what_was_kept() -> None:
    assert facts(verified(decode_of(4), 4, (1.0, 0.0), seed=0)) == [
        (1, [100, 101, 102], (3,), (4,), 2, 2),
        (2, [102, 103], (2,), (6,), 1, 2),
    ]
    one = verified(decode_of(3), 3, (0.0,), seed=0)
    assert [step.rows.tolist() for step in one] == [[100, 101], [101, 102], [102]]


def test_kept_tokens_are_computed_again_where_drafts_were_rejected() -> None:
    """In a step that makes no token; not after one whose drafts are all accepted."""
    assert facts(verified(decode_of(5), 5, (1.0, 0.0), seed=0, again=True)) == [
        (1, [100, 101, 102], (3,), (4,), 2, 2),
        (2, [100, 101], (2,), (4,), 0, 0),
        (3, [102, 103, 104], (3,), (6,), 2, 2),
        (4, [102, 103], (2,), (6,), 0, 0),
        (5, [104], (1,), (8,), 0, 1),
    ]


@pytest.mark.parametrize("shares", [(0.6,), (0.7, 0.4), (1.0, 1.0)])
def test_the_mean_counts_the_steps_that_compute_again(shares: tuple[float, ...]) -> None:
    steps = verified(decode_of(20_000), 15_000, shares, seed=1, again=True)
    expected = tokens_per_step(len(shares), shares, again=True)
    assert fmean(step.generated for step in steps) == pytest.approx(expected, rel=0.02)


def test_tokens_that_are_computed_again_count_once() -> None:
    scenario = Scenario(**MINI, **DRAFTS, policy="fiddler", generated_tokens=20)
    once, again = simulate(scenario), simulate(scenario.with_(draft_again=True))
    times = step_times(again.spans)
    decode = times[times.phase == "decode"]
    assert again.metrics.decode_steps > once.metrics.decode_steps
    assert again.metrics.tokens_per_step == 20 / again.metrics.decode_steps
    assert again.metrics.tpot_ms == pytest.approx((decode.end_ms.iloc[-1] - decode.start_ms.iloc[0]) / 20)
    assert again.metrics.tpot_ms > once.metrics.tpot_ms
    assert again.bounds["lower_bound_tpot_ms"] > once.bounds["lower_bound_tpot_ms"]
    law_12_accounting(again.spans, 1)


SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=5).map(lambda shares: tuple(sorted(shares, reverse=True)))


@given(st.integers(1, 40), SHARES, st.integers(0, 2**32))
def test_the_answer_has_its_length_and_every_token_is_kept_once(answer: int, shares: Any, seed: int) -> None:
    steps = verified(decode_of(answer), answer, shares, seed)
    kept = [row for step in steps for row in step.rows[: step.generated].tolist()]
    assert kept == [100 + token for token in range(answer)]
    assert all(len(step.rows) == step.tokens[0] == 1 + step.drafted for step in steps)
    assert all(step.generated - 1 <= step.drafted <= len(shares) for step in steps)
    assert steps == [] or facts(verified(decode_of(answer), answer, shares, seed)) == facts(steps)


@pytest.mark.parametrize("policy", ["mixtral-offloading", "dali", "best-exact", "daop"])
def test_no_drafts_are_no_speculation(policy: str) -> None:
    scenario = Scenario(**MINI, policy=policy, generated_tokens=6)
    plain, none = simulate(scenario), simulate(scenario.with_(draft_acceptance=0.9, draft_layers=3.0))
    assert none.spans.to_csv() == plain.spans.to_csv()
    assert none.to_dict() == plain.to_dict()
    assert plain.metrics.tokens_per_step == 1


# --- a run ------------------------------------------------------------------------------------------------------------


def test_times_are_of_accepted_tokens() -> None:
    run = simulate(Scenario(**MINI, **DRAFTS, policy="fiddler", generated_tokens=20))
    times = step_times(run.spans)
    decode = times[times.phase == "decode"]
    assert run.metrics.decode_steps == len(decode) < 20
    assert run.metrics.tokens_per_step == 20 / len(decode)
    assert run.metrics.tpot_ms == pytest.approx((decode.end_ms.iloc[-1] - decode.start_ms.iloc[0]) / 20)
    assert run.bounds["lower_bound_tpot_ms"] <= run.metrics.tpot_ms
    assert run.scenario.generated_tokens == 20
    assert Label.SPECULATIVE in run.labels
    assert run.spans[run.spans.kind == "draft"].tokens.max() == 3


def test_drafts_that_are_all_accepted_and_cost_nothing_are_faster_where_reading_weights_takes_the_time() -> None:
    plain = Scenario(**{**MINI, "cached_share": 1.0}, policy="fiddler", generated_tokens=24)
    free = plain.with_(draft_tokens=3, draft_acceptance=1.0, draft_layers=0.0)
    costly, useless = free.with_(draft_layers=1.0), free.with_(draft_acceptance=0.0)
    tpot_ms = [simulate(each).metrics.tpot_ms for each in (free, costly, plain, useless)]
    assert tpot_ms == sorted(tpot_ms)


def test_sequences_and_seeds_of_draws_are_long_enough_for_the_answer() -> None:
    scenario = Scenario(**MINI, **DRAFTS, policy="fiddler", generated_tokens=64)
    made = [sum(s.generated for s in prepare(draw).steps if s.phase == "decode") for draw in draws_of(scenario, 3)]
    assert made == [64, 64, 64]
    assert "drafts of 3 tokens (mtp; 2.60 tokens a step expected)" in describe(scenario)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40).filter(any), st.integers(0, 1000))
def test_the_weights_of_steps_of_several_tokens_sum_to_the_answer(made: list[int], more: int) -> None:
    numbers, answer = list(range(2, 2 + len(made))), sum(made) + more
    weights = weights_of(numbers, answer, made).of(np.array(numbers))
    assert (weights * made).sum() == pytest.approx(answer)


def test_the_last_step_that_makes_tokens_stands_for_the_rest_where_one_that_makes_none_follows() -> None:
    """Steps that compute tokens again make none. Of 9 tokens, 4 would be played one by one, and 3 are made before."""
    assert weights_of(range(4), 256, [3, 0, 6, 0]) == Weights(2, (256 - 3) / 6)


def test_few_steps_stand_for_a_long_answer() -> None:
    scenario = Scenario(**MINI, **DRAFTS, policy="fiddler", generated_tokens=500, sampled_steps=20)
    prepared = prepare(scenario)
    made = [s.generated for s in prepared.steps if s.phase == "decode"]
    assert 20 <= sum(made) <= 23, "the last step is not cut short"
    assert all(s.drafted == 3 for s in prepared.steps if s.phase == "decode")
    run = play(prepared)
    numbers = np.array([s.index for s in prepared.steps if s.phase == "decode"])
    assert (prepared.weights.of(numbers) * made).sum() == pytest.approx(500)
    assert run.metrics.tpot_ms > run.bounds["lower_bound_tpot_ms"] > 0


def test_the_header_of_a_trace_may_state_the_acceptance() -> None:
    trace = load_trace("mini-moe")
    stated = Trace.trusted(trace.shape, trace.tensors(), {"draft_acceptance": [0.8]}, trace.checksum)
    scenario = Scenario(**MINI, generated_tokens=8, draft_tokens=1)
    assert prepare(scenario, stated).scenario.draft_acceptance == (0.8,)
    assert prepare(scenario.with_(draft_acceptance=0.3), stated).scenario.draft_acceptance == 0.3


# --- costs ------------------------------------------------------------------------------------------------------------

VERIFIED = """
host:
  0-10   launch L-1           # two drafts, 5 each: layer 1, combine 1, two experts 2, head 1
  10-11  launch L0
  77-78  wait L0
  78-79  plan L0
  79-80  launch L0 E0
  80-81  launch L0 E1
  81-82  launch L0
  82-83  launch L1
  104-105 wait L1
  105-106 plan L1
  106-107 launch L1 E1
  107-108 launch L1 E2
  108-109 launch L1
  109-110 launch L-1
  123-124 wait L-1 tokens=1   # one draft is accepted
gpu:
  10-64  draft L-1 tokens=2   # 27 each: attention 10, gate 2, combine 1, two experts 10, head 4
  64-74  attention L0 tokens=3
  74-76  gate L0
  80-85  expert L0 E0 tokens=3
  85-90  expert L0 E1 tokens=3
  90-91  combine L0
  91-101 attention L1
  101-103 gate L1
  107-112 expert L1 E1
  112-117 expert L1 E2
  117-118 combine L1
  118-122 attention L-1 tokens=3
d2h:
  76-77  routing L0
  103-104 routing L1
  122-123 routing L-1 bytes=12   # the choices of three positions
"""


def test_a_step_that_verifies_two_drafts_worked_out_by_hand() -> None:
    demand = step({0: 3, 1: 3}, {1: 3, 2: 3})._replace(context=(9,), drafted=2, generated=2)
    placed = Placed(((0, 1), (1, 2)))
    costs = replace(uniform_costs(LAYERS), draft=DraftWork(1, 2))
    policy = replace(registered("on-demand"), placement=placed)
    spans = play_by_hand(policy, demand, cache_bytes=placed.bytes, costs=costs)
    assert told([span for span in spans if span.kind != "place"], VERIFIED) == lines(VERIFIED)


def test_a_draft_takes_layers_like_the_models_or_the_time_that_is_stated() -> None:
    costs = uniform_costs(shared_ns=3)
    assert costs.draft_costs(5) == DraftCosts(0, 0)
    assert replace(costs, draft=DraftWork(1, 2)).draft_costs(5) == DraftCosts(10 + 2 + 3 + 1 + 10 + 4, 1 + 1 + 2 + 1)
    assert replace(costs, draft=DraftWork(0.5, 2)).draft_costs(5) == DraftCosts(13 + 4, 2 + 1)
    assert replace(costs, draft=DraftWork(1, 2, ns=70)).draft_costs(5) == DraftCosts(70, 0)


def test_the_experts_of_a_draft_are_those_of_the_mean_layer() -> None:
    costs = uniform_costs()
    one, *others = costs.experts
    larger = one._replace(gpu_ns=(0, *(3 * ns for ns in one.gpu_ns[1:])), first_gpu_ns=4)
    uneven = replace(costs, experts=(larger, *others[:1]), draft=DraftWork(1, 2))
    even = replace(costs, experts=(one, *others[:1]), draft=DraftWork(1, 2))
    assert uneven.draft_costs(5).gpu_ns - even.draft_costs(5).gpu_ns == (2 * 2 * one.gpu_ns[1] + 4) / 2


def test_the_head_is_applied_to_every_position() -> None:
    costs = prepare(Scenario(**MINI)).costs
    one, of_many = costs.step(4, (20,)), costs.step(4, (20,), 500)
    assert of_many.head_ns == costs.step(500, (9,) * 500).head_ns > one.head_ns
    assert of_many._replace(head_ns=0) == one._replace(head_ns=0)
    assert costs.step(1, (20,), 1) == costs.step(1, (20,))


def test_layers_that_draft_take_room_from_the_cache() -> None:
    plain = Scenario("synthetic:qwen3-30b-a3b/1x8+8", "qwen3-30b-a3b@q4_k_m", "rtx-3060+ddr4-3200", policy="on-demand")
    shape = prepare(plain).shape
    memory = [prepare(plain.with_(**DRAFTS, draft_layers=layers)).memory for layers in (0.0, 1.0, 2.0)]
    room = [each.non_expert_bytes for each in memory]
    assert [room[1] - room[0], room[2] - room[0]] == [shape.moe_layer_bytes, 2 * shape.moe_layer_bytes]
    assert shape.moe_layer_bytes > shape.experts * shape.expert_bytes_by_layer[0]
    assert memory[0].slots > memory[1].slots > memory[2].slots


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "message"), [
    ({"draft_tokens": 2, "batch": 2, "draft_acceptance": 0.5}, "draft_tokens: expected batch 1"),
    ({"draft_tokens": 65}, "draft_tokens: expected a whole number from 0 to 64, got 65"),
    ({"draft_acceptance": 1.2}, "draft_acceptance: expected a number from 0 to 1"),
    ({"draft_acceptance": (0.5, 0.6)}, r"shares that do not rise .*, got 0\.5, 0\.6"),
    ({"draft_layers": -1.0}, "draft_layers: expected a number >= 0"),
])
def test_keys_that_exclude_each_other_or_have_no_meaning(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        Scenario(**keys)


@pytest.mark.parametrize("acceptance", [None, (0.8,)])
def test_each_draft_has_a_stated_acceptance(acceptance: Any) -> None:
    scenario = Scenario(**MINI, generated_tokens=4, draft_tokens=2, draft_acceptance=acceptance)
    with pytest.raises(ScenarioError, match="draft_tokens 2: expected the acceptance of each of these drafts, got"):
        prepare(scenario)


def test_forecasts_by_token_are_refused_with_drafts() -> None:
    """The token after the next one is computed in the same step as the next one, not in a later step."""
    scenario = Scenario(**MINI, **DRAFTS, policy="seqmoe", generated_tokens=4, noisy_forecast_recall=(0.9, 0.9))
    with pytest.raises(ScenarioError, match=r"'seqmoe' needs forecasts of the next tokens, .* draft_tokens 0, got 3"):
        prepare(scenario).checked()
    assert prepare(scenario.with_(draft_tokens=0)).checked().needs.forecasts == (("token", 1), ("token", 2))
