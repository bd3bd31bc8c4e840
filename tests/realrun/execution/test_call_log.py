"""The log of a session's calls, and replaying it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies.mechanism.views import Copy, ExpertId, Foresight, Plan, PolicyError, Routing, Swap, Updates
from policies.registry import SYSTEMS, policy_names
from realrun.execution.call_log import LoggedSession, replay
from realrun.execution.recorder import MachineRecorder, Timed
from realrun.execution.routed_tokens import as_it_is, choices_of, descending, rerouted, routed, routing_of
from realrun.machine.thread_lane import InlineLane
from realrun.profiling.decisions import drive
from sim.runs.spans import Span
from sim.simulate import play
from tests.kit.tiny_bench import prepared, tiny_setting
from trilane.study.validation.parity import answers_of, plans_changed

POLICY = "dali"  # it prefetches and swaps


@pytest.fixture(scope="module")
def played() -> LoggedSession:
    return simulated(POLICY)


def simulated(policy: str, cached_share: float = 0.3) -> LoggedSession:
    run = prepared(tiny_setting(cached_share), policy)
    session = run.session_of(LoggedSession)
    play(run, session)
    return session


def fresh() -> LoggedSession:
    return prepared(tiny_setting(), POLICY).session_of(LoggedSession)


def test_the_log_has_every_call_in_order(played: LoggedSession) -> None:
    names = [call.name for call in played.log if call.name not in ("next_copy", "copied", "computed")]
    layer = ["plan_layer", "foresee", "end_layer"]
    step = ["begin_step", *layer, *layer, "plan_layer", "end_layer", "end_step"]
    assert names == step * 5  # a prompt and four tokens, on three layers; the last looks no further ahead


def test_plans_and_copies_are_found_in_it(played: LoggedSession) -> None:
    assert list(played.plans()) == [(step, layer) for step in range(5) for layer in range(3)]
    assert all(isinstance(plan, Plan) and plan.layer == layer for (_, layer), plan in played.plans().items())
    assert {copy.kind for copy in played.copies()} >= {"demand", "prefetch"}
    assert len(played.copies()) == sum(call.name == "copied" for call in played.log)


def test_logging_changes_no_answer(played: LoggedSession) -> None:
    assert replay(played.log, fresh()) is None


def test_a_replay_can_be_replayed(played: LoggedSession) -> None:
    again = fresh()
    replay(played.log, again)
    assert again.log == played.log


# --- a broken twin ----------------------------------------------------------------------------------------------------


def other_plan(plan: Plan) -> Plan:
    return plan._replace(makespan_ns=plan.makespan_ns + 1)


def other_copy(copy: Copy | None) -> Copy:
    if copy is None:
        return Copy(ExpertId(0, 0), "swap", "cache", (), 1)
    return copy._replace(expert_bytes=copy.expert_bytes + 1)


def other_foresight(answer: tuple[Foresight, Any]) -> tuple[Foresight, Any]:
    return answer[0]._replace(prefetches=(*answer[0].prefetches, ExpertId(2, 15))), answer[1]


def other_updates(updates: Updates) -> Updates:
    return updates._replace(adopted=(*updates.adopted, Swap(ExpertId(0, 0), ExpertId(0, 1))))


@pytest.mark.parametrize(("name", "spoil"), [
    ("plan_layer", other_plan),
    ("foresee", other_foresight),
    ("next_copy", other_copy),
    ("copied", lambda kept: not kept),
    ("end_layer", other_updates),
    ("end_step", other_updates),
])
@pytest.mark.parametrize("nth", [0, 3])
def test_another_answer_is_found_with_its_place(
    played: LoggedSession, name: str, spoil: Callable[[Any], Any], nth: int
) -> None:
    session, count = fresh(), 0
    original = getattr(session, name)

    def answer(*given: Any) -> Any:
        nonlocal count
        count += 1
        return spoil(original(*given)) if count == nth + 1 else original(*given)

    setattr(session, name, answer)
    found = replay(played.log, session)
    assert found is not None
    assert found.place == [place for place, call in enumerate(played.log) if call.name == name][nth]
    assert found.call is played.log[found.place]
    assert found.answer == spoil(found.call.answer)


def test_a_session_that_refuses_a_call_answers_otherwise(played: LoggedSession) -> None:
    session, refused = fresh(), PolicyError("no such copy")

    def refuse(copy: Copy) -> bool:
        raise refused

    session.copied = refuse  # type: ignore[method-assign]
    found = replay(played.log, session)
    assert found is not None
    assert found.place == next(place for place, call in enumerate(played.log) if call.name == "copied")
    assert found.answer is refused


# --- how much timing changed ------------------------------------------------------------------------------------------


def changed(one: LoggedSession, other: LoggedSession) -> float:
    return plans_changed(answers_of(one), answers_of(other))


def test_plans_that_differ_are_counted(played: LoggedSession) -> None:
    assert changed(played, simulated(POLICY)) == 0
    assert changed(simulated("naive-cpu", 0.0), simulated("on-demand", 0.0)) == 1
    other = simulated(POLICY)
    place, call = next((i, call) for i, call in enumerate(other.log) if call.name == "plan_layer")
    other.log[place] = call._replace(answer=call.answer._replace(cpu=(*call.answer.cpu, 99)))
    assert changed(played, other) == 1 / 15


def test_what_a_policy_expects_of_a_plan_is_no_difference(played: LoggedSession) -> None:
    other = simulated(POLICY)
    other.log = [
        call._replace(answer=other_plan(call.answer)) if call.name == "plan_layer" else call for call in other.log
    ]
    assert changed(played, other) == 0


def test_a_plan_that_was_never_made_is_a_difference(played: LoggedSession) -> None:
    other = simulated(POLICY)
    other.log = [call for call in other.log if call.name != "plan_layer" or call.given[0].step < 4]
    assert changed(played, other) == 3 / 15


# --- a session without a machine -------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [name for name in policy_names() if not SYSTEMS[name].needs.future])
@pytest.mark.parametrize("cached_share", [0.0, 0.3])
def test_every_session_can_be_driven_without_a_machine(policy: str, cached_share: float) -> None:
    """As its decisions are timed: every layer is planned, and every copy that it waits for is made."""
    run = prepared(tiny_setting(cached_share), policy)
    session = run.session_of(LoggedSession)
    drive(session, run.demand)
    assert list(session.plans()) == [(step.index, layer) for step in run.demand for layer in range(3)]
    waited = sum(len(plan.loads) + len(plan.streamed) for plan in session.plans().values())
    assert sum(copy.kind == "demand" for copy in session.copies()) == waited
    assert replay(session.log, run.session()) is None


# --- Work of lanes as spans -------------------------------------------------------------------------------------------


def recorder() -> MachineRecorder:
    it = MachineRecorder()
    it.zero_ns, it.step, it.phase = 100, 2, "decode"
    return it


def test_times_count_from_the_start_of_the_run() -> None:
    it = recorder()
    it.add("cpu", Timed(110, 120, 150), "expert", 3, 7, tokens=4, size_bytes=64, target_layer=5)
    it.flush()
    assert [Span(*row) for row in it.rows] == [Span("cpu", 10, 20, 50, "expert", "decode", 2, 3, 5, 7, 4, 64)]


def test_work_belongs_to_the_step_in_which_it_was_given_unless_told_otherwise() -> None:
    it = recorder()
    began = it.place
    it.add("gpu", Timed(1, 1, 1), "gate", 0)
    it.step, it.phase = 3, "prefill"
    it.add("h2d", Timed(1, 1, 1), "swap", 0, 1, place=began)
    it.add("gpu", Timed(1, 1, 1), "gate", 0)
    it.flush()
    assert [(row.phase, row.step) for row in map(Span._make, it.rows)] == [("decode", 2), ("decode", 2), ("prefill", 3)]


def test_times_of_marks_are_read_when_the_work_has_ended() -> None:
    it, lane = recorder(), InlineLane()
    it.zero_ns = 0
    completion = lane.submit(lambda: None)
    it.add("gpu", completion, "gate", 0)
    assert it.rows == []
    it.flush()
    it.flush()
    assert [row[1:4] for row in it.rows] == [(completion.ready_ns, completion.start_ns, completion.end_ns)]


class Endless(Timed):
    """Work that goes on, whose times cannot be read yet."""

    start_ns = property(lambda self: 1 / 0)  # type: ignore[assignment]

    def __init__(self) -> None: ...

    def has_ended(self) -> bool:
        return False


def test_in_a_long_run_the_times_of_earlier_steps_are_read_at_the_end_of_a_step() -> None:
    it = MachineRecorder(most_open=3)
    it.step = 0
    it.add("gpu", Timed(1, 2, 3), "gate", 0)
    it.add("h2d", Endless(), "prefetch", 0, 1)
    it.step = 1
    it.add("gpu", Timed(4, 5, 6), "gate", 0)
    it.end_step()
    assert it.rows == []  # there is little of it
    it.add("gpu", Timed(7, 8, 9), "gate", 1)
    it.end_step()
    assert [row[1:4] for row in it.rows] == [(1, 2, 3)]  # not what goes on, and not what this step did
    assert len(it._open) == 3


def test_instants_last_nothing_and_what_was_before_the_run_was_at_its_start() -> None:
    it = recorder()
    it.instant(130, "evict", 1, -1, 6, 64)
    it.instant(0, "place", 1, -1, 6, 64)
    it.flush()
    assert [Span(*row)[:5] for row in it.rows] == [("h2d", 30, 30, 30, "evict"), ("h2d", 0, 0, 0, "place")]


# --- Rows that every expert computes ----------------------------------------------------------------------------------


def listed(choices: dict[int, torch.Tensor]) -> dict[int, list[int]]:
    return {expert: part.tolist() for expert, part in choices.items()}


def test_choice_j_of_token_n_has_the_number_n_k_plus_j() -> None:
    assert listed(choices_of(np.array([[5, 2], [2, 0], [9, 5]]))) == {0: [3], 2: [1, 2], 5: [0, 5], 9: [4]}


def test_negative_ids_are_nobodys() -> None:
    assert listed(choices_of(np.array([[3, -1], [-1, -1]]))) == {3: [0]}
    assert listed(choices_of(np.array([[-1]]))) == {}


@given(st.integers(1, 4).flatmap(lambda k: st.lists(st.lists(st.integers(-1, 6), min_size=k, max_size=k), min_size=1)))
def test_every_choice_is_somebodys_exactly_once(ids: list[list[int]]) -> None:
    flat = [expert for token in ids for expert in token]
    choices = listed(choices_of(np.array(ids)))
    assert list(choices) == sorted(set(flat) - {-1})
    assert {number: expert for expert, some in choices.items() for number in some} == {
        number: expert for number, expert in enumerate(flat) if expert >= 0
    }
    assert all(some == sorted(some) for some in choices.values())


def test_routed_keeps_the_routers_weights_in_the_order_of_choices() -> None:
    given = routed(np.array([[1, 0], [1, 3]]), torch.tensor([[0.7, 0.3], [0.9, 0.1]]))
    assert (given.tokens, given.top_k, given.complete) == (2, 2, True)
    assert torch.equal(given.weights, torch.tensor([0.7, 0.3, 0.9, 0.1]))
    assert routing_of(given) == Routing((0, 1, 3), (1, 2, 1))


def test_what_a_policy_decides_token_by_token_may_be_ragged() -> None:
    """AdapMoE drops the second expert of some tokens."""
    routing = Routing((1, 4), (2, 1), ((4, 1), (1,)), ((0.75, 0.25), (1.0,)))
    given = rerouted(routing, top_k=2, dtype=torch.float32)
    assert listed(dict(given.choices)) == {1: [1, 2], 4: [0]}
    assert given.weights.tolist() == [0.75, 0.25, 1.0, 0.0]
    assert not given.complete
    assert routing_of(given)[:2] == routing[:2]


@pytest.mark.parametrize(("dtype", "third"), [(torch.float32, 0.3333), (torch.bfloat16, 0.333984375)])
def test_a_policys_weights_come_in_the_type_of_the_routers(dtype: torch.dtype, third: float) -> None:
    routing = as_it_is(Routing((0, 2), (1, 1), ((2,), (0,)), ((0.3333,), (1.0,))))
    weights = rerouted(routing, 1, dtype).weights
    assert torch.equal(weights, torch.tensor([third, 1.0], dtype=dtype))
    assert weights.dtype == dtype


def test_descending_sorts_every_token_and_keeps_equals_in_order() -> None:
    ids, weights = descending(np.array([[7, 3, 5], [1, 2, 4]]), torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]]))
    assert ids == [[3, 5, 7], [1, 2, 4]]
    assert torch.allclose(torch.tensor(weights), torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2]]))
