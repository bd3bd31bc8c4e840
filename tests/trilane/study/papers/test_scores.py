"""The scoreboard: bands, directions, pairs, and what does not count."""
from __future__ import annotations

import math

import pytest

from tests.kit.results import ToyFigures, figure, put_in, score, toy_paper
from trilane.study.papers import follows
from trilane.study.papers.board import Scoreboard, in_order, pairs_of, scoreboard, summary
from trilane.study.papers.figures import PapersError
from trilane.study.papers.paper import AskingWay, Paper
from trilane.study.papers.plays import key, needed, read_plays
from trilane.study.papers.scores import FigureScore, case_values
from trilane.study.papers.sources import chosen_figures, read_papers


@pytest.mark.parametrize(
    ("simulated", "near", "far"), [(1.15, True, True), (0.85, True, True), (1.16, False, True), (0.69, False, False)]
)
def test_a_band_is_a_share_of_the_published_value(simulated: float, near: bool, far: bool) -> None:
    one = score("toy-speed", 1.0, simulated)
    assert (one.within(0.15), one.within(0.30)) == (near, far)


def test_the_direction_of_what_compares() -> None:
    assert score("a", 1.5, 1.1).same_direction is True
    assert score("a", 1.5, 0.9).same_direction is False
    assert score("a", 10.0, -1.0, ask="reduction").same_direction is False
    assert score("a", 1.0, 1.1).same_direction is None  # neither is faster in print
    assert score("a", 50.0, 40.0, ask="hit_rate", over=()).same_direction is None


def studied(scores: list[FigureScore]) -> Scoreboard:
    """A board of one way."""
    return Scoreboard({AskingWay.STUDIED: scores, AskingWay.ONE_NUMBER: [], AskingWay.NOTHING: []})


def _of_one_paper(*scores: FigureScore) -> list[FigureScore]:
    paper = toy_paper(questions={s.figure.id: s.question for s in scores}, headlines=[])
    return [FigureScore(s.figure, paper, s.simulated) for s in scores]


def test_pairs_ask_the_same_but_for_one_thing() -> None:
    scores = _of_one_paper(
        score("a", 2.0, 2.1, set={"batch": 1}), score("b", 3.0, 2.0, set={"batch": 2}),
        score("c", 2.05, 9.0, set={"batch": 4}),  # within the dead band of a
        score("d", 5.0, 9.0, set={"batch": 1, "cached_share": 0.1}),
        score("e", 9.0, 1.0, ask="gain", set={"batch": 1}),
        score("f", 4.0, 4.0, over="third", set={"batch": 2, "cached_share": 0.1}),
        score("g", 9.0, 9.0, set={"batch": 2}, take="max"),  # the other end of b
    )
    pairs = {(one.figure.id, other.figure.id): in_order(one, other) for one, other in pairs_of(scores)}
    assert pairs == {("a", "b"): False, ("b", "c"): False, ("a", "d"): True}


def test_pairs_differ_by_more_than_figures_that_their_paper_calls_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = _of_one_paper(score("a", 2.0, 2.1, set={"batch": 1}), score("b", 2.4, 2.0, set={"batch": 2}))
    assert len(pairs_of(scores)) == 1
    monkeypatch.setattr(Paper, "scatter", 0.21)
    assert pairs_of(scores) == []


def test_scatter_is_the_widest_difference_of_figures_that_a_paper_calls_the_same() -> None:
    scatters = {name: paper.scatter for name, paper in read_papers().items()}
    assert scatters.pop("DALI") == pytest.approx(4.84 / 4.24 - 1)  # Table 6, of DALI itself
    assert set(scatters.values()) == {0.0}


def test_figures_that_were_put_in_are_shown_and_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follows, "published", ToyFigures)
    scores = _of_one_paper(score("a", 2.0, 2.1), score("b", 3.0, 6.0, over="third"),
                           score("c", 3.0, None, set={"batch": 4}))
    paper = toy_paper(questions={s.figure.id: s.question for s in scores}, headlines=[], put_in=put_in("b"))
    scored = [FigureScore(s.figure, paper, s.simulated) for s in scores]
    found, board = summary(scored), studied(scored)
    assert (found.figures, found.put_in, found.near, found.far) == (1, 1, 1.0, 1.0)
    assert found.median_log_ratio == pytest.approx(math.log(1.05))
    assert found.in_order == (0, 0)
    assert [s.figure.id for s in board.not_played] == ["c"]
    assert board.furthest() == []


def test_figures_that_go_the_wrong_way_come_first_whatever_their_band() -> None:
    scores = _of_one_paper(score("far", 2.0, 20.0), score("turned", 1.1, 0.99), score("near", 2.0, 2.1))
    assert [s.figure.id for s in studied(scores).furthest()] == ["turned", "far"]


@pytest.mark.parametrize(
    ("simulated", "kind", "miss"),
    [(2.1, "exact", ""), (2.6, "exact", "a rate"), (9.0, "lower_bound", ""), (1.0, "lower_bound", "a rate"),
     (None, "exact", "a rate")],
)
def test_only_a_figure_that_misses_has_a_reason(simulated: float | None, kind: str, miss: str) -> None:
    one = score("a", 2.0, simulated, kind)
    paper = toy_paper(questions={"a": one.question}, headlines=[], misses=put_in("a"))
    assert FigureScore(one.figure, paper, simulated).miss == miss


def test_every_shipped_figure_that_goes_the_wrong_way_has_a_reason() -> None:
    board = scoreboard(chosen_figures(), read_plays())
    assert [s.figure.id for s in board.scores[AskingWay.STUDIED] if s.wrong_way and not s.miss] == []


def test_engines_say_which_figures_they_were_set_by(monkeypatch: pytest.MonkeyPatch) -> None:
    from sim.costs.engine import load_engine

    set_by = load_engine("dali-2025").set_by
    assert set_by
    paper = toy_paper(setting={"engine": "dali-2025"})
    assert paper.put_in_by(set_by[0]) == "engine dali-2025"
    assert paper.put_in_by("toy-speed") == ""


def test_the_best_baseline_counts_case_by_case() -> None:
    paper = toy_paper(settings={"both": {"batch": [1, 2]}}, draws=1)
    question = toy_paper(
        questions={"q": {"ask": "speedup", "method": "ours", "over": ["theirs", "third"], "at": "both"}}, headlines=[]
    ).questions["q"]
    times = {"ours": (10.0, 10.0), "theirs": (30.0, 20.0), "third": (20.0, 40.0)}
    plays = {
        key(case.draws[0]): {"tpot_ms": ms}
        for method, by_case in times.items()
        for case, ms in zip(paper.cases(question, method), by_case, strict=True)
    }
    assert case_values(paper, question, plays) == [2.0, 2.0]
    del plays[key(paper.cases(question, "third")[0].draws[0])]
    assert case_values(paper, question, plays) == [None, None]


def test_figures_are_chosen_by_paper_by_id_or_as_headlines() -> None:
    assert 5 <= len(chosen_figures(headlines=True)) <= 15
    assert all(name.startswith("daop-") for name in chosen_figures("daop"))
    assert chosen_figures(figure_id="DAOP-F9-phi-tps") == ["daop-f9-phi-tps"]
    shared = needed(["daop-f9-phi-tps", "daop-f9-gain-full"], {AskingWay.STUDIED})
    assert len({key(scenario) for scenario in shared}) == 12


@pytest.mark.parametrize(
    ("figure_id", "sentence"),
    [("smoe-abs-tpot", "smoe-abs-tpot: this figure is not asked: repeats Section VI-B"),
     ("daop-f9-phi", "there is no figure 'daop-f9-phi'; did you mean 'daop-f9-phi-tps'")],
)
def test_a_figure_that_is_not_asked_is_refused_with_the_reason(figure_id: str, sentence: str) -> None:
    with pytest.raises(PapersError) as caught:
        chosen_figures(figure_id=figure_id)
    assert sentence in str(caught.value)


def test_a_figure_that_is_refused_counts_as_missed() -> None:
    paper = toy_paper()
    refused = FigureScore(figure("toy-hits", 50.0), paper, None, "it does not fit")
    scores = [refused, FigureScore(figure("toy-speed", 2.0), paper, 2.0)]
    found, board = summary(scores), studied(scores)
    assert (found.figures, found.near, found.far) == (2, 0.5, 0.5)
    assert board.furthest() == [refused]
    assert board.not_played == []


def test_the_refusal_of_any_play_is_that_of_the_figure() -> None:
    plays = {key(one): "no room" for one in needed(["daop-f9-phi-tps"])[:1]}
    assert scoreboard(["daop-f9-phi-tps"], plays).scores[AskingWay.STUDIED][0].refused == "no room"
