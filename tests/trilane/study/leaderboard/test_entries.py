"""Entries: what is simulated for one, and the file that keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.registry import policy_names
from sim.simulate import simulate
from tests.kit.leaderboard_entries import some_entries
from trilane.study.leaderboard import entries as module
from trilane.study.leaderboard.entries import ENTRIES, Entry, add_entries, played, read_entries, write_entries
from trilane.study.leaderboard.settings import BoardSetting, LeaderboardError, all_settings, leaderboard_settings

CHEAP = BoardSetting("laptop-8gb", "gpt-oss", 1)


def silent(*args: object) -> None:
    """Watches nothing."""


@pytest.fixture(scope="module")
def cheap() -> list[Entry]:
    return played(CHEAP, ["llama.cpp", "pre-gated"], 1, silent)


def test_an_entry_is_the_mean_of_its_draws(cheap: list[Entry]) -> None:
    run = simulate(CHEAP.scenario().with_(policy="llama.cpp"))
    assert cheap[0].lowest == run.metrics.throughput_tokens_per_s  # static: the same in every draw
    assert cheap[0].tokens_per_s == pytest.approx(cheap[0].lowest)
    assert (cheap[0].hit_rate, cheap[0].copied_mib, cheap[0].reason) == (0.5, 0.0, "")


def test_what_is_committed_is_what_is_played(cheap: list[Entry], tmp_path: Path) -> None:
    write_entries(cheap, tmp_path / "e.csv")
    committed = {(entry.setting, entry.policy): entry for entry in read_entries()}
    for entry in read_entries(tmp_path / "e.csv"):
        assert committed[CHEAP, entry.policy] == entry


def test_every_policy_has_an_entry_in_every_setting() -> None:
    there = {(entry.setting, entry.policy) for entry in read_entries()}
    assert there == {(setting, policy) for setting in all_settings() for policy in policy_names()}


def test_the_file_keeps_entries_and_is_only_played_where_it_lacks_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[BoardSetting, list[str]]] = []

    def play(setting: BoardSetting, policies: list[str], jobs: int, watch: object) -> list[Entry]:
        asked.append((setting, policies))
        return [Entry(*setting, policy, "", None, None, None, None, None, "no") for policy in policies]

    monkeypatch.setattr(module, "played", play)
    path = tmp_path / "e.csv"
    write_entries(some_entries(), path)
    assert read_entries(path) == list(some_entries())
    found = add_entries(path, ["steady", "other"], 1, silent)
    assert asked[:4] == [(setting, ["other"]) for setting in all_settings()[:3]] + [
        (all_settings()[3], ["steady", "other"])
    ]
    assert read_entries(path) == found
    asked.clear()
    add_entries(path, ["steady", "other"], 1, silent)
    assert asked == []


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(LeaderboardError, match="expected the entries of a leaderboard"):
        read_entries(path)


def test_the_settings_are_four_machines_two_families_and_two_batches() -> None:
    settings = leaderboard_settings()
    assert len(all_settings()) == 4 * 2 * 2
    assert {setting.machine for setting in all_settings()} == set(settings.machines)
    assert all(set(models) == set(settings.machines) for models in settings.families.values())
    assert ENTRIES.is_file()
