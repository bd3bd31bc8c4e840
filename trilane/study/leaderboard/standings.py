"""Standings: each policy's speed over that of the fastest which keeps the routing, setting by setting and over all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from policies.protocols import PolicyKind
from trilane.study.leaderboard.entries import Entry
from trilane.study.leaderboard.settings import BoardSetting, all_settings

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
