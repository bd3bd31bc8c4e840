"""A sweep keeps what is done: in whatever order rows come, wherever it is interrupted, the table is the same."""
from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.machine.hardware import load_hardware
from sim.runs.scenario import Scenario
from sim.simulate import simulate
from tests.kit.depth import examples
from tests.kit.small_sweeps import GRID, SMALL, keep, kept_points
from tests.kit.toys import toy_trace
from traces.file import write_trace
from trilane.study import player as player_file
from trilane.study.player import Progress
from trilane.study.sweep import sweep as sweep_file
from trilane.study.sweep.axes import SweepError
from trilane.study.sweep.grid import Grid, Point, points
from trilane.study.sweep.sweep import Player, PointTask, Row, key_of, played_rows, sweep
from trilane.study.sweep.table import COLUMNS, read_results


class Whole:
    """An undisturbed sweep: its bytes, and its rows in the order of points."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "whole.parquet"
        self.frame = sweep(GRID, self.path)
        self.bytes = self.path.read_bytes()
        self.rows: list[Row] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sweep_file, "played_rows", self._noting)
            sweep(GRID)

    def _noting(self, tasks: Sequence[PointTask], jobs: int, dask: str | None) -> Iterator[Row]:
        for row in played_rows(tasks):
            self.rows.append(row)
            yield row


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(tmp_path_factory.mktemp("whole"))


def test_rows_stand_in_the_order_of_points_and_are_those_of_the_runs(whole: Whole) -> None:
    frame = whole.frame
    assert len(frame) == 16
    assert list(frame["policy"]) == [p for p in ("fiddler", "dali", "on-demand", "oracle") for _ in range(4)]
    assert list(frame["cached_share"][:4]) == [0.25, 0.25, 0.5, 0.5]
    assert list(frame["batch"][:4]) == [1, 2, 1, 2]
    for row in frame.to_dict("records"):
        asked = {name: row[name] for name in ("policy", "cached_share", "batch")}
        assert row["tpot_ms"] == simulate(Scenario.from_dict({**SMALL, **asked})).metrics.tpot_ms
    pd.testing.assert_frame_equal(read_results(whole.path), frame)
    assert [path.name for path in whole.path.parent.iterdir()] == ["whole.parquet"]


def test_processes_give_the_same_bytes(whole: Whole, tmp_path: Path) -> None:
    sweep(GRID, tmp_path / "o.parquet", jobs=2)
    assert (tmp_path / "o.parquet").read_bytes() == whole.bytes


def test_a_grid_may_be_a_file_a_mapping_or_itself(whole: Whole, tmp_path: Path) -> None:
    path = tmp_path / "g.yaml"
    path.write_text(json.dumps(GRID))
    for grid in (path, str(path), Grid.from_dict(GRID)):
        pd.testing.assert_frame_equal(sweep(grid), whole.frame)


@settings(max_examples=examples(8))
@given(data=st.data())
def test_any_order_of_finishing_gives_the_same_table(
    data: st.DataObject, whole: Whole, tmp_path_factory: pytest.TempPathFactory
) -> None:
    order = data.draw(st.permutations(whole.rows))
    output = tmp_path_factory.mktemp("order") / "o.parquet"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_file, "played_rows", lambda tasks, jobs, dask: (row for row in order))
        sweep(GRID, output)
    assert output.read_bytes() == whole.bytes


@settings(max_examples=examples(8))
@given(data=st.data())
def test_any_rows_that_were_kept_are_not_played_again_and_the_whole_is_the_same(
    data: st.DataObject, whole: Whole, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Killed after any of the rows, in any order."""
    order = data.draw(st.permutations(whole.rows))
    kept = data.draw(st.integers(0, len(order)))
    output = tmp_path_factory.mktemp("resumed") / "o.parquet"
    keep(output, order[:kept])
    played: list[str] = []

    def play(tasks: Sequence[PointTask], jobs: int, dask: str | None) -> Iterator[Row]:
        played.extend(task.key for task in tasks)
        return (row for row in whole.rows if row["point"] in played)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep_file, "played_rows", play)
        sweep(GRID, output)
    assert sorted(played) == sorted(row["point"] for row in order[kept:])
    assert output.read_bytes() == whole.bytes
    assert [path.name for path in output.parent.iterdir()] == ["o.parquet"]


def refuse_to_play(patch: pytest.MonkeyPatch) -> None:
    def play(tasks: Sequence[PointTask], jobs: int, dask: str | None) -> Iterator[Row]:
        assert not tasks
        yield from ()

    patch.setattr(sweep_file, "played_rows", play)


def test_a_finished_sweep_plays_nothing_and_a_larger_grid_only_what_is_new(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "o.parquet"
    output.write_bytes(whole.bytes)
    played: list[PointTask] = []
    monkeypatch.setattr(sweep_file, "played_rows", lambda tasks, *how: played.extend(tasks) or played_rows(tasks))
    sweep(GRID, output)
    assert played == []
    assert output.read_bytes() == whole.bytes
    larger = {**GRID, "grid": {**GRID["grid"], "batch": [1, 2, 3]}}
    frame = sweep(larger, output)
    assert [task.point.axes["batch"] for task in played] == [3] * 8
    monkeypatch.undo()
    sweep(larger, tmp_path / "fresh.parquet")
    assert output.read_bytes() == (tmp_path / "fresh.parquet").read_bytes()
    assert len(frame) == 24


def test_killed_between_the_table_and_the_journals_end(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "o.parquet"
    output.write_bytes(whole.bytes)
    keep(output, whole.rows)
    refuse_to_play(monkeypatch)
    sweep(GRID, output)
    assert output.read_bytes() == whole.bytes
    assert not (tmp_path / "o.parquet.journal").exists()


# --- errors -----------------------------------------------------------------------------------------------------------


def test_points_that_fail_are_rows_and_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = {"scenario": SMALL, "grid": {"batch": [1, 999]}, "clairvoyant": False}
    output = tmp_path / "o.parquet"
    frame = sweep(grid, output)
    assert frame["error"][0] == ""
    assert frame["error"][1].startswith("BatchError: ")
    assert pd.isna(frame["tpot_ms"][1])
    before = output.read_bytes()
    played: list[Any] = []
    monkeypatch.setattr(sweep_file, "played_rows", lambda tasks, *how: played.extend(tasks) or played_rows(tasks))
    sweep(grid, output)
    assert played == []
    sweep(grid, output, retry_errors=True)
    assert [task.point.axes["batch"] for task in played] == [999]
    assert output.read_bytes() == before


def test_errors_of_points_that_the_grid_lacks_are_no_loss(tmp_path: Path) -> None:
    output = tmp_path / "o.parquet"
    sweep({"scenario": SMALL, "grid": {"batch": [1, 999]}}, output)
    assert list(sweep({"scenario": SMALL, "grid": {"batch": [1, 2]}}, output)["error"]) == [""] * 4


@pytest.mark.parametrize("where", ["o.parquet", "o.parquet.journal"])
def test_results_that_the_grid_lacks_are_never_lost(whole: Whole, tmp_path: Path, where: str) -> None:
    if where == "o.parquet":
        (tmp_path / where).write_bytes(whole.bytes)
    else:
        keep(tmp_path / "o.parquet", whole.rows)
    content = (tmp_path / where).read_bytes()
    smaller = {**GRID, "grid": {**GRID["grid"], "batch": [1]}}
    with pytest.raises(SweepError, match=r"o\.parquet: 8 of the results there belong to none of this grid's 8 points"):
        sweep(smaller, tmp_path / "o.parquet")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(where, content)]


def test_an_output_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "o.parquet"
    output.write_text("mine")
    with pytest.raises(SweepError, match="this is not Parquet"):
        sweep(GRID, output)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("o.parquet", "mine")]


@pytest.mark.parametrize(("output", "more", "says"), [
    ("o.csv", {}, "expected the name of a Parquet file"),
    ("no/o.parquet", {}, "the folder .*no does not exist"),
    ("folder.parquet", {}, "this is something else"),
    ("o.parquet", {"jobs": 0}, "jobs: expected a whole number >= 1, got 0"),
])
def test_what_cannot_be_written_is_found_out_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, more: dict[str, Any], says: str
) -> None:
    (tmp_path / "folder.parquet").mkdir()
    refuse_to_play(monkeypatch)
    with pytest.raises(SweepError, match=says):
        sweep(GRID, tmp_path / output, **more)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.parquet"]


# --- watching, and being interrupted ----------------------------------------------------------------------------------


def test_watchers_hear_of_every_row_after_it_is_kept(tmp_path: Path) -> None:
    heard: list[tuple[Progress, int]] = []
    path = tmp_path / "o.parquet.journal"
    grid = {"scenario": SMALL, "grid": {"batch": [1, 2, 999]}, "clairvoyant": False}
    sweep(grid, path.with_suffix(""), watch=lambda now: heard.append((now, len(kept_points(path)))))
    assert heard == [(Progress(3, 1, 0, 0), 1), (Progress(3, 2, 0, 0), 2), (Progress(3, 3, 0, 1), 3)]


@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupt_keeps_what_is_done_and_the_rest_follows(whole: Whole, tmp_path: Path, jobs: int) -> None:
    output = tmp_path / "o.parquet"

    def interrupt(now: Progress) -> None:
        if now.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(GRID, output, jobs=jobs, watch=interrupt)
    assert not output.exists()
    heard: list[Progress] = []
    sweep(GRID, output, watch=heard.append)
    assert (heard[0], heard[-1]) == (Progress(16, 4, 3, 0), Progress(16, 16, 3, 0))
    assert output.read_bytes() == whole.bytes


# --- one point --------------------------------------------------------------------------------------------------------


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

    monkeypatch.setattr(sweep_file, "play", broken)
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
        "engine_overrides": {"software.layer_ns": 1},
    }
    points += [at(SCENARIO.with_(**{name: value})) for name, value in changes.items() if name != "gpu_memory_gb"]
    points += [at(SCENARIO.with_(cached_share=None, gpu_memory_gb=8.0)), Point(None, {"batch": 0}, problem="x")]
    keys = {key_of(point) for point in points}
    assert len(keys) == len(points)
    assert keys == {key_of(point) for point in points}


def test_other_code_plays_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key_of(at(SCENARIO))
    monkeypatch.setattr(sweep_file, "code_fingerprint", lambda: "other")
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
