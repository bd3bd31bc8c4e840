"""The scenario that a command line asks about."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.runs.scenario import Scenario
from trilane.verbs.inputs import scenario_of

WRITTEN = Scenario(policy="dali", parameters={"window": 3}, batch=2)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "scenario.yaml"
    path.write_text("policy: dali\nparameters: {window: 3}\nbatch: 2\n")
    return str(path)


def test_the_file_or_the_default() -> None:
    assert scenario_of(None, None) == Scenario()


@pytest.mark.parametrize("policy", [None, "dali"])
def test_the_policy_of_the_file_keeps_its_parameters(file: str, policy: str | None) -> None:
    assert scenario_of(file, None, policy) == WRITTEN
    assert scenario_of(file, ["batch=4"], policy) == WRITTEN.with_(batch=4)


def test_another_policy_has_none_of_them(file: str) -> None:
    assert scenario_of(file, ["batch=4"], "fiddler") == Scenario(policy="fiddler", batch=4)


def test_parameters_of_set_belong_to_the_policy_of_the_scenario(file: str) -> None:
    assert scenario_of(file, ["parameters={window: 5}"], "dali").parameters == {"window": 5}
    assert scenario_of(file, ["parameters={window: 5}"], "fiddler").parameters == {}
