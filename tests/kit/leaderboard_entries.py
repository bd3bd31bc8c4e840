"""Entries of a leaderboard by hand: speeds of a policy in some settings."""

from __future__ import annotations

from collections.abc import Sequence

from policies.protocols import PolicyKind
from trilane.study.leaderboard.standings import Entry, all_settings


def entries_of(policy: str, *speeds: float | None, kind: PolicyKind = PolicyKind.KEEPS) -> list[Entry]:
    """In the first settings; None: it cannot run there."""
    return [
        Entry(*setting, policy, "", None, None, None, None, None, "too small") if speed is None else
        Entry(*setting, policy, kind, speed, 0.9 * speed, 1.1 * speed, 0.5, 12.0, "")
        for setting, speed in zip(all_settings(), speeds, strict=False)
    ]


def some_entries() -> Sequence[Entry]:
    """Three settings: steady is best in two, quick in one and refused in one; wild changes the routing."""
    return [
        *entries_of("steady", 10.0, 10.0, 8.0), *entries_of("quick", 5.0, None, 16.0),
        *entries_of("wild", 20.0, 20.0, 16.0, kind=PolicyKind.CHANGES), *entries_of("never", None, None, None),
    ]
