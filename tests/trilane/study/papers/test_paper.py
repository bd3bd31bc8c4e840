"""Published figures, and papers as they are asked: settings, questions, and what they say of themselves."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sim.costs.engine import FittedEngine, load_engine
from tests.kit.results import VALUES, figure, toy_paper
from traces.models.names import parted
from traces.synthesis.published import published_routing
from trilane.common.schema import SchemaError
from trilane.common.yaml_files import yaml_text
from trilane.fit.fit import engine_part
from trilane.study.papers.engine_question import EngineQuestion
from trilane.study.papers.figures import PapersError, askable, published, read_figures
from trilane.study.papers.paper import AskingWay, Paper, PaperQuestion
from trilane.study.papers.plays import key, needed
from trilane.study.papers.quantities import QUANTITIES
from trilane.study.papers.sources import further_sources, papers_in, read_papers, sources
from trilane.study.papers.ways import scenarios


def test_values_in_lists_make_cases_each_with_draws_of_other_sequences() -> None:
    paper = toy_paper()
    cases = paper.cases(paper.questions["toy-speed"], "ours")
    assert [dict(case.about) for case in cases] == [
        {"model": model, "batch": batch} for model in ("small", "large") for batch in (1, 2)
    ]
    draws = cases[1].draws
    assert [(draw.model, draw.batch, draw.seed, draw.sequences) for draw in draws] == [
        ("mini-moe", 2, 0, (0, 1)), ("mini-moe", 2, 1, (2, 3)),
    ]


def test_a_batch_that_takes_all_texts_is_drawn_once() -> None:
    paper = toy_paper(settings={"both": {"batch": 3}})
    [case] = paper.cases(paper.questions["toy-speed"], "ours")
    assert [draw.sequences for draw in case.draws] == [(0, 1, 2)]


def test_settings_of_the_question_are_stronger_than_those_of_method_variant_and_model() -> None:
    paper = toy_paper(
        setting={**VALUES["setting"], "cached_share": 0.1},
        models={"large": {"model": "phi-3.5-moe:8", "cached_share": 0.2, "hardware": "rtx4090-ddr5"}},
        methods={"ours": {"policy": "on-demand", "cached_share": 0.3, "parameters": {"cache": "lru"}}},
        settings={"at": {"cached_share": 0.5}},
        questions={"q": {"ask": "hit_rate", "method": "ours", "at": "at", "set": {"parameters": {"start": "popular"}}}},
        headlines=[],
    )
    [case] = paper.cases(paper.questions["q"], "ours")
    scenario = case.draws[0]
    assert (scenario.cached_share, scenario.hardware, scenario.engine) == (0.5, "rtx4090-ddr5", "pytorch")
    assert scenario.parameters == {"cache": "lru", "demand_slots": 1, "start": "popular"}


def test_without_a_trace_the_model_gets_synthetic_routing_of_the_length_that_is_played() -> None:
    setting = {"engine": "pytorch", "prompt_tokens": 500, "generated_tokens": 64, "sampled_steps": 12}
    paper = toy_paper(setting={**setting, "sampled_prompt_tokens": 64}, models={"m": {"model": "mixtral-8x7b@q4_k_m"}},
                      variants={})
    [case] = paper.cases(paper.questions["toy-hits"], "ours")
    assert case.draws[0].trace == "synthetic:mixtral-8x7b/4x64+12"


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"questions": {"q": {"ask": "speed", "method": "ours"}}}, "q: there is no quantity 'speed'; did you mean"),
    ({"questions": {"q": {"ask": "hit_rate", "method": "mine"}}}, "q: there is no method 'mine'"),
    ({"questions": {"q": {"ask": "hit_rate", "method": "ours", "at": "x"}}}, "q: there is no setting 'x'"),
    ({"questions": {"q": {"ask": "speedup", "method": "ours"}}}, "q: expected `over` with quantities that compare"),
    ({"headlines": ["toy-sped"]}, "Toy: there is no figure 'toy-sped'; did you mean 'toy-speed'"),
    ({"misses": [{"why": "so", "figures": ["gone"]}]}, "Toy: there is no figure 'gone'"),
])
def test_names_that_are_not_there_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SchemaError) as caught:
        toy_paper(**{"headlines": [], **changes})
    assert str(caught.value).startswith("toy.yaml: ")
    assert sentence in str(caught.value)


# --- the papers that come with the program ----------------------------------------------------------------------------


def test_every_figure_that_can_be_asked_is_asked_and_at_least_180_were_not_put_in() -> None:
    papers = read_papers()
    assert sorted(papers) == ["DALI", "DAOP", "HybriMoE", "SE", "SMoE"]
    figures = {one.id: one for one in read_figures().values() if not one.left_out}
    assert sum(len(paper.questions) for paper in papers.values()) == len(figures)
    assert sum(not papers[one.paper].put_in_by(one.id) for one in figures.values()) >= 180


def test_a_figure_with_the_plays_of_one_that_was_put_in_is_put_in() -> None:
    for paper in read_papers().values():
        plays = {name: _plays(paper, question) for name, question in paper.questions.items()}
        put_in = [played for name, played in plays.items() if paper.put_in_by(name)]
        for name, (ask, mine) in plays.items():
            if not paper.put_in_by(name):
                assert not [1 for other, theirs in put_in if ask == other and mine <= theirs], name


def _plays(paper: Paper, question: PaperQuestion) -> tuple[str, set[tuple[str, str]]]:
    """The quantity, and its plays by part."""
    parts = {"mine": [question.method], "base": question.baselines}
    return question.ask, {
        (part, key(draw))
        for part, methods in parts.items()
        for method in methods
        for case in paper.cases(question, method)
        for draw in case.draws
    }


def test_the_unit_of_a_figure_is_that_of_its_quantity() -> None:
    same = {"percentage points (or %)": "points", "percentage points": "points", "C_cpu/C_load": "x"}
    for one in askable().values():
        quantity = QUANTITIES[sources()[one.paper].asked[one.id].ask]
        if quantity.unit != "points":
            assert quantity.unit == same.get(one.unit, one.unit), one.id


def test_every_scenario_of_the_papers_can_be_made() -> None:
    for paper in sources().values():
        for figure_id in paper.asked:
            assert needed([figure_id])


@pytest.mark.parametrize(("kind", "value", "simulated", "factor"), [
    ("exact", 2.0, 3.0, 1.5), ("maximum", 8.0, 4.0, 0.5), ("exact", -20.0, -10.0, 0.5),
    ("upper_bound", 1.0, 0.1, 1.0), ("upper_bound", 1.0, 1.2, 1.2),
    ("lower_bound", 60.0, 90.0, 1.0), ("lower_bound", 60.0, 30.0, 0.5),
])
def test_a_bound_is_kept_by_every_value_on_its_right_side(
    kind: str, value: float, simulated: float, factor: float
) -> None:
    assert figure(value=value, kind=kind).log_ratio(simulated) == pytest.approx(math.log(factor))


@pytest.mark.parametrize("simulated", [-1.0, 0.0])
def test_another_sign_is_infinitely_far(simulated: float) -> None:
    assert figure(value=3.0).log_ratio(simulated) == -math.inf


def test_every_figure_that_is_asked_has_a_value_and_a_place() -> None:
    asked = list(askable().values())
    assert len(asked) > 200
    assert all(each.value not in (None, 0.0) and each.where for each in asked)


@pytest.mark.parametrize(("line", "sentence"), [
    ("a,P,here,q,,,,many,x,exact,", "line 2: value: expected a number <= 1e+09 or an empty cell, got 'many'"),
    ("a,P,here,q,,,,1,x,perhaps,", "line 2: kind: expected "),
    ("a,P,here,q,,,,1,x,exact,\na,P,here,q,,,,2,x,exact,", "expected an id of its own for every figure"),
])
def test_a_file_that_is_wrong_is_refused_in_one_sentence(tmp_path: Path, line: str, sentence: str) -> None:
    file = tmp_path / "figures.csv"
    file.write_text(f"id,paper,where,quantity,method,baseline,model,value,unit,kind,left_out\n{line}\n")
    with pytest.raises(PapersError) as caught:
        read_figures(file)
    assert sentence in str(caught.value)


# --- further sources --------------------------------------------------------------------------------------------------


PROGRAM = {"ours": {"methods": ["ours", "third"], "calibrated_by": "toy-hits"}}
ENGINE = {"ask": "decode_tokens_per_s", "engine": "llama.cpp", "model": "qwen3-30b-a3b", "weights": "q4_k_m",
          "gpu": "rtx-3060", "ram": "ddr4-3200", "cpu": "ryzen-5-5600", "prompt": 512, "generated": 64}


def test_a_source_states_programs_and_questions_to_engines() -> None:
    paper = toy_paper(programs=PROGRAM, engine_questions={"toy-engine": ENGINE})
    assert paper.programs["ours"].calibrated_by == "toy-hits"
    assert list(paper.asked) == ["toy-speed", "toy-hits", "toy-engine"]


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"programs": {"p": {"methods": ["mine"]}}}, "p: there is no method 'mine'"),
    ({"programs": {**PROGRAM, "p": {"methods": ["third"]}}}, "'third': expected one program, got 'ours' and 'p'"),
    ({"programs": {"p": {"methods": ["ours"], "calibrated_by": "x"}}}, "p: there is no figure 'x'"),
    ({"engine_questions": {"toy-hits": ENGINE}}, "toy-hits: expected it among questions or engine_questions"),
    ({"engine_questions": {"q": {**ENGINE, "ask": "speed"}}}, "engine_questions.q.ask: expected 'decode_tokens_per_s'"),
    ({"engine_questions": {"q": {**ENGINE, "promt": 1}}}, "'promt'; did you mean 'prompt'"),
])
def test_programs_and_engine_questions_that_are_wrong_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SchemaError) as caught:
        toy_paper(**changes)
    assert sentence in str(caught.value)


def test_what_an_engine_is_asked_is_what_fit_answers() -> None:
    question = EngineQuestion(**ENGINE, os="linux")
    engine = engine_part(question.question).engine
    assert engine is not None
    answered = question.answered()
    assert answered["decode_tokens_per_s"] == pytest.approx(1e3 / engine.tpot_ms)
    assert answered["prompt_tokens_per_s"] == pytest.approx(512e3 / engine.ttft_ms)
    assert answered["first_token_s"] == pytest.approx(engine.ttft_ms / 1e3)
    assert answered["speed_band"] == engine.error.band
    assert question.command.startswith("trilane fit --engine llama.cpp --model qwen3-30b-a3b --weights q4_k_m --gpu")


def test_tokens_a_second_of_a_batch_are_those_of_all_sequences() -> None:
    question = EngineQuestion(**ENGINE, batch=4)
    engine = engine_part(question.question).engine
    assert engine is not None
    assert question.answered()["decode_tokens_per_s"] == pytest.approx(4e3 / engine.tpot_ms)


def test_all_that_is_asked_of_one_answer_is_one_play() -> None:
    asks = ("decode_tokens_per_s", "prompt_tokens_per_s", "first_token_s")
    assert len({EngineQuestion(**{**ENGINE, "ask": ask}).key for ask in asks}) == 1
    assert EngineQuestion(**ENGINE).key != EngineQuestion(**{**ENGINE, "prompt": 513}).key


def test_a_source_has_a_question_for_each_figure_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(yaml_text({"name": "Toy", "title": "A toy", "source": "ours",
                                                  "engine_questions": {"toy-engine": ENGINE}}))
    assert list(papers_in(tmp_path, {"toy-engine": figure("toy-engine")})) == ["Toy"]
    with pytest.raises(PapersError, match="Toy: expected a question for each figure that is not left out: toy-engine"):
        papers_in(tmp_path, {})


def test_with_nothing_put_in_engines_are_kinds_or_those_that_people_run() -> None:
    for source in sources().values():
        for name in source.engines(AskingWay.NOTHING):
            engine = load_engine(name)
            assert isinstance(engine, FittedEngine) or engine.spread, f"{source.name}: expected a kind, got {name}"


def test_further_sources_say_which_figure_sets_each_program() -> None:
    for source in further_sources().values():
        for program in source.programs.values():
            if program.calibrated_by is not None:
                assert published()[program.calibrated_by].unit != "x", f"{source.name}: expected a time, not a ratio"


def test_hits_to_which_a_models_routing_is_fitted_are_put_in() -> None:
    fitted = {(one.model, round(float(share), 3), round(100 * hits, 1)) for one in published_routing()
              if one.fitted and one.quantity == "lru" and not one.kind for share, hits in one.values.items()}
    found = 0
    for source in sources().values():
        for name, asked in source.questions.items():
            for drawn in scenarios(source, asked) if asked.ask == "hit_rate" else ():
                share = round(drawn.cached_share or 0.0, 3)
                if (parted(str(drawn.model)).model, share, published()[name].value) in fitted:
                    found += 1
                    assert source.put_in_by(name, AskingWay.NOTHING), f"{name}: expected it to be put in"
    assert found
