"""Kinds of programs: the ends of their numbers, and of what is asked of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.costs.engine import CountedEngine, engine_names, load_engine
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from trilane.study.kinds import ends_of

KINDS = ("eager", "eager-4bit", "eager-cpp", "fused", "native")
SHORT = Scenario(prompt_tokens=8, generated_tokens=4, cached_share=0.5)


def kind(name: str) -> CountedEngine:
    engine = load_engine(name)
    assert isinstance(engine, CountedEngine)
    return engine


def test_these_engines_are_kinds_and_no_others() -> None:
    assert {name for name in engine_names() if ends_of(SHORT.with_(engine=name))} == {*KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_every_number_of_a_kind_lies_between_its_ends(name: str) -> None:
    engine = kind(name)
    numbers = {key: each for key, each in engine.flat().items() if key.startswith("software.")}
    assert engine.spread.keys() == {key for key, each in numbers.items() if each.confidence == "low"}  # others: by code
    for key, (quick, slow) in engine.spread.items():
        assert 0 < min(quick, slow) <= engine.flat()[key].value <= max(quick, slow), key
        assert (quick > slow) == key.endswith("_share"), key  # more of a share is quicker, more of a time is slower
    assert engine.calibrated
    assert all(each.number in engine.spread for each in engine.calibrated)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("policy", ["on-demand", "fiddler"])
def test_the_time_lies_between_those_of_the_ends(name: str, policy: str) -> None:
    scenario = SHORT.with_(engine=name, policy=policy)
    ends = ends_of(scenario)
    assert ends is not None
    quick, middle, slow = (simulate(each).metrics.tpot_ms or 0 for each in (ends.quick, scenario, ends.slow))
    assert 0 < quick < middle < slow


def test_a_number_that_the_scenario_states_has_no_ends() -> None:
    ends = ends_of(SHORT.with_(engine="eager", engine_overrides={"software.layer_ns": 7}))
    assert ends is not None
    assert all(end.engine_overrides["software.layer_ns"] == 7 for end in ends)
    assert ends.quick.engine_overrides["software.copy_ns"] == kind("eager").spread["software.copy_ns"].quick
    known = dict.fromkeys(kind("eager").spread, 1.0)
    assert ends_of(SHORT.with_(engine="eager", engine_overrides=known)) is None


def test_an_empty_spread_leaves_none_of_the_kind_that_an_engine_is_like(tmp_path: Path) -> None:
    (file := tmp_path / "mine.yaml").write_text("like: eager\nabout: mine\nspread: {}\n")
    assert ends_of(SHORT.with_(engine=str(file))) is None
