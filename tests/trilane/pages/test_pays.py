"""The page of an idea: the answer in the first line, what decides, the break-even, and the map."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from tests.kit.pays_questions import hand_made_map
from trilane.pages.pays import pays_page


def test_the_page_whole() -> None:
    console = Console(file=StringIO(), width=150, highlight=False)
    for part in pays_page(hand_made_map()):
        console.print(part)
    assert isinstance(console.file, StringIO)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == [
        "A cache of experts on the GPU pays here: +30% (+20% to +40% over 2 draws), 20.0 tokens/s; 15.0 with whole "
        "layers on the GPU",
        "model on machine",
        "",
        "what decides  experts on the GPU (share of all): 50% here, upload of an expert (us): 100 here",
        "break-even    experts on the GPU (share of all): it pays everywhere from 25% to 50%",
        "              upload of an expert (us): it pays below 250",
        "",
        "                               on the GPU     copied    GPU waits",
        "here                tokens/s  when needed  MiB/token  for the CPU  for copies",
        "without: llama.cpp      15.0          50%        0.0          50%         50%",
        "with it: mine           20.0          50%        0.0          50%         50%",
        "",
        "gain in tokens/s; across: experts on the GPU (share of all); down: upload of an expert (us); <: here",
        "        25%  50% <",
        "300       -   -10%",
        "100 <  +10%   +30%",
        "",
        "-  cannot run: too small",
    ]
