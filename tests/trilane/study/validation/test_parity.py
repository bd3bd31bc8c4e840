"""Law 10: the executor's logs say the same when they are replayed, and what the simulator's say where timing plays no
part."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from policies.registry import SYSTEMS, policy_names
from realrun.execution.call_log import LoggedSession, replay
from sim.runs.prepare import Prepared
from sim.simulate import play
from tests.kit.depth import thinned
from tests.kit.tiny_bench import WatchedBench, bench_for, machine, prepared, run, tiny_setting
from trilane.study.validation.parity import Parity, answers_of, parity_of, parity_of_repeats

SHARE = 0.3
PLAYABLE = [name for name in policy_names() if SYSTEMS[name].needs.narrow_share is None]  # one copy of each expert
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def bench() -> Iterator[WatchedBench]:
    with machine() as lanes:
        yield bench_for(lanes, [prepared(tiny_setting(SHARE), name) for name in PLAYABLE])


@cache
def predicted(policy: str) -> LoggedSession:
    run = prepared(tiny_setting(SHARE), policy)
    session = run.session_of(LoggedSession)
    play(run, session)
    return session


def timing_plays_no_part(policy: str) -> bool:
    """It has no prefetcher, and asks for no cache update."""
    session = predicted(policy)
    ends = [call.answer for call in session.log if call.name in ("end_layer", "end_step")]
    swaps = [swap for plan in session.plans().values() for swap in plan.swaps]
    return session.policy.prefetcher is None and not swaps and not any(up.queued or up.adopted for up in ends)


def parity(bench: WatchedBench, policy: str) -> Parity:
    setting = tiny_setting(SHARE)
    return compared(run(bench, setting, policy).session, predicted(policy), setting, policy)


def compared(measured: LoggedSession, simulated: LoggedSession, setting: Prepared, policy: str) -> Parity:
    """``policy``: of the fresh session."""
    replayed = replay(measured.log, setting.with_policy(policy).session()) is None
    return parity_of(answers_of(measured), replayed, answers_of(simulated))


def test_there_are_policies_of_both_kinds() -> None:
    assert all(map(timing_plays_no_part, ("on-demand", "naive-cpu", "fiddler")))
    assert not any(map(timing_plays_no_part, ("dali", "moe-lightning", "quasi-pf")))


@thinned(3)
@pytest.mark.parametrize("policy", PLAYABLE)
def test_law_10_a_log_replayed_in_a_fresh_session_gives_identical_answers(bench: WatchedBench, policy: str) -> None:
    """And without prefetches and swaps, logs agree by themselves."""
    checked = parity(bench, policy)
    assert checked.replay_identical
    assert checked.changed_plans_share < 1  # the first plan is made before anything has taken time
    assert checked.held
    if timing_plays_no_part(policy):
        assert checked.timing_free
        assert checked.logs_identical
        assert checked.changed_plans_share == 0
        assert checked.measured == checked.predicted


def test_hits_loads_and_bytes_are_those_of_the_log(bench: WatchedBench) -> None:
    session, checked = run(bench, tiny_setting(SHARE), "on-demand").session, parity(bench, "on-demand")
    copies = [call.answer for call in session.log if call.name == "next_copy" and call.answer is not None]
    assert checked.measured.loads == len(copies) > 0
    assert checked.measured.bytes == len(copies) * tiny_setting(SHARE).shape.expert_bytes_by_layer[0]
    assert checked.measured.hits == sum(len(plan.resident) for plan in session.plans().values()) > 0


def test_every_repeat_is_checked(bench: WatchedBench) -> None:
    setting, simulated = tiny_setting(SHARE), predicted("on-demand")
    sound, other = (run(bench, setting, policy).session for policy in ("on-demand", "naive-cpu"))
    kept = {
        session: (answers_of(session), replay(session.log, setting.with_policy("on-demand").session()) is None)
        for session in (sound, other)
    }
    held = [
        parity_of_repeats([kept[session] for session in repeats], answers_of(simulated)).held
        for repeats in ((sound, sound), (sound, other), (other, sound))
    ]
    assert held == [True, False, False]


def test_another_policys_log_is_not_taken_for_the_same(bench: WatchedBench) -> None:
    """The check can fail, in both its parts."""
    setting, other = tiny_setting(SHARE), predicted("naive-cpu")
    measured = run(bench, setting, "on-demand").session
    parity = compared(measured, other, setting, "naive-cpu")
    assert not parity.replay_identical
    assert not parity.logs_identical
    assert parity.timing_free
    assert not parity.held
