"""``trilane accuracy``: the tables, one row, rows of one's own, JSON and the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.commands import Trilane


def test_the_page_shows_errors_next_to_the_closed_forms(trilane: Trilane) -> None:
    done = trilane("accuracy", "--json", "scores.json")
    assert (done.status, done.err) == (0, "")
    kept = json.loads(Path("scores.json").read_text())
    [line] = [each for each in kept["errors"] if (each["speed"], each["group"]) == ("decode", "all")]
    first, sheet = line["errors"]["held out"], line["errors"]["data sheet"]
    cells = next(text for text in done.out.splitlines() if text.startswith("all ")).split()
    assert cells[1:4] == [str(first["rows"]), str(first["machines"]), f"{first['median']:.0%}"]
    assert cells[-2] == f"{sheet['median']:.0%}"
    for group in ("all GPU", "CPU only", "qwen3", "q4_k_m", "llama.cpp-vulkan"):
        assert f"\n  {group} " in done.out
    assert f"{len(kept['left_out'])} rows were not asked" in done.out
    assert len(kept["rows"]) == int(done.out.split()[0])


def test_one_row_is_explained(trilane: Trilane) -> None:
    done = trilane("accuracy", "--row", "168", "--json", "row.json")
    kept = json.loads(Path("row.json").read_text())
    assert done.status == 0
    assert "rx-7900-xt" in done.out
    assert "experts on the CPU at " in done.out.splitlines()[-1]
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


def test_a_hundred_rows_of_ones_own_are_shown_at_most(trilane: Trilane) -> None:
    trilane("accuracy", "--template", "mine.csv")
    columns, row = Path("mine.csv").read_text().splitlines()
    rows = [row.replace("example", f"row-{number}", 1) for number in range(102)]
    Path("mine.csv").write_text("\n".join([columns, *rows]))
    shown = trilane("accuracy", "--check", "mine.csv").out
    assert "\nrow-99 " in shown
    assert "\nrow-100 " not in shown
    assert "... 2 more rows: --json FILE has all of them" in shown


def test_a_picture(trilane: Trilane) -> None:
    assert trilane("accuracy", "--plot", "a.png").status == 0
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--row", "none"), "there is no row 'none'"),
        (("--row", "1", "--plot", "a.png"), "expected --row or --plot"),
        (("--plot", "a.bmp"), "expected the name of a picture"),
        (("--check", "missing.csv"), "missing.csv: expected a CSV file of measured speeds"),
        (("--check", "binary.csv"), "binary.csv: expected a CSV file of measured speeds"),
        (("--check", "binary.csv", "--json", "binary.csv"), "expected another file than the input"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(words: tuple[str, ...], sentence: str, trilane: Trilane) -> None:
    Path("binary.csv").write_bytes(b"id\xff\x00,1")
    done = trilane("accuracy", *words)
    assert (done.status, done.out, done.err.count("\n")) == (2, "", 1)
    assert sentence in done.err
