"""``trilane leaderboard --play FILE.csv``: a policy of one's own is simulated, kept and ranked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.commands import Trilane
from tests.kit.results import some_entries
from trilane.study.leaderboard import standings as module
from trilane.study.leaderboard.standings import BoardSetting, Entry, read_entries, write_entries

MINE = (
    "from dataclasses import dataclass\n"
    "from policies.papers.llama_cpp import LlamaCpp\n"
    "from trilane import register\n\n\n"
    "@register('my-layers', 'whole layers')\n@dataclass(frozen=True)\nclass MyLayers(LlamaCpp):\n    pass\n"
)


def _play(setting: BoardSetting, policies: list[str], jobs: int, watch: object) -> list[Entry]:
    return [some_entries()[0]._replace(**setting._asdict(), policy=policy) for policy in policies]


def test_a_policy_of_ones_own_joins_a_file(trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "played", _play)
    Path("own_layers.py").write_text(MINE)
    write_entries(some_entries(), Path("e.csv"))
    done = trilane("leaderboard", "--policies", "own_layers.py", "--play", "e.csv", "--plot", "p.png")
    assert done.status == 0, done.err
    [line] = [line for line in done.out.splitlines() if "my-layers <" in line]
    assert line.split()[-1] == "16"
    assert {entry.policy for entry in read_entries(Path("e.csv"))} == {"steady", "quick", "wild", "never", "my-layers"}
    assert Path("p.png").stat().st_size


def test_without_entries_there_is_a_message(trilane: Trilane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENTRIES", Path("none.csv"))
    done = trilane("leaderboard")
    assert (done.status, done.out) == (2, "")
    assert "no entries come with this version" in done.err
    assert done.err.count("\n") == 1
