"""The picture of simulated against published figures."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from matplotlib.text import Text

from tests.kit.papers import put_in, score, toy_paper
from trilane.output.figures import PictureError, plot_papers
from trilane.output.figures.style import GREY
from trilane.study.papers.board import Scoreboard
from trilane.study.papers.scores import FigureScore


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
