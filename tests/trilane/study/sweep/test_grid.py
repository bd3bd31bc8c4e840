"""A grid's points: which, in which order, each once; and what a sweep file may not say."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.registry import policy_names
from sim.runs.scenario import Scenario
from tests.kit.small_sweeps import SMALL
from trilane.study.draws import draws_of
from trilane.study.sweep.axes import SweepError
from trilane.study.sweep.grid import Grid, Point, canonical, points

ROOT = Path(__file__).parents[4]


def made(grid: Any, **more: Any) -> list[Point]:
    return points(Grid.from_dict({"scenario": SMALL, "grid": grid, "clairvoyant": False, **more}))


def said(found: list[Point], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(getattr(point.scenario, name) for name in names) for point in found]


def test_the_first_axis_is_the_slowest() -> None:
    found = made({"policy": ["fiddler", "dali"], "batch": [1, 2]})
    assert said(found, "policy", "batch") == [("fiddler", 1), ("fiddler", 2), ("dali", 1), ("dali", 2)]
    assert found[1].axes == {"policy": "fiddler", "batch": 2}
    assert found[1].scenario == Scenario.from_dict(SMALL).with_(policy="fiddler", batch=2)


def test_a_grid_without_axes_is_its_scenario() -> None:
    assert [point.scenario for point in made({})] == [Scenario.from_dict(SMALL)]
    assert [point.scenario for point in points(Grid(clairvoyant=False))] == [Scenario()]


def test_products_follow_each_other_and_a_point_of_both_is_there_once() -> None:
    found = made([{"batch": [1, 2]}, {"batch": [2, 4], "prompt_tokens": [4]}])
    assert said(found, "batch") == [(1,), (2,), (4,)]


def test_every_policy() -> None:
    assert said(made({"policy": "all"}), "policy") == [(name,) for name in policy_names()]


def test_the_clairvoyant_run_stands_beside_every_setting() -> None:
    beside = made({"policy": ["fiddler", "dali"], "batch": [1, 2]}, clairvoyant=True)
    assert said(beside, "policy", "batch")[4:] == [("oracle", 1), ("oracle", 2)]
    assert said(made({"batch": [1, 2]}, clairvoyant=True), "policy") == [("dali",), ("oracle",)] * 2
    assert len(made({"policy": ["oracle"]}, clairvoyant=True)) == 1


def test_a_parameter_applies_to_those_who_have_it_and_the_others_appear_once() -> None:
    found = made({"policy": ["fiddler", "dali"], "parameters.window": [2, 8]}, clairvoyant=True)
    assert said(found, "policy", "parameters") == [
        ("fiddler", {}), ("dali", {"window": 2}), ("dali", {"window": 8}), ("oracle", {}),
    ]
    assert "parameters.window" not in found[0].axes


def test_the_clairvoyant_run_keeps_its_own_parameters_unless_it_is_asked_for() -> None:
    beside = made({"policy": ["dali"], "parameters.prefetch": [0, 2]}, clairvoyant=True)
    assert said(beside, "policy", "parameters")[2:] == [("oracle", {})]
    asked = made({"policy": ["dali", "oracle"], "parameters.prefetch": [0, 2]}, clairvoyant=True)
    assert said(asked, "policy", "parameters")[2:] == [("oracle", {"prefetch": 0}), ("oracle", {"prefetch": 2})]


def test_parameters_as_an_axis_are_not_for_the_clairvoyant_run_that_nobody_asked_for() -> None:
    found = made({"parameters": [{"window": 2}, {"window": 8}]}, clairvoyant=True)
    assert said(found, "policy", "parameters") == [("dali", {"window": 2}), ("oracle", {}), ("dali", {"window": 8})]
    assert "parameters" not in found[1].axes


def test_a_whole_number_and_the_same_with_a_point_are_one_scenario() -> None:
    one, other = (made({}, scenario={**SMALL, "cached_share": share})[0] for share in (0, 0.0))
    assert canonical(one.scenario and one.scenario.to_dict()) == canonical(other.scenario and other.scenario.to_dict())


def test_machines_are_chosen_before_they_are_changed() -> None:
    """The dial stands first in the file, and still means the machine of the same point."""
    found = made({"pcie_gbps": [10], "hardware": ["rtx3090-ddr4", "a6000-i9-10980xe"], "link.d2h_bytes_per_s": [5e9]})
    overrides = [point.scenario.hardware_overrides for point in found if point.scenario]
    assert [each["link.h2d_bytes_per_s"] for each in overrides] == pytest.approx([10e9, 10e9])
    assert [each["link.d2h_bytes_per_s"] for each in overrides] == [5e9, 5e9]
    assert overrides[0]["link.theory_bytes_per_s"] != overrides[1]["link.theory_bytes_per_s"]


def test_draws_follow_each_other_and_are_the_same_for_every_policy() -> None:
    found = made({"policy": ["fiddler", "dali"]}, draws=3)
    assert [point.draw for point in found] == [0, 1, 2] * 2
    like = [(draw.seed, draw.sequences) for draw in draws_of(Scenario.from_dict(SMALL), 3)]
    assert said(found, "seed", "sequences") == like * 2


def test_what_makes_no_scenario_is_a_point_with_a_problem() -> None:
    both, machine = made([{"cached_share": [0.5], "gpu_memory_gb": [8]}, {"hardware": ["none"], "pcie_gbps": [8]}])
    assert both == Point(
        None, {"cached_share": 0.5, "gpu_memory_gb": 8},
        problem="ScenarioError: give gpu_memory_gb or cached_share, not both", base=Scenario.from_dict(SMALL),
    )
    assert machine.scenario is None
    assert machine.problem.startswith("HardwareError: no hardware preset or file 'none'")


def test_what_cannot_be_drawn_is_one_point_that_will_say_why() -> None:
    [point] = made({"trace": ["nowhere.safetensors"]}, draws=4)
    assert point.scenario is not None


@settings(max_examples=40)
@given(
    axes=st.lists(
        st.fixed_dictionaries({}, optional={
            "policy": st.lists(st.sampled_from(["dali", "fiddler", "oracle"]), min_size=1),
            "batch": st.lists(st.integers(1, 3), min_size=1),
            "parameters.window": st.lists(st.integers(1, 3), min_size=1),
            "host.sync_ns": st.lists(st.sampled_from([1000, 2000]), min_size=1),
        }),
        min_size=1, max_size=3,
    ),
    clairvoyant=st.booleans(),
)
def test_every_combination_is_a_point_and_no_two_are_the_same(
    axes: list[dict[str, list[Any]]], clairvoyant: bool
) -> None:
    found = made(axes, clairvoyant=clairvoyant)
    texts = [canonical(point.scenario.to_dict()) for point in found if point.scenario]
    assert len(texts) == len(set(texts)) == len(found)
    for each in axes:
        for combination in product(*each.values()):
            asked = dict(zip(each, combination, strict=True))
            values = {"policy": "dali", "batch": 1, "parameters.window": None, **asked}
            window = values["parameters.window"] if values["policy"] == "dali" else None
            assert (values["policy"], values["batch"], window) in [
                (point.scenario.policy, point.scenario.batch, point.scenario.parameters.get("window"))
                for point in found
                if point.scenario
            ]


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_example_is_read() -> None:
    grid = Grid.from_yaml(ROOT / "examples" / "sweep.yaml")
    assert len(points(grid)) == 72
    assert grid.names == ["policy", "cached_share", "pcie_gbps"]


@pytest.mark.parametrize(("text", "says"), [
    ("grids: {}", "f.yaml: there is no key 'grids'; did you mean 'grid'? Choose from scenario, grid, draws"),
    ("scenario: {bath: 1}", "f.yaml: scenario: there is no key 'bath'; did you mean 'batch'? Choose from batch"),
    ("scenario: {policy: dalli}", "f.yaml: policy: there is no policy 'dalli'; did you mean 'dali'?"),
    ("scenario: 3", "f.yaml: scenario: expected a mapping"),
    ("grid: {bath: 1}", "f.yaml: grid: there is no axis 'bath'; did you mean 'batch'?"),
    ("grid: {batch: [1, x]}", "f.yaml: batch: expected a whole number >= 1, got 'x'"),
    ("grid: {batch: [0]}", "f.yaml: batch"),
    ("grid: {batch: []}", "f.yaml: grid: batch: expected one value or more"),
    ("grid: 3", "f.yaml: grid: expected a mapping"),
    ("grid: {policy: [dalli]}", "f.yaml: policy: there is no policy 'dalli'; did you mean 'dali'?"),
    ("grid: {policy: [{dali: {windo: 1}}]}", "f.yaml: policy: policy 'dali': there is no key 'windo'"),
    ("grid: {parameters.nobody: [1]}", "f.yaml: grid: there is no policy with the parameter 'nobody'"),
    ("grid: {pcie: 3x16, pcie_gbps: 8}", "f.yaml: pcie and pcie_gbps set the same number of the machine"),
    (
        "grid: {pcie_gbps: 10..100/2000, dram_gbps: 10..60/2000}",
        "f.yaml: the axes have 4,000,000 combinations, expected 1,000,000 at most",
    ),
    ("draws: 2000000", "f.yaml: draws: expected a whole number from 1 to 10000, got 2000000"),
    ("draws: 0", "f.yaml: draws: expected a whole number from 1 to 10000, got 0"),
    ("draws: true", "f.yaml: draws: expected a whole number"),
    ("clairvoyant: 1", "f.yaml: clairvoyant: expected true or false, got 1"),
    ("[]", "f.yaml: expected a mapping with the keys scenario, grid, draws, clairvoyant, got []"),
    ("draws: 1\ndraws: 2", "f.yaml: not plain YAML in line 2: duplicate key 'draws'"),
])
def test_what_a_file_may_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.yaml").write_text(text)
    with pytest.raises(SweepError, match=f"^{re.escape(says)}"):
        Grid.from_yaml("f.yaml")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(SweepError, match=r"none\.yaml: No such file"):
        Grid.from_yaml("none.yaml")
