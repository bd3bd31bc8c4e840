"""Simulated against published figures: lines of shares, and points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from matplotlib.text import Text

from tests.kit.results import ToyFigures, put_in, score, toy_paper
from trilane.output.figures import PictureError, plot_papers
from trilane.output.figures.marks import BLUE, GREEN, GREY
from trilane.study.papers import board as boards
from trilane.study.papers import follows
from trilane.study.papers.blind import BlindRecord
from trilane.study.papers.board import Scoreboard
from trilane.study.papers.paper import AskingWay, Paper
from trilane.study.papers.scores import FigureScore

NO_RECORD = BlindRecord([])


@pytest.fixture(autouse=True)
def toy_is_a_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "read_papers", lambda: ["Toy"])
    monkeypatch.setattr(boards, "further_sources", dict)
    monkeypatch.setattr(follows, "published", ToyFigures)


def board(
    *scores: FigureScore, given: Sequence[str] = (), ways: Sequence[AskingWay] = (AskingWay.STUDIED,)
) -> Scoreboard:
    questions = {each.figure.id: each.question for each in scores}
    paper = toy_paper(questions=questions, headlines=[], put_in=put_in(*given))
    return Scoreboard({way: [_in(each, paper, way) for each in scores] if way in ways else [] for way in AskingWay})


def _in(one: FigureScore, paper: Paper, way: AskingWay) -> FigureScore:
    return replace(one, paper=paper, way=way)


SCORES = [score("toy-near", 2.0, 2.1), score("toy-far", 3.0, 9.0), score("toy-put-in", 4.0, 40.0, over="third"),
          score("toy-sign", 5.0, -1.0), score("toy-missing", 6.0, None)]


def drawn(picture: object) -> Mapping[tuple[float, float], object]:
    axes = picture.axes[3]  # type: ignore[attr-defined]
    return {(line.get_xdata()[0], line.get_ydata()[0]): line for line in axes.lines if len(line.get_xdata()) == 1}


def test_points_bands_and_names() -> None:
    picture = plot_papers(board(*SCORES, given=["toy-put-in"]), NO_RECORD)
    points, ax = drawn(picture), picture.axes[3]
    assert set(points) == {(2.0, 2.1), (3.0, 9.0), (4.0, 40.0)}
    assert points[4.0, 40.0].get_markerfacecolor() == "white"  # type: ignore[attr-defined]  # put in
    assert (ax.get_xscale(), ax.get_yscale(), ax.get_title()) == ("log", "log", "Toy, as studied")
    assert [text.get_text() for text in ax.texts] == ["toy-far"]
    widths = sorted(each.get_paths()[0].get_extents().y1 / ax.get_xlim()[1] for each in ax.collections)
    assert widths == [pytest.approx(1.15), pytest.approx(1.30)]


def test_a_line_rises_by_a_figure_at_its_error_and_never_for_another_sign() -> None:
    asked = board(*SCORES, given=["toy-put-in"], ways=(AskingWay.STUDIED, AskingWay.ONE_NUMBER))
    studied, one = plot_papers(asked, NO_RECORD).axes[0].lines
    assert (studied.get_color(), one.get_color()) == (BLUE, GREEN)
    assert studied.get_xdata() == pytest.approx([0, 0.05, 1.0, 2.0, 9])
    assert studied.get_ydata() == pytest.approx([0, 1 / 3, 2 / 3, 1, 1])


def test_bounds_are_small_grey_triangles() -> None:
    scores = (score("toy-bound", 1.0, 0.07, "upper_bound"), score("toy-near", 2.0, 2.1))
    picture = plot_papers(board(*scores), NO_RECORD)
    point = drawn(picture)[1.0, 0.07]
    assert (point.get_marker(), point.get_color()) == ("^", GREY)  # type: ignore[attr-defined]
    assert "a bound: met on its side" in [text.get_text() for text in picture.findobj(Text)]  # type: ignore[attr-defined]


def test_of_points_of_one_height_the_furthest_is_named_and_names_stay_within_the_panel() -> None:
    row = [score("toy-edge", 2.0, 90.0), score("toy-next", 4.0, 91.0), score("toy-below", 40.0, 4.0)]
    ax = plot_papers(board(*row), NO_RECORD).axes[3]
    assert [(text.get_text(), text.get_horizontalalignment()) for text in ax.texts] == [
        ("toy-edge", "left"), ("toy-below", "left"),
    ]


def test_places_without_a_panel_are_empty() -> None:
    picture = plot_papers(board(score("toy-a", 2.0, 2.1), ways=(AskingWay.STUDIED, AskingWay.ONE_NUMBER)), NO_RECORD)
    assert [ax.axison for ax in picture.axes] == [True, False, False, True, True, False]


def test_the_headline_counts_what_is_not_drawn_too() -> None:
    picture = plot_papers(board(*SCORES, given=["toy-put-in"]), NO_RECORD)
    text = " ".join(each.get_text() for each in picture.findobj(lambda each: hasattr(each, "get_text")))
    text = " ".join(text.split())
    assert "Toy: within 30% come 33% of 3 figures (as studied)" in text
    assert "1 refused, of another sign than published, or 0" in text


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(PictureError, match="expected published figures that have been played"):
        plot_papers(board(score("toy-missing", 6.0, None)), NO_RECORD)
