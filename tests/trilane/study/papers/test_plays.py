"""Plays of scenarios, and the file of their facts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sim.runs.scenario import Scenario
from tests.kit.processes import small_disk
from trilane.study.papers.figures import PapersError
from trilane.study.papers.plays import add_plays, key, played, read_plays

SMALL = Scenario(trace="mini-moe", model=None, cached_share=0.25, prompt_tokens=4, generated_tokens=3)
POLICIES = [SMALL.with_(policy=policy) for policy in ("on-demand", "naive-cpu")]


def test_a_scenario_that_several_figures_need_is_played_once() -> None:
    names = [name for name, _ in played([*POLICIES, *POLICIES])]
    assert sorted(names) == sorted(key(scenario) for scenario in POLICIES)


def test_plays_are_added_to_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "plays.csv"
    assert add_plays(file, POLICIES[:1]) == 1
    first = file.read_text()
    assert add_plays(file, POLICIES) == 1
    assert file.read_text().startswith(first)
    assert add_plays(file, POLICIES) == 0
    plays = read_plays(file)
    assert set(plays) == {key(scenario) for scenario in POLICIES}
    assert dict(played(POLICIES[:1]))[key(POLICIES[0])]["tpot_ms"] == pytest.approx(
        plays[key(POLICIES[0])]["tpot_ms"], rel=1e-5
    )


IMPOSSIBLE = SMALL.with_(policy="on-demand", gpu_memory_gb=0.001, cached_share=None)


def test_a_refusal_is_kept_with_its_message_and_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "plays.csv"
    add_plays(file, [POLICIES[0], IMPOSSIBLE])
    message = read_plays(file)[key(IMPOSSIBLE)]
    assert "memory" in str(message)
    file.write_text(file.read_text().replace(message.partition(":")[0], "earlier"))
    add_plays(file, [POLICIES[0], IMPOSSIBLE])
    assert read_plays(file)[key(IMPOSSIBLE)] == message


def test_what_stops_amid_a_line_leaves_the_lines_before(tmp_path: Path) -> None:
    file = tmp_path / "plays.csv"
    add_plays(file, POLICIES[:1])
    first = file.read_bytes()
    with small_disk(len(first) + 20), pytest.raises(OSError, match=r"plays\.csv"):
        add_plays(file, POLICIES)
    assert file.read_bytes() == first
    assert list(tmp_path.iterdir()) == [file]


def test_a_key_holds_what_differs_from_the_defaults() -> None:
    assert key(Scenario()) == "{}"
    assert key(Scenario(batch=4, parameters={"window": 2})) == '{"parameters": {"window": 2}, "batch": 4}'


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(PapersError, match=r"other.csv: expected a file of plays"):
        read_plays(tmp_path / "other.csv")
    assert read_plays(tmp_path / "none.csv") == {}
