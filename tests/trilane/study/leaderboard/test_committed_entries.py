"""The entries that come with the program: all of them, and what a simulation gives today."""

from __future__ import annotations

from pathlib import Path

from policies.registry import SYSTEMS
from trilane.study.leaderboard.entries import played, read_entries, write_entries
from trilane.study.leaderboard.settings import BoardSetting, all_settings

CHEAP = BoardSetting("laptop-8gb", "gpt-oss", 1)


def silent(*args: object) -> None:
    """Watches nothing."""


def test_every_policy_has_an_entry_in_every_setting() -> None:
    ours = [name for name, one in SYSTEMS.items() if one.parameters.__module__.startswith("policies.")]
    there = {(entry.setting, entry.policy) for entry in read_entries()}
    assert there == {(setting, policy) for setting in all_settings() for policy in ours}


def test_what_is_committed_is_what_is_played(tmp_path: Path) -> None:
    write_entries(played(CHEAP, ["llama.cpp", "pre-gated", "llama-cache-lru"], 1, silent), tmp_path / "e.csv")
    committed = {(entry.setting, entry.policy): entry for entry in read_entries()}
    for entry in read_entries(tmp_path / "e.csv"):
        assert committed[CHEAP, entry.policy] == entry
