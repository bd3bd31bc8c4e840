"""Predicted against published values."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.text import Text

from tests.kit.results import put_in, row, score, toy_paper
from trilane.engines.accuracy.errors import Speeds
from trilane.engines.accuracy.scores import HELD_OUT, Scores
from trilane.output.figures import PictureError, plot_accuracy, plot_papers
from trilane.output.figures.marks import GREY
from trilane.study.papers.scores import FigureScore, Scoreboard

ROWS = [
    row("near", 100.0, prompt_tokens=512, prompt_tokens_per_s=1000.0), row("fast", 50.0), row("slow", 80.0),
    row("check", 70.0, quality="C"),
]
SPEEDS = {"near": Speeds(110.0, 900.0), "fast": Speeds(100.0), "slow": Speeds(40.0), "check": Speeds(70.0)}


def test_points_band_and_names() -> None:
    figure = plot_accuracy(Scores(ROWS, {HELD_OUT: SPEEDS}, {}, {}))
    decode, prompts = figure.axes
    drawn = {(line.get_xdata()[0], line.get_ydata()[0]) for line in decode.lines if len(line.get_xdata()) == 1}
    assert drawn == {(100.0, 110.0), (50.0, 100.0), (80.0, 40.0), (70.0, 70.0)}
    assert (decode.get_xscale(), decode.get_yscale()) == ("log", "log")
    assert decode.get_xlim() == decode.get_ylim()
    assert decode.get_xlabel() == "measured: tokens a second of one sequence"
    assert prompts.get_ylabel() == "predicted: prompt tokens a second"
    [band] = [each for each in decode.collections if isinstance(each, PolyCollection)]
    x, low, high = band.get_paths()[0].vertices[1][0], *sorted(band.get_paths()[0].vertices[[1, -2], 1])
    assert (low / x, high / x) == (pytest.approx(0.8), pytest.approx(1.2))
    texts = [text.get_text() for text in decode.texts]
    assert {"fast", "slow"} < set(texts)
    assert "near" not in texts
    assert "fast: qwen3-30b-a3b on rtx-4080, +100%" in texts
    assert "slow: qwen3-30b-a3b on rtx-4080, -50%" in texts


def test_the_headline_counts_no_sanity_checks() -> None:
    figure = plot_accuracy(Scores(ROWS, {HELD_OUT: SPEEDS}, {}, {}))
    assert figure.get_suptitle() == ("Median error: decode 50% (3 speeds, 1 machine), prompts 10% (1 speed, 1 machine)")


def test_nothing_to_draw() -> None:
    with pytest.raises(PictureError, match="got none"):
        plot_accuracy(Scores([row(decode=None)], {HELD_OUT: {"1": Speeds()}}, {}, {}))


# --- of papers --------------------------------------------------------------------------------------------------------

def board(*scores: FigureScore, given: Sequence[str] = ()) -> Scoreboard:
    questions = {each.figure.id: each.question for each in scores}
    paper = toy_paper(questions=questions, headlines=[], put_in=put_in(*given))
    return Scoreboard([FigureScore(each.figure, paper, each.simulated) for each in scores])


SCORES = [score("toy-near", 2.0, 2.1), score("toy-far", 3.0, 9.0), score("toy-put-in", 4.0, 40.0),
          score("toy-sign", 5.0, -1.0), score("toy-missing", 6.0, None)]


def test_points_bands_and_names() -> None:
    [ax] = plot_papers(board(*SCORES, given=["toy-put-in"])).axes
    drawn = {(line.get_xdata()[0], line.get_ydata()[0]): line for line in ax.lines if len(line.get_xdata()) == 1}
    assert set(drawn) == {(2.0, 2.1), (3.0, 9.0), (4.0, 40.0)}
    assert drawn[4.0, 40.0].get_markerfacecolor() == "white"  # put in
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_title()) == ("log", "log", "Toy")
    assert [text.get_text() for text in ax.texts] == ["far"]
    widths = sorted(each.get_paths()[0].get_extents().y1 / ax.get_xlim()[1] for each in ax.collections)
    assert widths == [pytest.approx(1.15), pytest.approx(1.30)]


def test_bounds_are_small_grey_triangles() -> None:
    figure = plot_papers(board(score("toy-bound", 1.0, 0.07, "upper_bound"), score("toy-near", 2.0, 2.1)))
    [point] = [line for line in figure.axes[0].lines if tuple(line.get_xdata()) == (1.0,)]
    assert (point.get_marker(), point.get_color()) == ("^", GREY)
    assert "a bound: met on its side" in [text.get_text() for text in figure.findobj(Text)]


def test_of_points_of_one_height_the_furthest_is_named_and_names_stay_within_the_panel() -> None:
    row = [score("toy-edge", 2.0, 90.0), score("toy-next", 4.0, 91.0), score("toy-below", 40.0, 4.0)]
    [ax] = plot_papers(board(*row)).axes
    assert [(text.get_text(), text.get_horizontalalignment()) for text in ax.texts] == [
        ("edge", "left"),
        ("below", "left"),
    ]


def test_a_place_without_a_paper_is_empty() -> None:
    papers = [board(score(f"toy-{place}", 2.0, 2.1)).scores[0] for place in range(4)]
    named = [FigureScore(s.figure, toy_paper(name=f"Toy {n}", questions={s.figure.id: s.question}, headlines=[]), 2.1)
             for n, s in enumerate(papers)]
    assert [ax.axison for ax in plot_papers(Scoreboard(named)).axes] == [True] * 4 + [False] * 2


def test_the_headline_counts_what_is_not_drawn_too() -> None:
    figure = plot_papers(board(*SCORES, given=["toy-put-in"]))
    texts = " ".join(text.get_text() for text in figure.findobj(lambda each: hasattr(each, "get_text")))
    assert "33% of 3 published figures come out within 15%, 33% within 30%" in texts
    assert "1 with another sign than published" in " ".join(texts.split())


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(PictureError, match="expected published figures that have been played"):
        plot_papers(board(score("toy-missing", 6.0, None)))
