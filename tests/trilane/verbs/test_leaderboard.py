"""``trilane leaderboard``: the standings, and where a policy of one's own stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.leaderboard_entries import some_entries
from tests.kit.running import Trilane
from trilane.study.leaderboard import entries as module
from trilane.study.leaderboard.entries import Entry, read_entries, write_entries
from trilane.study.leaderboard.settings import BoardSetting

MINE = (
    "from dataclasses import dataclass\n"
    "from policies.papers.llama_cpp import LlamaCpp\n"
    "from trilane import register\n\n\n"
    "@register('mine', 'whole layers')\n@dataclass(frozen=True)\nclass Mine(LlamaCpp):\n    pass\n"
)


def test_the_committed_standings(trilane: Trilane) -> None:
    done = trilane("leaderboard", "--details", "--plot", "l.png", "--json", "l.json")
    assert done.status == 0, done.err
    policies = {entry.policy for entry in read_entries()}
    assert done.out.startswith(f"{len(policies)} policies in 16 settings: 4 machines x 2 families of routing x batch 1")
    assert done.out.count("\nllama.cpp ") == 4  # once for each machine; in the standings a place goes before
    assert Path("l.csv").read_text().count("\n") == len(read_entries()) + 1


def test_ones_own_policy_is_played_and_ranked(trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    def play(setting: BoardSetting, policies: list[str], jobs: int, watch: object) -> list[Entry]:
        return [some_entries()[0]._replace(**setting._asdict(), policy=policy) for policy in policies]

    monkeypatch.setattr(module, "played", play)
    Path("mine.py").write_text(MINE)
    write_entries(some_entries(), Path("e.csv"))
    done = trilane("leaderboard", "--policies", "mine.py", "--play", "e.csv")
    assert done.status == 0, done.err
    [line] = [line for line in done.out.splitlines() if "mine <" in line]
    assert line.split()[-1] == "16"
    assert {entry.policy for entry in read_entries(Path("e.csv"))} == {"steady", "quick", "wild", "never", "mine"}
