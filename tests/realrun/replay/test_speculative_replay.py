"""Steps that verify drafts on real lanes: the same as in the simulator; what is not played is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from realrun.errors import RefusedError
from realrun.execution.call_log import replay
from realrun.generation.generate import GenerateRequest
from realrun.replay.measure import room_for
from sim.costs.engine_costs import costs_on
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from sim.simulate import play
from tests.kit.tiny_bench import bench_for, check_outputs, machine, tiny_setting
from tests.realrun.execution.test_laws_on_lanes import check_laws
from trilane.study.validation.parity import answers_of, parity_of

pytestmark = pytest.mark.timeout(120)
FREE: dict[str, Any] = {"draft_tokens": 2, "draft_acceptance": (0.7, 0.5), "draft_layers": 0.0}


def drafted(policy: str, **drafts: Any) -> Prepared:
    """An answer of 12 tokens on the tiny model."""
    tiny = tiny_setting(0.3)
    scenario = tiny.scenario.with_(**{**FREE, **drafts}, generated_tokens=12, policy=policy)
    found = prepare(scenario, tiny.trace)
    costs = costs_on(tiny.hardware, tiny.shape, found.costs.max_tokens)
    return replace(found, shape=tiny.shape, costs=replace(costs, draft=found.costs.draft))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("policy", ["on-demand", "fiddler", "daop"])
def test_the_executor_plays_the_steps_of_the_simulator(policy: str, again: bool) -> None:
    setting = drafted(policy, draft_again=again)
    with machine() as lanes:
        bench = bench_for(lanes, [setting])
        measured = bench.measure(setting)
        check_outputs(bench)
    check_laws(measured, batch=1)
    simulated = setting.session_of(type(measured.session))
    run = play(setting, simulated)
    for name in ("steps", "decode_steps", "tokens_per_step", "decode_served_hit_rate"):
        assert getattr(measured.run.metrics, name) == getattr(run.metrics, name)
    assert run.metrics.tokens_per_step > 1 - again
    replayed = replay(measured.session.log, setting.session()) is None
    found = parity_of(answers_of(measured.session), replayed, answers_of(simulated))
    assert found.replay_identical
    assert found.logs_identical or policy != "on-demand"


@pytest.mark.parametrize("drafts", [{"draft_layers": 1.0}, {"draft_ns": 5}])
def test_drafting_itself_is_refused(drafts: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match="set draft_layers to 0, and draft_ns to null"):
        room_for([drafted("on-demand", **drafts)])


def test_no_model_drafts_while_it_generates() -> None:
    request = GenerateRequest("x", ("a",), Scenario(**FREE))
    with pytest.raises(RefusedError, match="generate: expected draft_tokens 0"):
        request.check()
