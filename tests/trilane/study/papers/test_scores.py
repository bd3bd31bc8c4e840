"""The scoreboard: bands, directions, pairs, and what does not count."""
from __future__ import annotations

import math
from pathlib import Path

import pytest

from sim.runs.scenario import Scenario
from tests.kit.processes import small_disk
from tests.kit.results import figure, put_in, score, toy_paper
from trilane.study.papers.figures import PapersError
from trilane.study.papers.paper import Paper
from trilane.study.papers.plays import add_plays, key, needed, played, read_plays
from trilane.study.papers.scores import FigureScore, Scoreboard, case_values, in_order, pairs_of, scoreboard
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


def test_figures_that_were_put_in_are_shown_and_do_not_count() -> None:
    scores = _of_one_paper(score("a", 2.0, 2.1), score("b", 3.0, 6.0, set={"batch": 2}),
                           score("c", 3.0, None, set={"batch": 4}))
    paper = toy_paper(questions={s.figure.id: s.question for s in scores}, headlines=[], put_in=put_in("b"))
    board = Scoreboard([FigureScore(s.figure, paper, s.simulated) for s in scores])
    [summary] = board.summaries()
    assert (summary.figures, summary.put_in, summary.near, summary.far) == (1, 1, 1.0, 1.0)
    assert summary.median_log_ratio == pytest.approx(math.log(1.05))
    assert summary.in_order == (0, 0)
    assert [s.figure.id for s in board.not_played] == ["c"]
    assert board.furthest() == []


def test_figures_that_go_the_wrong_way_come_first_whatever_their_band() -> None:
    scores = _of_one_paper(score("far", 2.0, 20.0), score("turned", 1.1, 0.99), score("near", 2.0, 2.1))
    assert [s.figure.id for s in Scoreboard(scores).furthest()] == ["turned", "far"]


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
    assert [s.figure.id for s in board.scores if s.wrong_way and not s.miss] == []


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
    assert len({key(scenario) for scenario in needed(["daop-f9-phi-tps", "daop-f9-gain-full"])}) == 12


@pytest.mark.parametrize(
    ("figure_id", "sentence"),
    [("smoe-abs-tpot", "smoe-abs-tpot: this figure is not asked: repeats Section VI-B"),
     ("daop-f9-phi", "there is no figure 'daop-f9-phi'; did you mean 'daop-f9-phi-tps'")],
)
def test_a_figure_that_is_not_asked_is_refused_with_the_reason(figure_id: str, sentence: str) -> None:
    with pytest.raises(PapersError) as caught:
        chosen_figures(figure_id=figure_id)
    assert sentence in str(caught.value)


# --- plays ------------------------------------------------------------------------------------------------------------


SMALL = Scenario(trace="mini-moe", model=None, cached_share=0.25, prompt_tokens=4, generated_tokens=3)
POLICIES = [SMALL.with_(policy=policy) for policy in ("on-demand", "naive-cpu")]


def test_a_scenario_that_several_figures_need_is_played_once() -> None:
    names = [name for name, _ in played([*POLICIES, *POLICIES])]
    assert sorted(names) == sorted(key(scenario) for scenario in POLICIES)


def test_plays_are_added_to_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "plays.csv"
    assert add_plays(file, POLICIES[:1]) == 1
    first = file.read_text()
    assert add_plays(file, POLICIES) == 1
    assert file.read_text().startswith(first)
    assert add_plays(file, POLICIES) == 0
    plays = read_plays(file)
    assert set(plays) == {key(scenario) for scenario in POLICIES}
    assert dict(played(POLICIES[:1]))[key(POLICIES[0])]["tpot_ms"] == pytest.approx(
        plays[key(POLICIES[0])]["tpot_ms"], rel=1e-5
    )


IMPOSSIBLE = SMALL.with_(policy="on-demand", gpu_memory_gb=0.001, cached_share=None)


def test_a_refusal_is_kept_with_its_message_and_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "plays.csv"
    add_plays(file, [POLICIES[0], IMPOSSIBLE])
    message = read_plays(file)[key(IMPOSSIBLE)]
    assert "memory" in str(message)
    file.write_text(file.read_text().replace(message.partition(":")[0], "earlier"))
    add_plays(file, [POLICIES[0], IMPOSSIBLE])
    assert read_plays(file)[key(IMPOSSIBLE)] == message


def test_a_figure_that_is_refused_counts_as_missed() -> None:
    paper = toy_paper()
    refused = FigureScore(figure("toy-hits", 50.0), paper, None, "it does not fit")
    board = Scoreboard([refused, FigureScore(figure("toy-speed", 2.0), paper, 2.0)])
    [summary] = board.summaries()
    assert (summary.figures, summary.near, summary.far) == (2, 0.5, 0.5)
    assert board.furthest() == [refused]
    assert board.not_played == []


def test_the_refusal_of_any_play_is_that_of_the_figure() -> None:
    plays = {key(one): "no room" for one in needed(["daop-f9-phi-tps"])[:1]}
    assert scoreboard(["daop-f9-phi-tps"], plays).scores[0].refused == "no room"


def test_what_stops_amid_a_line_leaves_the_lines_before(tmp_path: Path) -> None:
    file = tmp_path / "plays.csv"
    add_plays(file, POLICIES[:1])
    first = file.read_bytes()
    with small_disk(len(first) + 20), pytest.raises(OSError, match=r"plays\.csv"):
        add_plays(file, POLICIES)
    assert file.read_bytes() == first
    assert list(tmp_path.iterdir()) == [file]


def test_a_key_holds_what_differs_from_the_defaults() -> None:
    assert key(Scenario()) == "{}"
    assert key(Scenario(batch=4, parameters={"window": 2})) == '{"parameters": {"window": 2}, "batch": 4}'


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(PapersError, match=r"other.csv: expected a file of plays"):
        read_plays(tmp_path / "other.csv")
    assert read_plays(tmp_path / "none.csv") == {}
