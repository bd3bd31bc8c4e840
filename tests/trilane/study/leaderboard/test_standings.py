"""The leaderboard: standings by hand, entries that are added, and those that come with the program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from policies.protocols import PolicyKind
from policies.registry import SYSTEMS
from sim.simulate import simulate
from tests.kit.results import entries_of, some_entries
from trilane.study.leaderboard import standings as module
from trilane.study.leaderboard.standings import (
    BoardSetting,
    Entry,
    LeaderboardError,
    LeaderboardSettings,
    MachineClass,
    add_entries,
    all_settings,
    lacking,
    played,
    read_entries,
    standings,
    write_entries,
)


def test_speeds_are_compared_with_the_fastest_that_keeps_the_routing() -> None:
    found = {one.policy: one for one in standings(some_entries())}
    assert list(found["steady"].relative.values()) == [1.0, 1.0, 0.5]
    assert list(found["quick"].relative.values()) == [0.5, 1.0]
    assert list(found["wild"].relative.values()) == [2.0, 2.0, 1.0]
    assert found["steady"].score == pytest.approx(0.5 ** (1 / 3))
    assert (found["steady"].lowest, found["steady"].best_in) == (0.5, 2)
    assert (found["never"].score, found["never"].lowest, found["never"].best_in) == (None, None, 0)


def test_those_that_run_everywhere_come_first() -> None:
    assert [one.policy for one in standings(some_entries())] == ["wild", "steady", "quick", "never"]


def test_a_tie_is_best_as_well() -> None:
    found = {one.policy: one for one in standings([*entries_of("a", 100.0), *entries_of("b", 98.5)])}
    assert (found["a"].best_in, found["b"].best_in) == (1, 1)


COMMON: Mapping[str, Any] = MappingProxyType(
    {"engine": "graphs", "prompt_tokens": 16, "generated_tokens": 8, "sampled_prompt_tokens": 4, "sampled_steps": 4}
)
TINY = LeaderboardSettings(
    COMMON, 1, (1,), {"small": MachineClass("small", "gtx-1650-super+ddr4-3200")},
    {"mixtral": {"small": "mixtral-8x7b@bf16:2"}},
)
HERE = BoardSetting("small", "mixtral", 1)


def silent(*args: object) -> None:
    """Watches nothing."""


def test_an_entry_is_what_the_policy_does_in_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "leaderboard_settings", lambda: TINY)
    ran, refused = played(HERE, ["llama.cpp", "seqmoe"], 1, silent)
    speed = simulate(HERE.scenario().with_(policy="llama.cpp")).metrics.throughput_tokens_per_s
    assert (ran.policy, ran.kind, ran.setting) == ("llama.cpp", PolicyKind.KEEPS, HERE)
    assert (ran.tokens_per_s, ran.lowest, ran.highest, ran.copied_mib, ran.reason) == (speed, speed, speed, 0.0, "")
    assert (refused.tokens_per_s, refused.kind) == (None, "")
    assert refused.reason.startswith("the policy needs the forecast token@1")


def test_what_a_file_has_is_not_simulated_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "e.csv", list[tuple[BoardSetting, list[str]]]()

    def play(setting: BoardSetting, policies: list[str], jobs: int, watch: object) -> list[Entry]:
        if len(asked) == 3:
            raise KeyboardInterrupt
        asked.append((setting, policies))
        return [some_entries()[0]._replace(**setting._asdict(), policy=policy) for policy in policies]

    monkeypatch.setattr(module, "played", play)
    write_entries(entries_of("steady", 10.0), path)
    with pytest.raises(KeyboardInterrupt):
        add_entries(path, ["steady", "quick"], 1, silent)
    first, *others = all_settings()
    assert asked == [(first, ["quick"]), *((setting, ["steady", "quick"]) for setting in others[:2])]
    assert len(read_entries(path)) == 6, "what was done before the interruption is kept"
    assert [lacking(read_entries(path), setting, ["steady", "quick"]) for setting in (first, others[2])] == [
        [], ["steady", "quick"]
    ]


def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_entries(some_entries(), tmp_path / "e.csv")
    assert read_entries(tmp_path / "e.csv") == list(some_entries())


@pytest.mark.parametrize(("before", "after"), [
    ("machine,", "a,"),
    (",10,9,", ",ten,9,"),
    (str(PolicyKind.KEEPS), "other"),
    ("laptop-8gb,qwen,1,", "laptop-8gb,qwen,one,"),
])
def test_a_damaged_file_is_refused(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "e.csv"
    write_entries(some_entries(), path)
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    with pytest.raises(LeaderboardError, match=r"e\.csv: expected the entries of a leaderboard, as `trilane lead"):
        read_entries(path)


def test_without_entries_a_message_says_how_to_make_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES", tmp_path / "none.csv")
    with pytest.raises(LeaderboardError, match=r"no entries come with this version; simulate them with .* --play FILE"):
        read_entries()


CHEAP = BoardSetting("laptop-8gb", "gpt-oss", 1)


def test_every_policy_has_an_entry_in_every_setting() -> None:
    ours = [name for name, one in SYSTEMS.items() if one.parameters.__module__.startswith("policies.")]
    there = {(entry.setting, entry.policy) for entry in read_entries()}
    assert there == {(setting, policy) for setting in all_settings() for policy in ours}


def test_what_is_committed_is_what_is_played(tmp_path: Path) -> None:
    write_entries(played(CHEAP, ["llama.cpp", "pre-gated", "llama-cache-lru"], 1, silent), tmp_path / "e.csv")
    committed = {(entry.setting, entry.policy): entry for entry in read_entries()}
    for entry in read_entries(tmp_path / "e.csv"):
        assert committed[CHEAP, entry.policy] == entry
