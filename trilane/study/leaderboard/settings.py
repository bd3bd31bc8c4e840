"""The settings of the leaderboard: machine classes x families of routing x batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sim.runs.scenario import Scenario
from trilane.common.errors import TrilaneError
from trilane.common.hints import Count
from trilane.common.schema import from_dict
from trilane.common.yaml_files import read_yaml
from trilane.engines.routing import synthetic_names

FORECASTS = ("gate@1", "gate@2", "gate@3", "residual@1", "quasi_hidden@1", "estimator@1", "partial@1")
# none of later tokens: synthetic routing has none, and no published recall of them is known, so that seqmoe cannot run


class LeaderboardError(TrilaneError):
    """A file of entries that cannot be read, or a setting that there is not."""


class MachineClass(NamedTuple):
    """A machine that stands for many."""

    about: str
    hardware: str


@dataclass(frozen=True)
class LeaderboardSettings:
    """The file ``settings.yaml``. ``families``: the model of each machine."""

    scenario: Mapping[str, Any]
    draws: Count
    batches: tuple[Count, ...]
    machines: Mapping[str, MachineClass]
    families: Mapping[str, Mapping[str, str]]


class BoardSetting(NamedTuple):
    """One column of the leaderboard."""

    machine: str
    family: str
    batch: int

    @property
    def name(self) -> str:
        """Machine, family and batch."""
        return f"{self.machine}, {self.family}, {self.batch}"

    def scenario(self) -> Scenario:
        """Of a policy that is still to be chosen; the trace has sequences for all draws."""
        settings = leaderboard_settings()
        model = settings.families[self.family][self.machine]
        common = settings.scenario
        lengths = self.batch * settings.draws, common["sampled_prompt_tokens"], common["sampled_steps"]
        trace, calibration = synthetic_names(model, lengths, FORECASTS, FORECASTS)
        return Scenario(
            trace=trace, model=model, batch=self.batch, hardware=settings.machines[self.machine].hardware,
            calibration=calibration, **common,
        )


@cache
def leaderboard_settings() -> LeaderboardSettings:
    """Those that come with the program."""
    path = Path(__file__).with_name("settings.yaml")
    return from_dict(LeaderboardSettings, read_yaml(path, LeaderboardError), path.name, LeaderboardError)


def all_settings() -> list[BoardSetting]:
    """The columns, machine by machine."""
    settings = leaderboard_settings()
    return [BoardSetting(machine, family, batch) for machine in settings.machines for family in settings.families
            for batch in settings.batches]
