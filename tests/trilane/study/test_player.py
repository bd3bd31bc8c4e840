"""Policies of the calling program and worker processes: those that the workers lack are refused before the work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policies.registry import SYSTEMS, register
from policies.system import ChoiceError
from sim.runs.scenario import Scenario
from tests.kit.commands import ROOT
from trilane.engines.question import Question
from trilane.fit.fit import fit
from trilane.study.ablate import ablate
from trilane.study.compare import compare
from trilane.study.player import LastPrepared

SHORT = Scenario(trace="mini-moe", model=None, prompt_tokens=4, generated_tokens=2, cached_share=0.25)
OFFLOADED = Question(
    model="qwen3-30b-a3b", gpu="rtx-4080", ram="ddr5-5600", ram_gb=64, prompt_tokens=16, generated=2, policies=("mine",)
)
STUDIES: dict[str, Callable[[int], object]] = {
    "compare": lambda jobs: compare(SHORT, ["mine", "on-demand"], draws=1, jobs=jobs),
    "ablate": lambda jobs: ablate(SHORT.with_(policy="mine"), draws=1, jobs=jobs),
}
SCRIPT = """
from dataclasses import dataclass
from policies.registry import register, system
from sim.runs.scenario import Scenario
from trilane.study.compare import compare
{imports}

@register("mine", "as on-demand")
@dataclass(frozen=True)
class Mine(system("on-demand").parameters):
    pass

if __name__ == "__main__":
    scenario = Scenario(trace="mini-moe", model=None, prompt_tokens=4, generated_tokens=2, cached_share=0.25)
    print(sorted(compare(scenario, {names}, draws=2, jobs=2).draws))
"""
IMPORTED = """
from dataclasses import dataclass
from policies.registry import register, system

@register("imported", "as on-demand")
@dataclass(frozen=True)
class Imported(system("on-demand").parameters):
    pass
"""


def test_points_of_one_setting_share_its_costs_and_have_parameters_of_their_own() -> None:
    last = LastPrepared()
    points = [SHORT.with_(policy="dali", parameters={"window": window}) for window in (2, 3)]
    prepared = [last.of(point) for point in points]
    assert [one.scenario for one in prepared] == points
    assert prepared[0].costs is prepared[1].costs
    assert last.of(points[0].with_(batch=2)).costs is not prepared[0].costs


@pytest.fixture
def _mine() -> Iterator[None]:
    """A policy that is registered in this process alone, as in a notebook."""
    before = dict(SYSTEMS)
    register("mine", "as on-demand")(type("Mine", (SYSTEMS["on-demand"].parameters,), {"__module__": "notebook"}))
    yield
    SYSTEMS.clear()
    SYSTEMS.update(before)


@pytest.mark.parametrize("study", STUDIES)
@pytest.mark.usefixtures("_mine")
def test_a_policy_of_this_process_alone_is_played_here(study: str) -> None:
    assert STUDIES[study](1)
    with pytest.raises(ChoiceError, match="'mine' is registered in this process alone, and jobs=2 runs in others"):
        STUDIES[study](2)


@pytest.mark.usefixtures("_mine")
def test_so_it_is_when_a_policy_is_chosen() -> None:
    with pytest.raises(ChoiceError, match="'mine' is registered in this process alone, and jobs=2 runs in others"):
        fit(OFFLOADED, jobs=2)


def test_workers_have_the_policies_of_a_script_and_of_what_it_imports(tmp_path: Path) -> None:
    (tmp_path / "own_module.py").write_text(IMPORTED)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(imports="import own_module", names=["mine", "imported", "on-demand"]))
    done = subprocess.run(
        [sys.executable, script], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert done.stdout == "['imported', 'mine', 'on-demand']\n", done.stderr


def test_workers_lack_those_of_a_program_without_a_file(tmp_path: Path) -> None:
    code = SCRIPT.format(imports="", names=["mine", "on-demand"])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert "'mine' is registered in this process alone" in done.stderr
