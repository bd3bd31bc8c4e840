"""How far a scenario is handed on between the command line and the engine: the files that its reader has to open."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from sim.runs.prepare import Prepared
from sim.runs.scenario import Scenario
from sim.timeline.timeline import Timeline
from tests.kit.commands import Trilane

ROOT = Path(__file__).parents[2]
MOST_FILES = 10
SHORT = ("--set", "prompt_tokens=4", "--set", "generated_tokens=2", "--json", "-")


@contextmanager
def files_that_are_given(*kinds: type) -> Iterator[set[str]]:
    """Files with a function that is called with an object of one of ``kinds``, until the engine runs."""
    given: set[str] = set()

    def called(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(ROOT)):
            return
        if code is Timeline.run.__code__:
            sys.setprofile(None)
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(isinstance(frame.f_locals.get(name), kinds) for name in names):
            given.add(str(Path(code.co_filename).relative_to(ROOT)))

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        yield given
    finally:
        sys.setprofile(before)


def test_a_scenario_is_handed_to_few_files_before_the_engine_runs(trilane: Trilane) -> None:
    with files_that_are_given(Scenario, Prepared) as found:
        assert trilane("simulate", *SHORT).status == 0
    assert {"trilane/verbs/inputs.py", "sim/simulate.py", "sim/runs/prepare.py"} < found
    assert "trilane/output/pages/run.py" not in found, "after the run"
    assert len(found) <= MOST_FILES, sorted(found)
