"""Entries of the leaderboard: a policy in a setting, simulated; and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from policies.protocols import PolicyKind
from sim.runs.vocabulary import kind_of
from trilane.common.csv_files import read_csv, write_csv
from trilane.common.units import MIB
from trilane.study.leaderboard.settings import BoardSetting, LeaderboardError, all_settings, leaderboard_settings
from trilane.study.player import Watch
from trilane.study.sweep.grid import Grid
from trilane.study.sweep.sweep import sweep

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
