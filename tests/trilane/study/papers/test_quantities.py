"""The facts of a play, and the quantities of papers that are made of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from policies.papers.edgemoe import ActivationProfile
from sim.runs.hits import layer_frame
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import play
from tests.kit.depth import deep
from trilane.study.papers.paper import AskingWay
from trilane.study.papers.plays import key, needed, read_plays
from trilane.study.papers.quantities import FACTS, QUANTITIES, observed
from trilane.study.papers.sources import chosen_figures, source_of, sources

# --- the facts of a play and the quantities that are made of them -----------------------------------------------------


MINE = {"tpot_ms": 20.0, "ttft_ms": 400.0, "generated_tokens": 30.0, "expert_ms": 15.0, "expert_cpu_ms": 6.0,
        "decode_resident_hit_rate": 0.6, "stall_h2d_share": 0.75, "low_score_loads": 0.4, "routed_gib": 8.0,
        "shared_gib": 1.0, "other_gib": 0.5, "energy_j_per_token": 50.0, "prompt_j": 1500.0,
        "served_hit_rate": 0.8, "last_hits_max": 0.7, "layer_ms": 0.5, "copy_ms": 2.0, "cpu_expert_ms": 3.0}
SHARES = ("last_hits_max", "top1_accuracy", "top2_accuracy", "recall", "top_score_accuracy", "top_score_active",
          "phase_likeness")
BASE = {"tpot_ms": 30.0, "ttft_ms": 200.0, "generated_tokens": 30.0, "expert_ms": 12.0, "expert_cpu_ms": 4.0,
        "decode_resident_hit_rate": 0.5, "energy_j_per_token": 75.0, "prompt_j": 2250.0}


@pytest.mark.parametrize(("name", "value"), [
    ("speedup", 1.5), ("gain", 50.0), ("reduction", 100 / 3), ("prefill_speedup", 0.5),
    ("prefill_reduction", -100.0), ("steps_per_s", 50.0), ("answer_tokens_per_s", 30.0), ("answer_speedup", 1.1),
    ("step_s", 0.02), ("expert_s", 0.45), ("expert_loss", 20.0), ("expert_cpu_change_s", 0.06), ("hit_rate", 60.0),
    ("hit_gain", 10.0), ("cache_ratio", 80.0), ("cache_ratio_improvement", 60.0), ("low_score_share", 30.0),
    ("no_load_share", 25.0), ("tokens_per_kj", 10.0), ("energy_gain", 1.5), ("model_gib", 9.5),
    ("last_hits_max", 70.0), ("layer_ms", 0.5), ("copy_ms", 2.0), ("copy_over_layer", 4.0), ("cpu_over_copy", 1.5),
])
def test_a_quantity_by_hand(name: str, value: float) -> None:
    quantity = QUANTITIES[name]
    assert quantity.of(MINE, BASE if quantity.compares else {}) == pytest.approx(value)


@pytest.mark.parametrize(("name", "fact"), [
    ("hit_rate", "decode_resident_hit_rate"), ("copy_share", "h2d_busy_share"), ("compute_share", "gpu_busy_share"),
    ("plan_share", "plan_overhead_share"), *((name, name) for name in SHARES),
])
def test_a_share_is_told_in_percent(name: str, fact: str) -> None:
    assert QUANTITIES[name].unit == "%"
    assert QUANTITIES[name].of({fact: 0.25}, {}) == 25.0


def test_every_quantity_is_made_of_facts_that_are_there() -> None:
    facts = dict.fromkeys((*FACTS, "routed_gib", "shared_gib", "other_gib"), 0.5)
    assert all(math.isfinite(quantity.of(facts, facts)) for quantity in QUANTITIES.values())


SMALL = Scenario(trace="mini-moe", model="phi-3.5-moe:8", cached_share=0.25, prompt_tokens=8, generated_tokens=6)


def test_facts_of_a_play() -> None:
    facts = observed(prepare(SMALL.with_(policy="dali")))
    assert set(facts) < set(FACTS)
    assert facts["generated_tokens"] == 6
    assert facts["layer_ms"] == pytest.approx(facts["tpot_ms"] / 8)
    assert 0 < facts["expert_gpu_ms"] <= facts["expert_ms"] < facts["tpot_ms"]
    assert 0 < facts["expert_cpu_ms"] <= facts["expert_ms"]
    assert 0 <= facts["top1_accuracy"] <= 1
    assert 0 < facts["recall"] <= 1
    assert 0 < facts["phase_likeness"] < 1


def test_the_last_hits_are_those_of_the_last_eight_steps_of_an_answer_that_is_played_whole() -> None:
    answer = SMALL.with_(policy="on-demand", parameters={"cache": "lru"}, generated_tokens=12)
    prepared = prepare(answer)
    layers = layer_frame(play(prepared).spans)
    steps = sorted({step for step, phase in zip(layers.step, layers.phase, strict=True) if phase == "decode"})[4:]
    rates = []
    for layer in range(8):
        mine = layers[(layers.layer == layer) & layers.step.isin(steps)]
        rates.append(sum(mine.hits) / sum(mine.active))
    assert len(steps) == 8
    assert 0 < min(rates) < max(rates) < 1
    assert observed(prepared)["last_hits_max"] == pytest.approx(max(rates))
    assert "last_hits_max" not in observed(prepare(answer.with_(sampled_steps=10)))
    assert "last_hits_max" not in observed(prepare(answer.with_(generated_tokens=7)))


def test_the_energy_of_a_prompt_is_that_of_a_platform_whose_watts_are_known() -> None:
    known = observed(prepare(SMALL.with_(policy="daop", hardware="a6000-i9-10980xe")))
    idle_w, busy_w = 120 + 22 + 40, 120 + 300 + 165  # platform, GPU, CPU
    assert idle_w < known["prompt_j"] / known["ttft_ms"] * 1e3 < busy_w
    assert "prompt_j" not in observed(prepare(SMALL.with_(policy="daop")))


def test_costs_of_one_token_and_one_expert_are_told_in_ms() -> None:
    prepared = prepare(SMALL.with_(policy="dali"))
    facts, expert, step = observed(prepared), prepared.costs.experts[0], prepared.costs.step(1, (1,))
    assert (facts["copy_ms"], facts["cpu_expert_ms"]) == (expert.copy_ns / 1e6, expert.cpu_ns[1] / 1e6)
    assert facts["exchange_ms"] == (step.activations_ns + step.result_ns) / 1e6


def test_perfect_forecasts_are_perfect() -> None:
    facts = observed(prepare(SMALL.with_(policy="oracle", batch=2)))
    assert (facts["recall"], facts["top1_accuracy"], facts["top2_accuracy"]) == (1.0, 1.0, 1.0)


def test_everything_on_the_cpu_has_no_copies_and_no_forecast() -> None:
    facts = observed(prepare(SMALL.with_(policy="naive-cpu")))
    assert facts["h2d_busy_share"] < 0.2
    assert facts["expert_gpu_ms"] == 0
    assert "recall" not in facts
    assert "top2_accuracy" not in facts


def test_a_profile_of_activations_is_a_forecast_of_the_busiest_experts() -> None:
    facts = observed(prepare(SMALL.with_(policy="edgemoe", batch=2)))
    assert 0 < facts["top1_accuracy"] < 1
    assert "recall" not in facts  # a profile names experts, not those of a token


def test_a_profile_is_asked_with_what_the_tokens_used_in_both_layers_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are two: all but the first layer that is forecast."""
    without: set[tuple[int, bool]] = set()
    workloads = ActivationProfile.workloads

    def noted(profile: ActivationProfile, layer: int, before: Any, earlier: Any = None) -> Any:
        without.add((layer, earlier is None))
        return workloads(profile, layer, before, earlier)

    monkeypatch.setattr(ActivationProfile, "workloads", noted)
    observed(prepare(SMALL.with_(policy="edgemoe", batch=2)))
    assert without == {(layer, layer == 1) for layer in range(1, 8)}


def test_loads_are_of_low_score_or_of_top_score_experts() -> None:
    parameters = {"substitution": 1e-9, "assigner": "load-all", "prefetch": "none"}
    facts = observed(prepare(SMALL.with_(policy="mix", parameters=parameters)))
    assert facts["low_score_loads"] + facts["top_score_loads"] == pytest.approx(1)
    assert 0 < facts["low_score_loads"] < 1
    smoe = observed(prepare(SMALL.with_(policy="smoe", batch=2)))
    assert 0 < smoe["top_score_accuracy"] <= 1
    assert smoe["decode_resident_hit_rate"] <= smoe["served_hit_rate"] <= 1  # prefetches on their way count as well


RENEW = "remove trilane/study/papers/plays.csv, and: trilane papers --play trilane/study/papers/plays.csv"


def test_the_file_holds_what_figures_need_and_nothing_else() -> None:
    assert set(read_plays()) >= {key(scenario) for scenario in needed(chosen_figures(), {AskingWay.STUDIED})}, RENEW
    assert set(read_plays()) <= {key(scenario) for scenario in needed(chosen_figures(among=sources()))}, RENEW


@pytest.mark.parametrize("figure_id", [
    *("dali-t9-mixtral-4-1", "hybrimoe-f9-mixtral-mrs", "daop-f9-mixtral-tps"),
    *(pytest.param(slow, marks=deep) for slow in ("hybrimoe-t3-decode-all-s", "smoe-intro-hit", "se-copy-share-lo")),
])
def test_a_play_gives_what_the_file_holds(figure_id: str) -> None:
    paper = source_of(figure_id)
    question = paper.questions[figure_id]
    scenario = paper.cases(question, question.method)[0].draws[0]
    kept = read_plays()[key(scenario)]
    assert observed(prepare(scenario)) == pytest.approx(kept, rel=1e-4, abs=1e-9), RENEW
