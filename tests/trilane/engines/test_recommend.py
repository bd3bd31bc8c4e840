"""All models on one machine: the rule for the format, speeds that are those of tune, and what does not run."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.kit.depth import DEEP
from trilane.engines.host_memory import channels_of, larger_ram_gib, most_ram_gib
from trilane.engines.model_formats import FORMATS, Bench, best_format
from trilane.engines.question import FitError, Question
from trilane.engines.recommend import (
    PATIENCE_S,
    SORTS,
    USES,
    Recommendation,
    Recommended,
    RecommendQuestion,
    Use,
    recommend,
    shapes_of,
)
from trilane.engines.refusals import missing
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
    bench = Bench(asked)
    return best_plain(asked, asked.hardware, asked.shape_with("f16"), bench.engine)


def fastest_ms(question: RecommendQuestion, model: str) -> float:
    """The shortest answer, of the formats of at least four bits that run."""
    enough = [one for one in question.benches(model) if one.shape.weight_bits >= 4 and one.runs]
    return min(one.best.answer_ms for one in enough)


def row(answer: Recommendation, model: str) -> Recommended:
    return next(one for one in answer.runs if one.model == model)


# --- three models on two cards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "formats"), [
    (OWNER, {"qwen3-30b-a3b": "q4_k_m", "olmoe-1b-7b": "q5_k_m"}),
    ({"gpu": "rtx-5090", "ram": "ddr5-5600", "ram_gb": 64},
     {"gpt-oss-120b": "mxfp4", "qwen3-30b-a3b": "q6_k", "olmoe-1b-7b": "q8_0"}),
], ids=["12 GB", "32 GB"])
def test_three_models_on_two_cards(machine: dict[str, Any], formats: dict[str, str]) -> None:
    """The published format; as many bits as cost little time, on the GPU or off it."""
    answer = recommend(models=THREE, **machine)
    assert {one.model: one.weights for one in answer.runs} == formats
    assert [one.model for one in answer.unable] == [name for name in THREE if name not in formats]
    assert {one.model for one in answer.runs if one.tuned.host_layers == 0} >= {"olmoe-1b-7b"}


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine["gpu"])
def test_more_bits_cost_at_most_a_quarter_of_the_time(machine: dict[str, Any]) -> None:
    """With the same settings: tune itself gives 5 % for a KV cache of more bits."""
    question = RecommendQuestion(machine)
    for model in ("qwen3-30b-a3b", "deepseek-v2-lite", "lfm2-8b-a1b"):
        best = question.best_format(model)
        assert best is not None
        if best.shape.weight_bits >= 4:
            assert best.best.answer_ms <= 1.25 * 1.05 * fastest_ms(question, model)


def bench(bits: float, answer_s: float, first_s: float = 1.0) -> Bench:
    """A format with the same times for all settings; endless is without room."""
    best = SimpleNamespace(answer_ms=1e3 * answer_s, ttft_ms=1e3 * first_s)
    return cast("Bench", SimpleNamespace(
        shape=SimpleNamespace(weight_bits=bits), runs=answer_s < inf, best=best, search=SimpleNamespace(best=None),
        answer_ms=lambda _: 1e3 * answer_s,
    ))


@pytest.mark.parametrize(("benches", "bits"), [
    ([bench(8.5, 20), bench(5.7, 12), bench(4.2, 10), bench(2.9, 5)], 5.7),
    ([bench(8.5, 20), bench(4.8, 17), bench(4.2, 10), bench(2.9, 5)], 4.2),
    ([bench(4.2, inf), bench(3.8, 180, 144), bench(3.1, 60, 15), bench(2.9, 50, 15)], 3.1),
    ([bench(4.2, inf), bench(3.8, 180, 144), bench(2.9, 50, 15)], 2.9),
    ([bench(4.2, 90, 65), bench(3.8, 70, 50), bench(2.9, 60, 45)], 3.8),
    ([bench(4.2, 90, 65), bench(3.8, 85, 62)], 4.2),
    ([bench(4.2, inf), bench(2.9, inf)], None),
], ids=["a quarter", "much slower", "below four bits", "144 s for a token", "patience", "no patience", "no room"])
def test_the_most_bits_that_cost_little_time(benches: list[Bench], bits: float | None) -> None:
    best = best_format(benches, patience_ms=60_000)
    assert (best and best.shape.weight_bits) == bits


def test_half_the_layers_on_the_host_are_not_worth_half_a_bit() -> None:
    """Mixtral in q4_k_m has 1.7 times the answer of iq4_xs on 24 GB."""
    machine = {"gpu": "rtx-4090", "ram": "ddr5-6000", "cpu": "ryzen-9-7950x", "ram_gb": 64}
    assert row(recommend(models=["mixtral-8x7b"], **machine), "mixtral-8x7b").weights == "iq4_xs"


@pytest.mark.parametrize("machine", MACHINES if DEEP else MACHINES[:3], ids=lambda machine: machine["gpu"])
@pytest.mark.parametrize("use", USES)
def test_every_row_is_the_answer_of_tune_to_the_digit(machine: dict[str, Any], use: Use) -> None:
    models = ("qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite")
    answer = recommend(use, models, **machine)
    assert answer.runs
    for one in answer.runs:
        assert one.tuned == by_tune(answer.question, one.model, one.weights)


def test_a_disk_adds_models_and_changes_none_of_the_others() -> None:
    models = ("qwen3-30b-a3b", "hunyuan-a13b", "gpt-oss-120b")
    without, with_disk = (recommend(models=models, **OWNER, disk=disk) for disk in (None, "nvme-4x4"))
    assert {one.model for one in without.runs} == {"qwen3-30b-a3b", "hunyuan-a13b"}
    assert [one for one in with_disk.runs if one.model != "gpt-oss-120b"] == list(without.runs)
    assert row(with_disk, "gpt-oss-120b").tuned.memory.disk_bytes > 0


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


def test_rows_that_try_the_patience_stand_below() -> None:
    answer = recommend("chat", ("qwen3-30b-a3b", "gpt-oss-20b", "olmoe-1b-7b"), **OWNER)
    slow = replace(answer.runs[0], tuned=replace(answer.runs[0].tuned, ttft_ms=1e3 * PATIENCE_S["chat"] + 1))
    patient = replace(answer, runs=(slow, *answer.runs[1:]))
    assert patient.question.has_drawback(slow.tuned)
    assert patient.sorted_by("size")[-1] == slow


# --- what does not run ------------------------------------------------------------------------------------------------


def test_what_does_not_run_has_the_least_memory_with_which_it_would_and_its_speed_then() -> None:
    [one] = recommend(models=["gpt-oss-120b"], **OWNER).unable
    assert one.ram_gib == 64
    assert one.short is None
    then = row(recommend(models=["gpt-oss-120b"], **{**OWNER, "ram_gb": 64}), "gpt-oss-120b")
    assert one.then == then.tuned
    assert recommend(models=["gpt-oss-120b"], **{**OWNER, "ram_gb": 48}).unable


def test_of_what_does_not_run_the_least_missing_is_first() -> None:
    models = ("kimi-k2", "deepseek-v3", "gpt-oss-120b", "glm-4.5-air")
    unable = recommend(models=models, **{**OWNER, "ram_gb": 16}).unable
    assert [one.model for one in unable] == ["gpt-oss-120b", "glm-4.5-air", "deepseek-v3", "kimi-k2"]
    sizes = [one.ram_gib for one in unable]
    assert sizes[2:] == [None, None]
    assert sorted(filter(None, sizes)) == sizes[:2]


def test_no_more_memory_is_advised_than_the_board_takes() -> None:
    question = RecommendQuestion(OWNER).of("kimi-k2").fit
    assert most_ram_gib(question) == 2 * 2 * 32  # channels, modules of each, GiB of the largest
    [one] = recommend(models=["kimi-k2"], **OWNER).unable
    assert one.ram_gib is None
    assert one.short is not None
    assert one.short.memory == "host"


def test_of_two_memories_that_are_short_the_one_that_lacks_most_is_told() -> None:
    """The card lacks less than a gigabyte, the host hundreds."""
    small = {"gpu": "rtx-4060", "ram": "ddr5-5600", "ram_gb": 32}
    [one] = recommend(models=["kimi-k2"], **small).unable
    assert one.short is not None
    assert one.short.memory == "host"
    assert one.short.missing_bytes > 300e9


def test_every_verb_advises_the_same_sizes_of_memory() -> None:
    """Refusals of fit and tune took any size, and the rules of a desktop's slots stood in two places."""
    question = RecommendQuestion(OWNER).of("gpt-oss-120b").fit
    assert larger_ram_gib(question) == [48, 64, 96, 128]
    ways = missing(replace(question, model="kimi-k2")).ways
    assert not any("ram_gb" in way.changes for way in ways or ())
    assert larger_ram_gib(Question("gpt-oss-20b", gpu="apple-m4-pro", ram_gb=24)) == [32, 48, 64]
    assert larger_ram_gib(Question("gpt-oss-20b", machine="rtx4090-ddr5")) == []


def test_a_laptop_has_a_slot_a_channel() -> None:
    machine = {"gpu": "rtx-4060-laptop", "ram": "ddr5-5600", "cpu": "ryzen-9-7945hx", "ram_gb": 16}
    assert most_ram_gib(RecommendQuestion(machine).of("kimi-k2").fit) == 2 * 64


def test_a_machine_without_named_modules_has_no_known_channels() -> None:
    assert channels_of(Question("gpt-oss-20b", gpu="apple-m4-pro")) is None
    assert channels_of(Question("gpt-oss-20b", machine="rtx4090-ddr5")) is None


def test_one_memory_that_is_short_is_told_as_such() -> None:
    [one] = recommend(models=["kimi-k2"], gpu="apple-m4-max").unable
    assert one.short is not None
    assert one.short.memory == "only"
    assert one.short.missing_bytes > 0


@pytest.mark.parametrize("use", USES)
def test_the_lengths_of_a_use_are_powers_of_two_and_fit_its_window(use: Use) -> None:
    prompt, generated, window = USES[use]
    assert prompt + generated <= window
    assert all(tokens.bit_count() == 1 for tokens in (prompt, generated, window))


def test_an_unknown_use_is_refused() -> None:
    with pytest.raises(FitError, match="use"):
        recommend("poems", **OWNER)  # type: ignore[arg-type]
