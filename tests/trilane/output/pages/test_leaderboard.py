"""The page of the leaderboard, from a few entries by hand."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from tests.kit.results import some_entries
from trilane.output.pages.leaderboard import leaderboard_page, machine_pages
from trilane.study.leaderboard.standings import standings


def printed(parts: object) -> list[str]:
    console = Console(file=StringIO(), width=160, highlight=False)
    for part in parts:  # type: ignore[attr-defined]
        console.print(part)
    assert isinstance(console.file, StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_standings_whole() -> None:
    *lines, empty, mine, rest = printed(leaderboard_page(standings(some_entries()), own=("quick",)))
    assert lines[0].startswith("3 policies (and 1 that cannot run) in 16 settings: 4 machines x 2 families of routing ")
    assert [line.split() for line in lines[1:5]] == [
        ["policy", "score", "lowest", "best", "in", "runs", "in"],
        ["1", "wild", "~", "159%", "100%", "3", "3"],
        ["2", "steady", "79%", "50%", "2", "3"],
        ["3", "quick", "<", "71%", "50%", "1", "2"],
    ]
    assert lines[-3:] == ["~        changes the routing", "<        yours", "never runs in no setting: too small"]
    assert "best in  settings in which no policy that keeps the routing is more than 2% faster" in lines
    assert (empty, f"{mine} {rest}".replace("  ", " ")) == ("", (
        "quick is 3 of 3; none that keeps the routing is more than 2% faster in 1 of 2 settings: 8 GB laptop gpt-oss "
        "batch 1; it is worst in 8 GB laptop qwen batch 1, with 50% of the speed of the fastest"
    ))


def test_the_speeds_on_the_first_machine() -> None:
    lines = printed(machine_pages(standings(some_entries())))
    assert lines[1].startswith("8 GB laptop: rtx-4060-laptop+ddr5-5600+ryzen-9-7945hx; qwen3-30b-a3b@q4_k_m, ")
    assert lines[4].split() == ["wild", "20.0", "[18.0-22.0]", "20.0", "[18.0-22.0]", "16.0", "[14.4-17.6]", "-"]
    assert lines[6].split() == ["quick", "5.0", "[4.5-5.5]", "-", "16.0", "[14.4-17.6]", "-"]
