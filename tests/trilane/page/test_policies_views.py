"""Policies on the page: the numbers of ``trilane compare``, and a step whose parts are those of its spans."""

from __future__ import annotations

from typing import Any

import pytest

from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.commands import Trilane
from trilane.common.errors import TrilaneError
from trilane.page.policies_views import SETTINGS, policies_of, scenario_of
from trilane.page.view import records
from trilane.page.views import VIEWS
from trilane.study.step_replay import StepError, middle_step, replayed

SMALL = {"setting": "small", "share": "50"}
SCENARIO = scenario_of(SMALL)


def answers(view: str, **query: str) -> list[dict[str, Any]]:
    return list(records(VIEWS[view], {**SMALL, **query}))


def test_bars_are_the_numbers_of_compare(trilane: Trilane) -> None:
    changes = ("trace=mini-moe", "model=null", "generated_tokens=32", "cached_share=0.5")
    words = [word for change in changes for word in ("--set", change)]
    names = "on-demand,fiddler,oracle"
    record = trilane("compare", "--policies", names, "--draws", "1", "--jobs", "1", *words, "--json", "-").json
    shown = {row["policy"]: row for row in answers("policies", policies=names)[1:]}
    for row in record["runs"]:
        assert shown[row["policy"]]["tpot_ms"] == row["tpot_ms"]


def test_a_bar_is_the_sum_of_its_parts() -> None:
    for row in answers("policies", policies="on-demand,dali")[1:]:
        assert sum(part["ms"] for part in row["parts"]) == pytest.approx(row["tpot_ms"])


def test_a_policy_that_cannot_run_says_why() -> None:
    [_, row] = answers("policies", policies="fiddler", setting="gpt-oss-20b", share="95")
    assert row["kind"] == "cannot"
    assert "GB are missing" in row["reason"]


@pytest.mark.parametrize("name", ["mine.py", "../x.py:Mine", "nothing"])
def test_a_policy_is_never_a_file(name: str) -> None:
    with pytest.raises(TrilaneError, match="there is no policy"):
        policies_of({"policies": name}, ())


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_is_a_scenario(setting: str) -> None:
    assert isinstance(scenario_of({"setting": setting, "gpu": "rtx-3060", "ram": "ddr4-3200"}), Scenario)


# --- one step ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["on-demand", "mixtral-offloading", "fiddler", "dali"])
def run(request: pytest.FixtureRequest) -> Any:
    return simulate(SCENARIO.with_(policy=request.param))


def test_the_gpu_works_or_waits_at_any_time(run: Any) -> None:
    step = replayed(run, middle_step(run))
    busy = sum(span.end_ms - span.start_ms for span in step.spans if span.lane == "gpu")
    assert busy + sum(wait.end_ms - wait.start_ms for wait in step.waits) == pytest.approx(step.ms)


def test_an_expert_that_the_gpu_computes_is_held(run: Any) -> None:
    step = replayed(run, middle_step(run))
    computed = [span for span in step.spans if span.lane == "gpu" and span.kind == "expert"]
    assert computed
    for span in computed:
        held = set(step.held)
        for change in step.changes:
            if change.at_ms <= span.start_ms:
                place = (change.layer, change.expert)
                held = held | {place} if change.change == "held" else held - {place}
        assert (span.layer, span.expert) in held


def test_every_expert_of_the_step_is_counted_once(run: Any) -> None:
    step = replayed(run, middle_step(run))
    experts = [span for span in step.spans if span.kind in ("expert", "deferred")]
    on_gpu = sum(span.lane == "gpu" for span in experts)
    assert step.resident_hits + step.demand_loads >= on_gpu
    assert step.on_cpu == len(experts) - on_gpu


def test_a_step_that_is_not_there_is_refused(run: Any) -> None:
    with pytest.raises(StepError, match=r"^step: expected 0 to \d+, got 999$"):
        replayed(run, 999)


@pytest.mark.parametrize("view", ["timeline", "perfetto"])
def test_a_step_that_a_run_does_not_have_is_refused(view: str) -> None:
    _, *found = answers(view, step="999")
    assert [record["kind"] for record in found] == ["refused", "refused"]
    assert all(record["text"].startswith("step: expected 0 to") for record in found)


def test_two_policies_play_the_same_routing() -> None:
    _, one, other = answers("timeline", policies="on-demand,fiddler")
    used = [sorted({(span[6], span[4]) for span in step["spans"] if span[1] == "expert"}) for step in (one, other)]
    assert used[0] == used[1]
    assert one["step"] == other["step"]


def test_waits_say_for_what() -> None:
    _, step = answers("timeline", policies="on-demand")
    assert any("for the copy of expert" in wait[3] for wait in step["waits"])
