"""The page of an idea: the answer in the first line, what decides, the break-even, and the map."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console

from tests.kit.questions import hand_made_map
from trilane.output.figures.pays_words import break_even, verdict_of
from trilane.output.pages.pays import pays_page


def test_the_page_whole() -> None:
    console = Console(file=StringIO(), width=250, highlight=False)
    for part in pays_page(hand_made_map()):
        console.print(part)
    assert isinstance(console.file, StringIO)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == [
        "A cache of experts on the GPU (llama-cache-lru) pays here: +30% (+20% to +40% over 2 draws), 20.0 tokens/s; "
        "15.0 with whole layers on the GPU",
        "llama-cache-lru: patches that are not in llama.cpp, PR 27861 "
        "(https://github.com/ggml-org/llama.cpp/pull/27861) and others",
        "llama.cpp@cache: llama.cpp's own cache (--moe-cache-mib, PR 29887), the one of `trilane tune`: +10% here, "
        "16.5 tokens/s; its map: --policy llama.cpp@cache",
        "model on machine: answers",
        "",
        "what decides  experts on the GPU (share of all): 50% here, upload of an expert (us): 100 here",
        "break-even    experts on the GPU (share of all): it pays everywhere from 25% to 50%",
        "              upload of an expert (us): it pays up to 250",
        "",
        "                                     on the GPU     copied    GPU waits",
        "here                      tokens/s  when needed  MiB/token  for the CPU  for copies",
        "without: llama.cpp            15.0          50%        0.0          50%         50%",
        "with it: llama-cache-lru      20.0          50%        0.0          50%         50%",
        "",
        "gain in tokens/s; across: experts on the GPU (share of all); down: upload of an expert (us); <: here",
        "        25%  50% <",
        "300       -   -10%",
        "100 <  +10%   +30%",
        "",
        "-  cannot run: too small",
    ]


def test_where_it_cannot_run_no_break_even_is_stated() -> None:
    found = replace(hand_made_map(), here=(0, 0))
    assert break_even(found)[1][1] == (
        "upload of an expert (us): it pays everywhere from 100 to 100; it cannot run at 300"
    )


def test_the_verdict_is_that_of_the_gain_which_is_shown() -> None:
    """Gains are of thousandths: one of four hundred-thousandths is none, for the verdict too."""
    found = hand_made_map()
    cell = found.rows[0][1]
    speeds = tuple(1.0004 * speed for speed in cell.without.tokens_per_s)
    little = replace(cell, using=cell.without._replace(tokens_per_s=speeds))
    assert little.gains == (0.0, 0.0)
    shown = replace(found, rows=((found.rows[0][0], little), found.rows[1]))
    assert verdict_of(shown) == "A cache of experts on the GPU (llama-cache-lru) does not pay here: +0%"
