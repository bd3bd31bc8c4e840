"""A policy of the calling program's own: its code is part of what results are known by, and it never leaves home."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from policies.registry import SYSTEMS, register
from policies.system import ChoiceError, System
from policies.user_files import load_policies
from sim.runs.scenario import Scenario
from tests.kit.small_sweeps import SMALL
from trilane.study.sweep.axes import SweepError
from trilane.study.sweep.code_fingerprint import own_source
from trilane.study.sweep.grid import Grid, Point
from trilane.study.sweep.sweep import key_of, sweep

LOADED = """from dataclasses import dataclass
from trilane import register, system

@register("mine", "as another")
@dataclass(frozen=True)
class Mine(system("{parent}").parameters):
    pass
"""
CODE = """from dataclasses import replace
from policies.registry import SYSTEMS

class Mine(SYSTEMS["{parent}"].parameters):
    pass

MINE = replace(SYSTEMS["on-demand"], name="mine", parameters=Mine)
"""
GRID: dict[str, Any] = {"scenario": SMALL, "grid": {"policy": ["mine", "on-demand"]}, "clairvoyant": False}


pytestmark = pytest.mark.usefixtures("no_user_files")


def written(folder: Path, parent: str) -> System:
    """A policy in a file, imported anew."""
    path = folder / "own_of_sweeps.py"
    path.write_text(CODE.format(parent=parent))
    spec = util.spec_from_file_location("own_of_sweeps", path)
    assert spec
    assert spec.loader
    sys.modules["own_of_sweeps"] = module = util.module_from_spec(spec)
    exec(compile(path.read_text(), path, "exec"), module.__dict__)
    mine: System = module.MINE
    return mine


def key() -> str:
    return key_of(Point(Scenario.from_dict(SMALL).with_(policy="mine"), {}))


def test_an_edited_policy_is_played_anew(tmp_path: Path) -> None:
    keys, times = [], []
    for parent in ("on-demand", "naive-cpu"):
        SYSTEMS["mine"] = written(tmp_path, parent)
        keys.append(key())
        output = tmp_path / f"{parent}.parquet"
        frame = sweep(GRID, output)
        assert not frame["error"].any()
        times.append(frame["tpot_ms"][0])
    assert keys[0] != keys[1]
    assert times[0] != times[1]
    with pytest.raises(SweepError, match="1 of the results there belong to none of this grid's 2 points"):
        sweep(GRID, tmp_path / "on-demand.parquet")


def test_results_are_those_of_the_code_of_their_key(tmp_path: Path) -> None:
    """An edit counts once the file is loaded again; until then every process plays what was loaded."""
    path = tmp_path / "own_of_sweeps.py"
    keys, tables = [], []
    for parent in ("on-demand", "naive-cpu"):
        path.write_text(LOADED.format(parent=parent))
        load_policies(str(path))
        path.write_text(LOADED.format(parent="fiddler"))
        keys.append(key())
        tables += [sweep(GRID), sweep(GRID, jobs=2)]
        assert not tables[-1]["error"].any()
        assert set(tables[-1]["point"]) == set(tables[-2]["point"])
        assert key() in set(tables[-1]["point"])
    times = [table["tpot_ms"][0] for table in tables]
    assert keys[0] != keys[1]
    assert times[0] == times[1] != times[2] == times[3]


def test_ours_need_no_checksum_and_others_of_one_name_differ(tmp_path: Path) -> None:
    assert own_source("dali") is own_source("nobody") is None
    mine = written(tmp_path, "dali")
    made = [mine, *(replace(SYSTEMS[parent], name="mine") for parent in ("dali", "dali-ilp", "fiddler"))]
    found = []
    for SYSTEMS["mine"] in made:
        found.append(own_source("mine"))
    assert len(set(found)) == len(found) == 4


def test_one_in_place_of_ours_is_not_taken_for_it(tmp_path: Path) -> None:
    before = key_of(Point(Scenario(), {}))
    SYSTEMS["dali"] = replace(written(tmp_path, "dali"), name="dali")
    assert key_of(Point(Scenario(), {})) != before


def test_results_of_a_policy_without_a_file_are_not_kept(tmp_path: Path) -> None:
    """As in a notebook: its code may change without a trace."""
    mine = written(tmp_path, "fiddler")
    del sys.modules["own_of_sweeps"]
    register("mine", "without a file")(mine.parameters)
    with pytest.raises(SweepError, match=r"policy 'mine' is defined in no file .* sweep without an output"):
        sweep(GRID, tmp_path / "o.parquet")
    assert not list(tmp_path.glob("o.parquet*"))
    assert not sweep(GRID)["error"].any()


@pytest.mark.parametrize(("more", "says"), [
    ({"jobs": 2}, "and jobs=2 runs in others"), ({"dask": "tcp://x:9"}, "and a Dask cluster runs in others"),
])
@pytest.mark.parametrize("grid", [GRID, Grid(Scenario.from_dict({**SMALL, "policy": "on-demand"}), ({"batch": (1,)},))])
def test_others_do_not_know_it(tmp_path: Path, grid: Any, more: dict[str, Any], says: str) -> None:
    SYSTEMS["mine"] = SYSTEMS["on-demand"] = written(tmp_path, "on-demand")
    with pytest.raises(ChoiceError, match=f"is registered in this process alone, {says}; use jobs=1"):
        sweep(grid, **more)
