"""The comparison with measured expert caches: its data, and that the page says what was played."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.cache_plays import changes_of, play_of, plays, settings
from benchmarks.expert_caches import PAGE, RESULTS, Row, page, right_way, rows
from policies.registry import SYSTEMS
from sim.costs.engine import load_engine


def test_each_measurement_is_played_and_has_a_source() -> None:
    known = {(machine, method) for machine, method, _ in plays()}
    for row in rows():
        assert row.source
        assert {(row.machine, row.method), (row.machine, row.over or row.method)} <= known
    assert known == {(row.machine, method) for row in rows() for method in (row.method, row.over) if method}


def test_caches_are_played_on_the_patched_engine_and_whole_layers_on_the_plain_one() -> None:
    scenarios = [each.scenario for _, _, each in plays()]
    engines = {(scenario.policy, load_engine(scenario.engine).cpu_in_turn) for scenario in scenarios}
    assert {policy for policy, _ in engines} <= set(SYSTEMS)
    assert all(in_turn == policy.startswith("llama-cache") for policy, in_turn in engines)


def test_engines_are_found_from_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_engine(play_of("v620", "cache-34").scenario.engine).name == "engine_vulkan_cache"


def test_ratios_follow_from_the_measured_speeds() -> None:
    speeds = {(row.machine, row.method): row.value for row in rows() if not row.over and row.quantity == "tokens_per_s"}
    pairs = [row for row in rows() if row.source == "from the rows above"]
    for row in pairs:
        assert row.value == pytest.approx(speeds[row.machine, row.method] / speeds[row.machine, row.over], abs=6e-4)
    assert len(pairs) == 16


def test_the_page_is_that_of_the_plays() -> None:
    made = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert page(made) == PAGE.read_text(encoding="utf-8")
    assert set(made["machine"]) >= {"cpu", "date"}


def test_an_experiment_on_prompts_has_no_hits() -> None:
    made = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines = [line for line in page(made).splitlines() if line.startswith("| prompts, copies")]
    assert lines == ["| prompts, copies at 10 GB/s | prompt-48 | prompt-34 | 0.906 |  |"]


def test_a_formula_is_not_measured() -> None:
    formula = [row for row in rows() if not row.measured]
    assert {row.method.partition("-")[0] for row in formula} == {"perfect"}
    assert len(formula) == 8


def test_a_ratio_of_plays() -> None:
    found = {"m": {"a": {"q": 3.0}, "b": {"q": 2.0}}}
    assert Row("m", "a", "b", "q", 1.4, "s").played(found) == 1.5
    assert Row("m", "a", "", "q", 1.4, "s").played(found) == 3.0
    assert right_way(1.4, 1.5)
    assert not right_way(1.4, 0.9)
    assert right_way(0.99, 1.01)
    assert not right_way(0.99, 1.04)


def test_experiments_are_of_methods_and_change_something() -> None:
    for machine, about in settings()["machines"].items():
        for given in about.get("experiments", ()):
            assert play_of(machine, given["method"], changes_of(given)) != play_of(machine, given["method"])
            assert given["over"] in about["methods"]
