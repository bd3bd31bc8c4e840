"""``trilane accuracy``, ``papers`` and ``leaderboard``: tables, one row, one's own, JSON and pictures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.commands import Trilane
from tests.kit.results import some_entries
from trilane.study.leaderboard import standings as module
from trilane.study.leaderboard.standings import BoardSetting, Entry, read_entries, write_entries


def test_the_page_shows_errors_next_to_the_closed_forms(trilane: Trilane) -> None:
    done = trilane("accuracy", "--json", "scores.json")
    assert (done.status, done.err) == (0, "")
    kept = json.loads(Path("scores.json").read_text())
    [line] = [each for each in kept["errors"] if (each["speed"], each["group"]) == ("decode", "all")]
    first, sheet = line["errors"]["held out"], line["errors"]["data sheet"]
    cells = next(text for text in done.out.splitlines() if text.startswith("all ")).split()
    assert cells[1:4] == [str(first["rows"]), str(first["machines"]), f"{first['median']:.0%}"]
    assert cells[-2] == f"{sheet['median']:.0%}"
    for group in ("all GPU", "CPU only", "qwen3moe", "q4_k_m", "llama.cpp-vulkan"):
        assert f"\n  {group} " in done.out
    assert f"{len(kept['left_out'])} rows were not asked" in done.out
    assert len(kept["rows"]) == int(done.out.split()[0])


def test_one_row_is_explained(trilane: Trilane) -> None:
    done = trilane("accuracy", "--row", "272", "--json", "row.json")
    kept = json.loads(Path("row.json").read_text())
    assert done.status == 0
    assert "gtx-1060-6gb" in done.out
    assert "The measured speed would be right with attention at " in done.out
    assert done.out.splitlines()[-2].startswith("- 0.")
    assert "of the rate of the host memory: " in done.out
    assert kept["slow_causes"][0]["part"] == "host memory"
    assert f"{kept['decode']['measured']:.2f}" in done.out
    assert kept["regime"] == "experts on CPU"


def test_rows_of_ones_own(trilane: Trilane) -> None:
    assert trilane("accuracy", "--template", "mine.csv").status == 0
    done = trilane("accuracy", "--check", "mine.csv", "--json", "mine.json")
    assert done.status == 0
    assert done.out.startswith("1 row of 1 machine: mine.csv\n")
    assert "held out" not in done.out
    shown = [line.split() for line in done.out.splitlines() if line.startswith("example ")]
    kept = json.loads(Path("mine.json").read_text())["rows"][0]
    speeds = {name: (f"{kept[name]['measured']:.1f}", f"{kept[name]['shipped']:.1f}") for name in ("decode", "prompts")}
    assert {line[1]: (line[-3], line[-2]) for line in shown} == speeds
    assert trilane("accuracy", "--check", "mine.csv", "--row", "example").out.startswith("row example\n")


def test_pairs_of_ones_own_rows(trilane: Trilane) -> None:
    """Half as fast with the experts of all layers on the CPU, which is predicted, too."""
    Path("mine.csv").write_text(
        "id,model,weights,machine,engine,cpu_layers,decode_tokens_per_s\n"
        "a,qwen3-30b-a3b,q4_k_m,rtx-4080+ddr5-5600,llama.cpp,0,150\n"
        "b,qwen3-30b-a3b,q4_k_m,rtx-4080+ddr5-5600,llama.cpp,48,40\n"
    )
    done = trilane("accuracy", "--check", "mine.csv", "--json", "mine.json")
    [pair] = json.loads(Path("mine.json").read_text())["pairs"]
    assert (pair["quantity"], pair["setting"], pair["pairs"], pair["machines"], pair["right"]) == (
        "decode", "cpu_layers", 1, 1, 1
    )
    line = next(text for text in done.out.splitlines() if text.startswith("decode") and "--n-cpu-moe" in text)
    assert line.split() == ["decode", "--n-cpu-moe", "1", "1", "100%", f"{pair['followed']:.2f}"]


def test_the_band_is_checked(trilane: Trilane) -> None:
    done = trilane("accuracy", "--json", "-")
    [line] = [each for each in done.json["errors"] if (each["speed"], each["group"]) == ("decode", "all")]
    assert 0.6 < line["errors"]["held out"]["inside"] <= 1


def test_a_hundred_rows_of_ones_own_are_shown_at_most(trilane: Trilane) -> None:
    trilane("accuracy", "--template", "mine.csv")
    columns, row = Path("mine.csv").read_text().splitlines()
    rows = [row.replace("example", f"row-{number}", 1) for number in range(102)]
    Path("mine.csv").write_text("\n".join([columns, *rows]))
    shown = trilane("accuracy", "--check", "mine.csv").out
    assert "\nrow-99 " in shown
    assert "\nrow-100 " not in shown
    assert "... 2 more rows: --json FILE has all of them" in shown


def test_a_picture_of_speeds(trilane: Trilane) -> None:
    assert trilane("accuracy", "--plot", "a.png").status == 0
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("words", "sentence"), [
    (("--row", "none"), "there is no row 'none'"),
    (("--row", "1", "--plot", "a.png"), "expected --row or --plot"),
    (("--plot", "a.bmp"), "expected the name of a picture"),
    (("--check", "missing.csv"), "missing.csv: expected a CSV file of measured speeds"),
    (("--check", "binary.csv"), "binary.csv: expected a CSV file of measured speeds"),
    (("--check", "binary.csv", "--json", "binary.csv"), "expected another file than the input"),
])
def test_what_cannot_be_done_is_one_sentence(words: tuple[str, ...], sentence: str, trilane: Trilane) -> None:
    Path("binary.csv").write_bytes(b"id\xff\x00,1")
    done = trilane("accuracy", *words)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert sentence in done.err


# --- papers -----------------------------------------------------------------------------------------------------------

def test_the_board_counts_by_paper(trilane: Trilane) -> None:
    done = trilane("papers", "--json", "board.json")
    assert (done.status, done.err) == (0, "")
    kept = json.loads(Path("board.json").read_text())
    assert list(kept["scores"])[:7] == ["the five papers", "further sources", "DALI", "DAOP", "HybriMoE", "SMoE", "SE"]
    five = kept["scores"]["the five papers"]["as studied"]
    assert five["figures"] + five["follow"] >= 180
    line = next(text for text in done.out.splitlines() if text.startswith("  as studied ")).split()
    assert line[2:4] == [str(five["figures"]), str(five["put_in"])]
    assert f"{five['near']:.0%}" in line
    assert kept["scores"]["BuddyMoE"]["one number"]["near"] is None  # all of its figures follow
    assert f"{sum(kept['left_out'].values())} figures were not asked" in done.out


def test_one_figure_is_explained(trilane: Trilane) -> None:
    done = trilane("papers", "--row", "se-qwen3-tpot-hi", "--json", "row.json")
    kept = json.loads(Path("row.json").read_text())
    assert (kept["published"], kept["method"], kept["over"]) == (14.0, "Router-PF", ["on demand"])
    assert f"{kept['ways']['as studied']['simulated']:.3g} %" in done.out
    assert "Sec 5.1.3; Fig 8" in done.out
    assert "policy router-pf" in done.out
    assert "prompt_tokens 65536" in done.out


def test_the_figures_of_one_paper_a_line_each(trilane: Trilane) -> None:
    lines = trilane("papers", "--paper", "daop").out.splitlines()
    assert sum(line.startswith("daop-") for line in lines[:29]) == 28
    assert any(line.startswith("daop-f9-phi-tps") and "put in" in line for line in lines)
    headlines = trilane("papers", "--headlines").out.splitlines()
    assert any(line.startswith("hybrimoe-decode-avg") for line in headlines)


def test_bounds_have_their_sign_and_are_met(trilane: Trilane) -> None:
    lines = {line.split()[0]: line.split() for line in trilane("papers", "--paper", "daop").out.splitlines() if line}
    assert lines["daop-f9-deepspeed-mii"][1:5] == ["<=", "1", "tokens/s", "met"]
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
    assert "plays.csv: 6 plays were added" in trilane(*words).err
    mine = json.loads(Path("row.json").read_text())["ways"]
    assert "plays.csv: 0 plays were added" in trilane(*words).err
    trilane("papers", "--row", "se-compute-share-lo", "--json", "row.json")
    shipped = json.loads(Path("row.json").read_text())["ways"]
    for way, found in mine.items():
        assert shipped[way]["simulated"] == pytest.approx(found["simulated"])


def test_a_picture_of_figures(trilane: Trilane) -> None:
    assert trilane("papers", "--plot", "a.png").status == 0
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("words", "sentence"), [
    (("--row", "xyzzy"), "there is no figure 'xyzzy'; `trilane papers --paper NAME` lists them all; NAME is"),
    (("--row", "smoe-abs-tpot"), "this figure is not asked: repeats Section VI-B"),
    (("--paper", "dalli"), "there is no paper 'dalli'; did you mean 'DALI'"),
    (("--row", "daop-t2-c4", "--plot", "a.png"), "expected --row or --plot"),
    (("--play", "binary.csv"), "expected a file of plays"),
])
def test_what_is_wrong_is_said_in_one_sentence(trilane: Trilane, words: tuple[str, ...], sentence: str) -> None:
    Path("binary.csv").write_bytes(bytes(range(256)))
    done = trilane("papers", *words)
    assert done.status == 2
    assert sentence in done.err
    assert done.err.count("\n") == 1


# --- leaderboard ------------------------------------------------------------------------------------------------------

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
