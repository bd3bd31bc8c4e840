"""All models on one machine: the rule for the format, speeds that are those of tune, and what does not run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.depth import DEEP
from trilane.engines import recommend as recommending
from trilane.engines.question import FitError
from trilane.engines.recommend import (
    FORMATS,
    SORTS,
    USES,
    Recommendation,
    Recommended,
    RecommendQuestion,
    Use,
    best_format,
    most_ram_gib,
    recommend,
    shapes_of,
)
from trilane.engines.tune.search import best_plain
from trilane.engines.tune.tuned import Tuned

OWNER: dict[str, Any] = {"gpu": "rtx-3060", "ram": "ddr4-3200", "cpu": "ryzen-5-5600", "ram_gb": 32}
THREE = ("gpt-oss-120b", "qwen3-30b-a3b", "olmoe-1b-7b")
MACHINES: tuple[dict[str, Any], ...] = (
    OWNER, {"gpu": "rtx-5090", "ram": "ddr5-5600", "ram_gb": 64}, {"gpu": "none", "ram": "ddr5-5600", "ram_gb": 32},
    {"gpu": "rtx-4060-laptop", "ram": "ddr5-5600", "cpu": "ryzen-9-7945hx", "ram_gb": 16}, {"gpu": "apple-m4-max"},
    {"gpu": "rx-7900-xtx", "ram": "ddr5-6000", "ram_gb": 32},
)


def by_tune(question: RecommendQuestion, model: str, weights: str) -> Tuned:
    """The best plain setting of ``trilane tune``, asked by itself."""
    asked = question.of(model, weights if weights in FORMATS else None)
    bench = recommending.Bench(asked)
    return best_plain(asked, asked.hardware, asked.shape_with("f16"), bench.engine)


def bits_by_rule(question: RecommendQuestion, model: str) -> float | None:
    """The format by the rule as it is written, from what each of them gives."""
    benches = question.benches(model)
    on_gpu = [one.shape.weight_bits for one in benches if one.all_on_gpu and one.shape.weight_bits >= 4]
    usual = next((one.shape.weight_bits for one in benches if one.question.fit.weights == "q4_k_m"), 100.0)
    runs = [one.shape.weight_bits for one in benches if one.runs and one.shape.weight_bits <= usual]
    return max(on_gpu, default=max(runs, default=None))


def row(answer: Recommendation, model: str) -> Recommended:
    return next(one for one in answer.runs if one.model == model)


# --- three models on two cards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "formats"), [
    (OWNER, {"qwen3-30b-a3b": "q4_k_m", "olmoe-1b-7b": "q8_0"}),
    ({"gpu": "rtx-5090", "ram": "ddr5-5600", "ram_gb": 64},
     {"gpt-oss-120b": "mxfp4", "qwen3-30b-a3b": "q6_k", "olmoe-1b-7b": "q8_0"}),
], ids=["12 GB", "32 GB"])
def test_three_models_on_two_cards(machine: dict[str, Any], formats: dict[str, str]) -> None:
    """The published format; the most bits with which all experts are on the GPU; q4_k_m where none has room there."""
    answer = recommend(models=THREE, **machine)
    assert {one.model: one.weights for one in answer.runs} == formats
    assert [one.model for one in answer.unable] == [name for name in THREE if name not in formats]
    assert {one.model for one in answer.runs if one.tuned.host_layers == 0} >= {"olmoe-1b-7b"}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine["gpu"])
def test_the_format_is_that_of_the_rule(machine: dict[str, Any]) -> None:
    question = RecommendQuestion(machine)
    for model in ("qwen3-30b-a3b", "glm-4.5-air", "gpt-oss-20b", "lfm2-8b-a1b"):
        best = best_format(question.benches(model))
        assert (best and best.shape.weight_bits) == bits_by_rule(question, model)


@pytest.mark.parametrize("machine", MACHINES if DEEP else MACHINES[:3], ids=lambda machine: machine["gpu"])
@pytest.mark.parametrize("use", USES)
def test_every_row_is_the_answer_of_tune_to_the_digit(machine: dict[str, Any], use: Use) -> None:
    models = ("qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite")
    answer = recommend(use, models, **machine)
    assert answer.runs
    for one in answer.runs:
        assert one.tuned == by_tune(answer.question, one.model, one.weights)


def test_a_model_in_few_bits_is_told_as_it_is_published() -> None:
    assert row(recommend(models=["gpt-oss-20b"], **OWNER), "gpt-oss-20b").bits == 4.25


def test_no_format_has_fewer_than_two_and_a_half_bits() -> None:
    answer = recommend(models=["qwen3-30b-a3b"], **OWNER)
    assert [one.weights for one in answer.formats] == list(FORMATS)
    assert min(one.bits for one in answer.formats) > 2.5


# --- the whole catalogue ----------------------------------------------------------------------------------------------


def test_models_that_differ_in_training_alone_share_a_row() -> None:
    shapes = shapes_of(None)
    assert "qwen3-coder-30b-a3b" in shapes["qwen3-30b-a3b"]
    assert not {*shapes} & {name for also in shapes.values() for name in also}
    assert shapes_of(["qwen3-coder-30b-a3b"]).keys() == {"qwen3-coder-30b-a3b"}


def test_every_model_is_in_the_table_or_below_it_and_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    answer = recommend(watch=lambda done, of: told.append((done, of)), gpu="rtx-4060", ram="ddr5-5600", ram_gb=16)
    names = [one.model for one in (*answer.runs, *answer.unable)]
    assert sorted(names) == sorted(shapes_of(None))
    assert told == [(done, len(names)) for done in range(len(names))]
    assert all(one.tuned.memory.missing_bytes <= 0 for one in answer.runs)
    assert recommend(gpu="rtx-4060", ram="ddr5-5600", ram_gb=16) == answer


@pytest.mark.parametrize("sort", SORTS)
def test_rows_are_sorted(sort: Any) -> None:
    rows = recommend(models=("qwen3-30b-a3b", "gpt-oss-20b", "olmoe-1b-7b"), **OWNER).sorted_by(sort)
    keys = {"size": [-one.params for one in rows], "speed": [one.tuned.tpot_ms for one in rows],
            "first": [one.tuned.ttft_ms for one in rows]}
    assert keys[sort] == sorted(keys[sort])


# --- what does not run ------------------------------------------------------------------------------------------------


def test_what_does_not_run_has_the_least_memory_with_which_it_would_and_its_speed_then() -> None:
    [one] = recommend(models=["gpt-oss-120b"], **OWNER).unable
    assert one.ram_gib == 64
    assert one.short is None
    then = row(recommend(models=["gpt-oss-120b"], **{**OWNER, "ram_gb": 64}), "gpt-oss-120b")
    assert one.then == then.tuned
    assert recommend(models=["gpt-oss-120b"], **{**OWNER, "ram_gb": 48}).unable


def test_no_more_memory_is_advised_than_the_board_takes() -> None:
    question = RecommendQuestion(OWNER).of("kimi-k2").fit
    assert most_ram_gib(question) == 2 * 2 * 32  # channels, modules of each, GiB of the largest
    [one] = recommend(models=["kimi-k2"], **OWNER).unable
    assert one.ram_gib is None
    assert one.short is not None
    assert one.short.memory == "host"


def test_one_memory_that_is_short_is_told_as_such() -> None:
    [one] = recommend(models=["kimi-k2"], gpu="apple-m4-max").unable
    assert one.short is not None
    assert one.short.memory == "only"
    assert one.short.missing_bytes > 0


def test_an_unknown_use_is_refused() -> None:
    with pytest.raises(FitError, match="use"):
        recommend("poems", **OWNER)  # type: ignore[arg-type]
