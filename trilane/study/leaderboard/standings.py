"""The leaderboard: every policy in each of its settings, simulated, kept in a file, and ranked.

Settings are machine classes x families of routing x batches.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, Literal, NamedTuple

from policies.protocols import PolicyKind
from sim.runs.scenario import Scenario
from sim.runs.vocabulary import kind_of
from trilane.common.csv_files import read_csv, write_csv
from trilane.common.errors import TrilaneError
from trilane.common.hints import Count
from trilane.common.schema import from_dict
from trilane.common.units import MIB
from trilane.common.yaml_files import read_yaml
from trilane.engines.routing import synthetic_names
from trilane.study.player import Watch
from trilane.study.sweep.grid import Grid
from trilane.study.sweep.sweep import sweep

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
        """The scenario of a policy that is still to be chosen; the trace has sequences for all draws."""
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
    """The settings that come with the program."""
    path = Path(__file__).with_name("settings.yaml")
    return from_dict(LeaderboardSettings, read_yaml(path, LeaderboardError), path.name, LeaderboardError)


def all_settings() -> list[BoardSetting]:
    """The columns, machine by machine."""
    settings = leaderboard_settings()
    return [BoardSetting(machine, family, batch) for machine in settings.machines for family in settings.families
            for batch in settings.batches]


ENTRIES = Path(__file__).with_name("entries.csv")


class Entry(NamedTuple):
    """A policy in a setting: tokens a second of all sequences, as mean, lowest and highest of the draws; the share of
    the experts that were on the GPU when they were needed; MiB copied for a token. ``reason``: why it cannot run."""

    machine: str
    family: str
    batch: int
    policy: str
    kind: PolicyKind | Literal[""]
    tokens_per_s: float | None
    lowest: float | None
    highest: float | None
    hit_rate: float | None
    copied_mib: float | None
    reason: str

    @property
    def setting(self) -> BoardSetting:
        return BoardSetting(self.machine, self.family, self.batch)


def played(setting: BoardSetting, policies: Sequence[str], jobs: int, watch: Watch) -> list[Entry]:
    """Simulate policies in a setting. Raises ChoiceError for an unknown policy, and one that other processes lack."""
    grid = Grid(setting.scenario(), ({"policy": tuple(policies)},), leaderboard_settings().draws, clairvoyant=False)
    table = sweep(grid, jobs=jobs, watch=lambda now: watch(now._replace(what=setting.name)))
    by_policy = table.groupby("policy", sort=False)
    return [_entry(setting, str(policy), rows.to_dict("records")) for policy, rows in by_policy]


def _entry(setting: BoardSetting, policy: str, rows: Sequence[Mapping[Any, Any]]) -> Entry:
    reason = next((row["error"].partition(": ")[2] for row in rows if row["error"]), "")
    if reason:
        return Entry(*setting, policy, "", None, None, None, None, None, reason)
    speeds = [row["throughput_tokens_per_s"] for row in rows]
    hits = [row["decode_served_hit_rate"] for row in rows]
    return Entry(
        *setting, policy, kind_of(json.loads(rows[0]["labels"])), fmean(speeds), min(speeds), max(speeds),
        hit_rate=None if any(rate != rate for rate in hits) else fmean(hits),
        copied_mib=fmean(row["pcie_bytes_per_token"] for row in rows) / MIB, reason="",
    )


# --- the file ---------------------------------------------------------------------------------------------------------


def add_entries(path: Path, policies: Sequence[str], jobs: int, watch: Watch) -> list[Entry]:
    """Simulate what a file lacks, setting by setting, and keep each as it is done, so that an interrupted run can go
    on. Returns all entries of the file. Raises what ``read_entries`` and ``played`` raise."""
    entries = read_entries(path) if path.exists() else []
    for setting in all_settings():
        if missing := lacking(entries, setting, policies):
            entries = [*entries, *played(setting, missing, jobs, watch)]
            write_entries(entries, path)
    return entries


def with_played(entries: Sequence[Entry], policies: Sequence[str], jobs: int, watch: Watch) -> list[Entry]:
    """Entries, and those of policies that they lack, which are simulated and kept nowhere."""
    more = [entry for setting in all_settings() if (missing := lacking(entries, setting, policies))
            for entry in played(setting, missing, jobs, watch)]
    return [*entries, *more]


def lacking(entries: Collection[Entry], setting: BoardSetting, policies: Sequence[str]) -> list[str]:
    """The policies without an entry in a setting."""
    there = {entry.policy for entry in entries if entry.setting == setting}
    return [policy for policy in policies if policy not in there]


def read_entries(path: Path | None = None) -> list[Entry]:
    """The entries of a file; None: those that come with the program. Raises LeaderboardError."""
    path = path or ENTRIES
    if path == ENTRIES and not path.exists():
        raise LeaderboardError(
            "leaderboard: no entries come with this version; simulate them with `trilane leaderboard --play FILE.csv`"
        )
    return read_csv(
        Entry, path, "the entries of a leaderboard, as `trilane leaderboard --play` writes them", LeaderboardError
    )


def write_entries(entries: Sequence[Entry], path: Path) -> None:
    rows = ([f"{value:.5g}" if isinstance(value, float) else value for value in entry] for entry in entries)
    write_csv([Entry._fields, *rows], path)


TIE = 0.02  # (ours): two draws of one policy differ by 0.9 % in the median, by more than this in 3 of 10 entries


@dataclass(frozen=True)
class Standing:
    """A policy over all settings. ``entries`` by setting; ``relative``: its speed over that of the fastest policy that
    keeps the routing and does not know the future, where it runs."""

    policy: str
    kind: str
    entries: Mapping[BoardSetting, Entry]
    relative: Mapping[BoardSetting, float]

    @property
    def score(self) -> float | None:
        """Geometric mean over the settings in which it runs; None without any."""
        return geometric_mean(self.relative.values()) if self.relative else None

    @property
    def lowest(self) -> float | None:
        """In the setting that suits it least."""
        return min(self.relative.values(), default=None)

    @property
    def best_in(self) -> int:
        """Settings in which nothing that keeps the routing is faster by more than a tie."""
        return sum(value >= 1 - TIE for value in self.relative.values())


def standings(entries: Sequence[Entry]) -> list[Standing]:
    """The best score first; policies that do not run in all settings behind those that do."""
    fastest = {setting: _fastest(entries, setting) for setting in all_settings()}
    found = []
    for policy in dict.fromkeys(entry.policy for entry in entries):
        mine = {entry.setting: entry for entry in entries if entry.policy == policy}
        relative = {
            setting: entry.tokens_per_s / best
            for setting, entry in mine.items() if entry.tokens_per_s and (best := fastest.get(setting))
        }
        kind = next((entry.kind for entry in mine.values() if entry.kind), "")
        found.append(Standing(policy, kind, mine, relative))
    return sorted(found, key=lambda one: (-len(one.relative), -(one.score or 0.0), one.policy))


def _fastest(entries: Sequence[Entry], setting: BoardSetting) -> float | None:
    speeds = [entry.tokens_per_s for entry in entries
              if entry.setting == setting and entry.kind == PolicyKind.KEEPS and entry.tokens_per_s]
    return max(speeds, default=None)
