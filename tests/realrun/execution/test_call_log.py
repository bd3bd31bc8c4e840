"""The log of a session's calls, and replaying it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from policies.mechanism.views import Copy, ExpertId, Foresight, Plan, PolicyError, Swap, Updates
from policies.registry import SYSTEMS, policy_names
from realrun.execution.call_log import LoggedSession, replay
from realrun.profiling.decisions import drive
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
