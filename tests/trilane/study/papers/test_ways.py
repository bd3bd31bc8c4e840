"""Ways of asking: engines that were set, kinds with their ends, one number; and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sim.costs.engine import load_engine
from sim.runs.scenario import Scenario
from tests.kit.results import ToyFigures, figure, put_in, toy_paper
from trilane.study.calibrate import CalibrationError
from trilane.study.papers import calibrating, follows, scores
from trilane.study.papers.calibrating import ProgramName, add_calibrations, calibrated, programs
from trilane.study.papers.calibrations import ProgramNumber, read_calibrations
from trilane.study.papers.figures import PublishedFigure
from trilane.study.papers.follows import follows as follows_from
from trilane.study.papers.paper import AskingWay, Paper
from trilane.study.papers.plays import key, plays_of
from trilane.study.papers.scores import FigureScore, score_of, value_of
from trilane.study.papers.ways import Asked, all_asked, cases, is_studied, range_of_kinds, ways_of

LAYER = "software.layer_ns"
PROGRAMS = {"Ours": {"methods": ["ours", "third"], "calibrated_by": "toy-step"}, "Theirs": {"methods": ["theirs"]}}
QUESTIONS = {
    "toy-step": {"ask": "step_s", "method": "ours"},
    "toy-speed": {"ask": "speedup", "method": "ours", "over": "theirs"},
    "toy-hits": {"ask": "hit_rate", "method": "ours"},
}
FOUND = ProgramNumber("Toy", "Ours", "toy-step", "eager", LAYER, 7e5, True)
NUMBER = Asked(AskingWay.ONE_NUMBER, calibrations={("Toy", "Ours"): FOUND})


def toy(**changes: Any) -> Paper:
    """Studied on dali-2025, whose kind is eager."""
    setting = {"trace": "mini-moe", "hardware": "rtx3090-ddr4", "engine": "dali-2025", "cached_share": 0.5,
               "prompt_tokens": 8, "generated_tokens": 4}
    methods = {"ours": {"policy": "on-demand"}, "theirs": {"policy": "naive-cpu"}, "third": {"policy": "fiddler"}}
    return toy_paper(**{"setting": setting, "methods": methods, "questions": QUESTIONS, "programs": PROGRAMS,
                        "kinds": {"dali-2025": "eager"}, "headlines": [], "variants": {}, "draws": 1, **changes})


def asked(paper: Paper, way: Asked, method: str = "ours") -> Scenario:
    """The scenario of a method in one way."""
    [case] = cases(paper, paper.questions["toy-step"], method, way)
    return case.draws[0]


def test_a_figure_is_asked_as_studied_with_one_number_and_with_nothing_but_the_kind() -> None:
    paper = toy()
    assert asked(paper, Asked()).engine == "dali-2025"
    nothing, one = asked(paper, Asked(AskingWay.NOTHING)), asked(paper, NUMBER)
    assert (nothing.engine, nothing.engine_overrides) == ("eager", {})
    assert (one.engine, one.engine_overrides) == ("eager", {LAYER: 7e5})
    assert asked(paper, NUMBER, "third").engine_overrides == {LAYER: 7e5}  # the same program
    assert asked(paper, NUMBER, "theirs").engine_overrides == {}


def test_the_one_number_is_of_one_engine_alone() -> None:
    other = FOUND._replace(engine="native")
    assert asked(toy(), Asked(AskingWay.ONE_NUMBER, calibrations={("Toy", "Ours"): other})).engine_overrides == {}


def test_what_a_file_states_of_an_engine_stays_but_for_the_one_number() -> None:
    stated = {**toy().setting, "engine_overrides": {LAYER: 1e5, "software.copy_ns": 9}}
    paper = toy(setting=stated)
    assert asked(paper, NUMBER).engine_overrides == {LAYER: 7e5, "software.copy_ns": 9}
    slow = asked(paper, Asked(AskingWay.NOTHING, {"Ours": "slow"})).engine_overrides
    assert (slow[LAYER], slow["software.copy_ns"]) == (1e5, 9)
    assert slow["software.cpu_share"] == load_engine("eager").spread["software.cpu_share"].slow  # type: ignore[union-attr]


def test_programs_are_at_their_ends_independently_of_each_other() -> None:
    paper = toy()
    ends = [each.ends for each in range_of_kinds(paper, paper.questions["toy-speed"])]
    assert len(ends) == 6 * 6
    assert all({"Ours": mine, "Theirs": other} in ends for mine in ("quick", "slow cpu") for other in ("slow", "quick"))
    assert [each.ends for each in range_of_kinds(paper, paper.questions["toy-step"])] == [
        {"Ours": "quick"}, {"Ours": "slow"},
    ]
    assert range_of_kinds(toy(kinds={}), paper.questions["toy-speed"]) == []


def test_for_a_ratio_one_part_of_a_program_is_quick_while_the_others_are_slow() -> None:
    spread = load_engine("eager").spread  # type: ignore[union-attr]
    numbers = asked(toy(), Asked(AskingWay.NOTHING, {"Ours": "slow cpu"})).engine_overrides
    assert numbers["software.cpu_share"] == spread["software.cpu_share"].slow
    assert numbers[LAYER] == spread[LAYER].quick
    numbers = asked(toy(), Asked(AskingWay.NOTHING, {"Ours": "quick copies"})).engine_overrides
    assert numbers["software.link_share"] == spread["software.link_share"].quick
    assert numbers["software.copy_ns"] == spread["software.copy_ns"].quick
    assert numbers["software.cpu_expert_ns"] == spread["software.cpu_expert_ns"].slow


def test_hit_rates_are_not_asked_at_the_ends() -> None:
    paper = toy()
    assert [each.way for each in all_asked(paper, paper.questions["toy-hits"])] == list(AskingWay)
    assert len(all_asked(paper, paper.questions["toy-step"])) == len(AskingWay) + 2


def test_a_source_whose_engine_is_a_kind_was_not_studied() -> None:
    of_kind = toy(setting={**toy().setting, "engine": "eager"}, kinds={})
    assert not is_studied(of_kind, of_kind.questions["toy-step"])
    assert ways_of(of_kind, of_kind.questions["toy-hits"]) == [AskingWay.ONE_NUMBER, AskingWay.NOTHING]


# --- scores -----------------------------------------------------------------------------------------------------------


def test_the_range_goes_from_the_quickest_programs_to_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    paper = toy()
    question = paper.questions["toy-speed"]
    monkeypatch.setattr(scores, "source_of", lambda figure_id: paper)
    monkeypatch.setattr(scores, "published", lambda: {"toy-speed": figure(value=9.0)})
    times = {"ours": {"quick": 5.0, None: 10.0, "slow": 20.0}, "theirs": {"quick": 15.0, None: 30.0, "slow": 90.0}}
    plays = {}
    for end in (None, "quick", "slow", "quick cpu", "slow cpu", "quick copies", "slow copies"):
        for method, ms in times.items():
            way = Asked(AskingWay.NOTHING, end and {"Ours": end, "Theirs": end})  # type: ignore[arg-type]
            plays[key(asked(paper, way, method))] = {"tpot_ms": ms.get(end, ms[None])}
    found = score_of("toy-speed", plays, AskingWay.NOTHING)
    assert (found.simulated, found.low, found.high, found.in_range) == (3.0, 0.75, 18.0, True)
    assert value_of(paper, question, plays, Asked(AskingWay.STUDIED)) is None


@pytest.mark.parametrize(("kind", "value", "inside"), [
    ("exact", 2.0, True), ("exact", 5.0, False), ("upper_bound", 1.5, True), ("upper_bound", 0.5, False),
    ("lower_bound", 2.5, True), ("lower_bound", 3.5, False),
])
def test_a_published_value_is_inside_the_range_if_some_program_meets_it(kind: str, value: float, inside: bool) -> None:
    one = FigureScore(figure(value=value, kind=kind), toy(), 2.0, way=AskingWay.NOTHING, low=1.0, high=3.0)
    assert one.in_range is inside
    assert FigureScore(figure(), toy(), 2.0).in_range is None


# --- what follows -----------------------------------------------------------------------------------------------------


class OneTable(ToyFigures):
    """All in one table."""

    def __missing__(self, figure_id: str) -> PublishedFigure:
        return figure(figure_id, where="Sec 1; Table 1")


MORE = {
    **QUESTIONS, "toy-batch": {"ask": "steps_per_s", "method": "third", "set": {"batch": 2}},
    "toy-other": {"ask": "step_s", "method": "ours", "set": {"model": "large"}},
    "toy-far": {"ask": "step_s", "method": "ours", "set": {"hardware": "rtx4090-ddr5"}},
    "toy-their": {"ask": "step_s", "method": "theirs"},
    "toy-prompt": {"ask": "prefill_speedup", "method": "ours", "over": "theirs"},
}


def followers(paper: Paper, way: AskingWay) -> Mapping[str, str]:
    return {each: given for each in paper.asked if not paper.put_in_by(each, way)
            and (given := follows_from(paper, each, way))}


def test_in_one_table_figures_of_the_program_its_model_and_its_machine_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follows, "published", OneTable)
    expected = dict.fromkeys(["toy-speed", "toy-batch", "toy-prompt"], "toy-step")
    assert followers(toy(questions=MORE), AskingWay.ONE_NUMBER) == expected
    assert followers(toy(questions=MORE), AskingWay.NOTHING) == {}  # nothing was put in


def test_in_other_tables_they_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follows, "published", ToyFigures)
    assert followers(toy(questions=MORE), AskingWay.ONE_NUMBER) == {}


def test_the_same_ratio_follows_whatever_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follows, "published", ToyFigures)
    paper = toy(questions=MORE, put_in=put_in("toy-speed"))
    assert followers(paper, AskingWay.STUDIED) == {"toy-prompt": "toy-speed"}


def test_a_ratio_of_two_times_that_were_put_in_follows_and_of_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follows, "published", ToyFigures)
    both = {**PROGRAMS, "Theirs": {"methods": ["theirs"], "calibrated_by": "toy-their"}}
    paper = toy(questions=MORE, programs=both)
    assert followers(paper, AskingWay.ONE_NUMBER) == {"toy-speed": "toy-step"}  # of prompts nothing was put in
    assert followers(paper, AskingWay.STUDIED) == {}
    assert followers(toy(questions=MORE), AskingWay.ONE_NUMBER) == {}


def test_what_follows_from_a_number_of_another_engine_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follows, "published", OneTable)
    paper = toy(questions=MORE, put_in=[{**put_in("toy-step")[0], "engine": "native"}])
    assert paper.put_in_by("toy-step") == ""
    assert followers(paper, AskingWay.STUDIED) == {}


# --- the one number ---------------------------------------------------------------------------------------------------


@pytest.fixture
def one_source(monkeypatch: pytest.MonkeyPatch) -> Paper:
    """The toy paper as the only source; its step takes 12 ms."""
    paper = toy()
    monkeypatch.setattr(calibrating, "sources", lambda: {"Toy": paper})
    monkeypatch.setattr(calibrating, "published", lambda: {"toy-step": figure("toy-step", 0.012)})
    return paper


def test_the_first_number_of_the_kind_is_set_so_that_the_figure_comes_out(one_source: Paper) -> None:
    found = calibrated(one_source, "Ours")
    assert (found.source, found.program, found.figure, found.engine, found.key, found.met) == (
        "Toy", "Ours", "toy-step", "eager", LAYER, True
    )
    way = Asked(AskingWay.ONE_NUMBER, calibrations={("Toy", "Ours"): found})
    question = one_source.questions["toy-step"]
    plays = {key(one): calibrating.observed_in(calibrating.LastPrepared(), one)
             for one in plays_of(one_source, question, way)}
    assert value_of(one_source, question, plays, way) == pytest.approx(0.012, rel=0.02)


def test_a_figure_that_no_number_gives_leaves_the_nearest(
    one_source: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrating, "published", lambda: {"toy-step": figure("toy-step", 1e-6)})
    found = calibrated(one_source, "Ours")
    assert not found.met
    assert found.value is not None


def test_calibrations_are_added_to_those_of_a_file(one_source: Paper, tmp_path: Path) -> None:
    file = tmp_path / "calibrated.csv"
    assert programs(["Toy"]) == [ProgramName("Toy", "Ours")]
    assert add_calibrations(file, programs(["Toy"])) == 1
    assert add_calibrations(file, programs(["Toy"])) == 0
    [(name, found)] = read_calibrations(file).items()
    assert name == ("Toy", "Ours")
    assert found.met
    assert list(tmp_path.iterdir()) == [file]


def test_a_program_that_cannot_run_says_why(one_source: Paper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = toy(setting={**one_source.setting, "hardware": "rtx9999"})
    monkeypatch.setattr(calibrating, "sources", lambda: {"Toy": refused})
    add_calibrations(tmp_path / "c.csv", programs(["Toy"]))
    [found] = read_calibrations(tmp_path / "c.csv").values()
    assert found.value is None
    assert "rtx9999" in found.refused


def test_an_engine_without_such_numbers_is_refused(one_source: Paper) -> None:
    with pytest.raises(CalibrationError, match="engine 'graphs': expected a kind of programs"):
        calibrated(toy(kinds={"dali-2025": "graphs"}), "Ours")
