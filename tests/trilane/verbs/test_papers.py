"""``trilane papers``: the board, one figure, what is played, JSON and the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.commands import Trilane


def test_the_board_counts_by_paper(trilane: Trilane) -> None:
    done = trilane("papers", "--json", "board.json")
    assert (done.status, done.err) == (0, "")
    kept = json.loads(Path("board.json").read_text())
    papers = {each["name"]: each for each in kept["papers"]}
    assert list(papers) == ["DALI", "DAOP", "HybriMoE", "SMoE", "SE", "all"]
    assert papers["all"]["figures"] >= 180
    line = next(text for text in done.out.splitlines() if text.startswith("all ")).split()
    assert line[1:4] == [str(papers["all"]["figures"]), str(papers["all"]["put_in"]), f"{papers['all']['near']:.0%}"]
    assert f"{sum(kept['left_out'].values())} figures were not asked" in done.out


def test_one_figure_is_explained(trilane: Trilane) -> None:
    done = trilane("papers", "--row", "se-qwen3-tpot-hi", "--json", "row.json")
    kept = json.loads(Path("row.json").read_text())
    assert (kept["published"], kept["method"], kept["over"]) == (14.0, "Router-PF", ["on demand"])
    assert f"{kept['simulated']:.3g} %" in done.out
    assert "Sec 5.1.3; Fig 8" in done.out
    assert "policy router-pf" in done.out
    assert "prompt_tokens 65536" in done.out


def test_the_figures_of_one_paper_a_line_each(trilane: Trilane) -> None:
    lines = trilane("papers", "--paper", "daop").out.splitlines()
    assert sum(line.startswith("daop-") for line in lines[:29]) == 28
    assert any(line.startswith("daop-f9-phi-tps") and line.endswith("put in") for line in lines)
    headlines = trilane("papers", "--headlines").out.splitlines()
    assert any(line.startswith("hybrimoe-decode-avg") for line in headlines)


def test_bounds_have_their_sign_and_are_met(trilane: Trilane) -> None:
    lines = {line.split()[0]: line.split() for line in trilane("papers", "--paper", "daop").out.splitlines() if line}
    assert lines["daop-f9-deepspeed-mii"][1:] == ["<=", "1", "tokens/s", "0.14", "tokens/s", "met"]
    row = trilane("papers", "--row", "smoe-abs-hit").out
    assert ">= 60 % (lower bound)" in row
    assert ", met" in row
    assert "why it misses" not in row


def test_figures_that_go_the_wrong_way_are_listed_with_the_furthest(trilane: Trilane) -> None:
    far = trilane("papers").out.partition("go the wrong way")[2].partition("figures were not asked")[0]
    for figure in ("dali-f17a-cache", "hybrimoe-f9-gain-low"):
        assert "wrong way" in next(line for line in far.splitlines() if line.startswith(figure))


def test_what_a_file_lacks_is_played_and_added(trilane: Trilane) -> None:
    words = ("papers", "--row", "se-compute-share-lo", "--play", "plays.csv", "--jobs", "1", "--json", "row.json")
    assert "plays.csv: 2 plays were added" in trilane(*words).err
    mine = json.loads(Path("row.json").read_text())["simulated"]
    assert "plays.csv: 0 plays were added" in trilane(*words).err
    trilane("papers", "--row", "se-compute-share-lo", "--json", "row.json")
    assert json.loads(Path("row.json").read_text())["simulated"] == pytest.approx(mine)  # as those that are shipped


def test_a_picture(trilane: Trilane) -> None:
    assert trilane("papers", "--plot", "a.png").status == 0
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--row", "none"), "there is no figure 'none'; `trilane papers --paper NAME` lists them all; NAME is"),
        (("--row", "smoe-abs-tpot"), "this figure is not asked: repeats Section VI-B"),
        (("--paper", "dalli"), "there is no paper 'dalli'; did you mean 'DALI'"),
        (("--row", "daop-t2-c4", "--plot", "a.png"), "expected --row or --plot"),
        (("--play", "binary.csv"), "expected a file of plays"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(trilane: Trilane, words: tuple[str, ...], sentence: str) -> None:
    Path("binary.csv").write_bytes(bytes(range(256)))
    done = trilane("papers", *words)
    assert done.status == 2
    assert sentence in done.err
    assert done.err.count("\n") == 1
