"""One point: what it is known by, and a row whatever happens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sim.machine.hardware import load_hardware
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.small_sweeps import SMALL
from tests.kit.toys import toy_trace
from traces.file import write_trace
from trilane.study import player as player_file
from trilane.study.sweep import point as point_file
from trilane.study.sweep.grid import Grid, Point, points
from trilane.study.sweep.point import Player, key_of
from trilane.study.sweep.table import COLUMNS

SCENARIO = Scenario.from_dict({**SMALL, "cached_share": 0.25})


def at(scenario: Scenario, draw: int = 0) -> Point:
    return Point(scenario, {}, draw)


def test_a_row_is_the_run_and_its_resolved_scenario() -> None:
    row, run = Player().row(at(SCENARIO, 3)), simulate(SCENARIO)
    numbers = {name: value for name, value in run.to_dict().items() if name not in ("labels", "parameters")}
    assert {name: row[name] for name in numbers} == numbers
    for name, value in run.scenario.to_dict().items():
        assert (json.loads(row[name]) if isinstance(value, list | dict) else row[name]) == value
    assert list(row) == ["point", *COLUMNS]
    assert row["point"] == key_of(at(SCENARIO, 3))
    assert (row["draw"], row["error"], row["labels"]) == (3, "", "[]")
    assert row["trace_checksum"] == run.trace_checksum
    assert row["cache_share"] == pytest.approx(0.25, abs=0.01)
    assert json.loads(json.dumps(row)) == row


def test_a_point_that_cannot_be_played_is_a_row_with_its_error() -> None:
    row = Player().row(at(SCENARIO.with_(trace="nowhere")))
    assert row["error"].startswith("TraceError: no file 'nowhere'")
    assert (row["trace"], row["policy"], row["tpot_ms"], row["trace_checksum"]) == ("nowhere", "dali", None, "")
    assert list(row) == ["point", *COLUMNS]


def test_one_that_makes_no_scenario_says_why() -> None:
    row = Player().row(Point(None, {"policy": "dali", "pcie_gbps": -1}, problem="SweepError: above 0"))
    assert (row["error"], row["policy"], row["batch"]) == ("SweepError: above 0", "dali", None)


SECRET = "hunter2"
NO_MACHINES = (
    SECRET, f"{SECRET}: 1", f"name: {SECRET}", f"- {SECRET}", f"[{SECRET}", f"gpu: {SECRET}",
    f"{SECRET}: 1\n{SECRET}: 2",
    f"name: x\ngpu: {{memory_bytes: {{value: {SECRET}, source: x}}}}", f"!{SECRET}", f"*{SECRET}", f"\t{SECRET}",
)


@pytest.mark.parametrize("content", NO_MACHINES)
@pytest.mark.parametrize("key", ["hardware", "trace", "calibration"])
def test_a_row_quotes_no_file_that_it_names(tmp_path: Path, content: str, key: str) -> None:
    """It may be any file of this user, and tables are given to others."""
    (tmp_path / "mine").write_text(content)
    name = str(tmp_path / "mine")
    for axes in ({key: (name,)}, {key: (name,), "pcie_gbps": (8,)}):
        [point] = points(Grid(Scenario.from_dict(SMALL), (axes,), clairvoyant=False))
        error = Player().row(point)["error"]
        verb = "hardware" if key == "hardware" else "trace info"
        assert error.endswith(f"Error: {name}: the file cannot be used; `trilane {verb} {name}` says why")
        assert SECRET not in json.dumps(Player().row(point))


def test_one_that_makes_no_scenario_has_what_was_asked_and_the_rest_of_its_grid() -> None:
    """So that whoever filters by policy or machine counts it too."""
    grid = {"policy": {"dali": {"window": 8}}, "parameters.prefetch": 2, "cached_share": 0.5, "gpu_memory_gb": 8}
    [point] = points(Grid.from_dict({"scenario": {**SMALL, "batch": 2}, "grid": grid, "clairvoyant": False}))
    row = Player().row(point)
    assert row["error"] == "ScenarioError: give gpu_memory_gb or cached_share, not both"
    names = ("policy", "parameters", "trace", "model", "hardware", "batch", "cached_share", "gpu_memory_gb")
    assert {name: row[name] for name in names} == {
        "policy": "dali", "parameters": '{"prefetch":2,"window":8}', "trace": "mini-moe", "model": None,
        "hardware": "rtx3090-ddr4", "batch": 2, "cached_share": 0.5, "gpu_memory_gb": 8,
    }
    assert key_of(point) != key_of(replace(point, base=Scenario.from_dict(SMALL)))


def test_whatever_is_raised_is_the_points_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("lost\n  and found")

    monkeypatch.setattr(point_file, "play", broken)
    assert Player().row(at(SCENARIO))["error"] == r"KeyError: 'lost\n and found'"


def test_points_of_one_setting_share_it_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Scenario] = []
    real = player_file.prepare
    monkeypatch.setattr(player_file, "prepare", lambda scenario: made.append(scenario) or real(scenario))
    player = Player()
    names = ("dali", "fiddler", "oracle")
    played = [SCENARIO.with_(batch=batch, policy=policy) for batch in (1, 2) for policy in names]
    rows = [player.row(at(scenario)) for scenario in played]
    assert [scenario.batch for scenario in made] == [1, 2]
    assert rows == [Player().row(at(scenario)) for scenario in played]


# --- the key ----------------------------------------------------------------------------------------------------------


def test_every_part_of_a_scenario_and_the_draw_are_in_the_key() -> None:
    points = [at(SCENARIO), at(SCENARIO, 1)]
    changes: dict[str, Any] = {
        "policy": "fiddler", "parameters": {"window": 2}, "batch": 2, "seed": 1, "prompt_tokens": 3,
        "hardware_overrides": {"host.sync_ns": 1}, "hardware": "rtx4090-ddr5", "gpu_memory_gb": None, "sequences": (0,),
    }
    points += [at(SCENARIO.with_(**{name: value})) for name, value in changes.items() if name != "gpu_memory_gb"]
    points += [at(SCENARIO.with_(cached_share=None, gpu_memory_gb=8.0)), Point(None, {"batch": 0}, problem="x")]
    keys = {key_of(point) for point in points}
    assert len(keys) == len(points)
    assert keys == {key_of(point) for point in points}


def test_other_code_plays_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(at(SCENARIO))
    monkeypatch.setattr(point_file, "code_fingerprint", lambda: "other")
    assert key_of(at(SCENARIO)) != before


def test_a_changed_file_is_another_point(tmp_path: Path) -> None:
    trace, machine = tmp_path / "t.safetensors", tmp_path / "m.yaml"
    document = load_hardware("rtx3090-ddr4").document()
    keys = []
    for experts, sync in ((2, 1000), (4, 1000), (4, 2000)):
        write_trace(toy_trace([[[0]], [[1]], [[0]]], prompt_tokens=1, experts=experts), trace)
        document["host"]["sync_ns"]["value"] = sync
        machine.write_text(yaml.safe_dump(document))
        keys.append(key_of(at(Scenario(trace=str(trace), model=None, hardware=str(machine)))))
    assert len(set(keys)) == 3


def test_a_file_that_changes_while_the_sweep_runs_spoils_no_row(tmp_path: Path) -> None:
    trace = tmp_path / "t.safetensors"
    write_trace(toy_trace([[[0]], [[1]], [[0]]], prompt_tokens=1, experts=2), trace)
    point = at(Scenario(trace=str(trace), model=None, policy="on-demand"))
    key = key_of(point)
    assert Player().row(point, key)["error"] == ""
    write_trace(toy_trace([[[1]], [[1]], [[0]]], prompt_tokens=1, experts=2), trace)
    assert "are not those that the sweep started with" in Player().row(point, key)["error"]
