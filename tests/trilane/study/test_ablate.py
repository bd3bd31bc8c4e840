"""Ablations: rungs by hand, speed-ups draw by draw, what cannot run, the picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from policies.parts.assigners import LoadAll
from policies.parts.caches import LruCache
from policies.parts.placements import RandomPlacement
from policies.protocols import Composition, Needs
from sim.runs import prepare as preparing
from sim.runs.demand import MissingFromTraceError
from sim.runs.scenario import Scenario
from tests.kit.toys import toy_trace
from traces.file import write_trace
from trilane.output.figures.bars import plot_ladder
from trilane.output.figures.figure_files import PictureError
from trilane.study.ablate import Ablation, ablate, simulate_parts
from trilane.study.compare import compare

SCENARIO = Scenario(trace="mini-moe", model=None, prompt_tokens=4, generated_tokens=3, cached_share=0.25)

DEEP = Scenario(prompt_tokens=4, generated_tokens=2, cached_share=0.25)  # whose trace has every forecast


@pytest.fixture(scope="module")
def dali() -> Ablation:
    return ablate(SCENARIO)


# --- the rows ---------------------------------------------------------------------------------------------------------


def test_the_ladder_adds_the_parts_of_dali(dali: Ablation) -> None:
    labels = ["no part: all experts on the CPU", "+ placement: random", "+ assigner: greedy", "+ cache: window",
              "+ prefetcher: top"]
    parts = ["placement", "assigner", "cache", "prefetcher"]
    assert [row["label"] for row in dali.ladder] == labels
    assert [row["part"] for row in dali.ladder] == [None, *parts]
    assert [row["parts"] for row in dali.ladder] == [parts[:count] for count in range(5)]


def test_the_others_miss_one_part_each(dali: Ablation) -> None:
    parts = ["placement", "assigner", "cache", "prefetcher"]
    assert [row["label"] for row in dali.all_but_one] == [f"without {part}" for part in parts]
    assert [row["parts"] for row in dali.all_but_one] == [[p for p in parts if p != part] for part in parts]
    ladder_before_last = {key: value for key, value in dali.ladder[-2].items() if key not in ("label", "part")}
    assert dali.all_but_one[-1].items() >= ladder_before_last.items()  # the last part, left out


def test_parts_do_what_they_are_for(dali: Ablation) -> None:
    bare, placed, assigned, cached, whole = dali.ladder
    assert bare["decode_resident_hit_rate"] == 0
    assert bare["gpu_busy_share"] < placed["gpu_busy_share"]
    assert placed["decode_resident_hit_rate"] > 0
    assert placed["pcie_bytes_per_token"] == 0
    assert assigned["pcie_swap_bytes_per_token"] == 0
    assert cached["prefetches_used"] == 0
    assert whole["prefetches_used"] + whole["prefetches_late"] + whole["prefetches_wasted"] > 0
    assert cached["staging_bytes"] < whole["staging_bytes"]  # prefetches need slots


def test_the_ladder_ends_with_the_policy_itself(dali: Ablation) -> None:
    [row] = compare(SCENARIO, ["dali"]).rows()
    assert {name: value for name, value in row.items() if name not in ("regret", "draws")}.items() <= (
        dali.ladder[-1].items()
    )


def test_speed_ups_are_taken_draw_by_draw(dali: Ablation) -> None:
    bare, whole = dali.ladder[0]["draws"], dali.ladder[-1]["draws"]
    for row in (*dali.ladder, *dali.all_but_one):
        own = [draw["tpot_ms"] for draw in row["draws"]]
        assert len(own) == 5
        assert row["tpot_ms"] == pytest.approx(fmean(own))
        assert (row["tpot_ms_min"], row["tpot_ms_max"]) == (min(own), max(own))
        assert row["speedup"] == pytest.approx(fmean(b["tpot_ms"] / t for b, t in zip(bare, own, strict=True)))
        assert row["over_whole"] == pytest.approx(fmean(t / w["tpot_ms"] - 1 for t, w in zip(own, whole, strict=True)))
        draws = [(draw["seed"], draw["sequences"]) for draw in row["draws"]]
        assert draws == [(draw["seed"], draw["sequences"]) for draw in bare]


def test_fiddler_has_a_placement_and_an_assigner() -> None:
    found = ablate(SCENARIO.with_(policy="fiddler"), draws=2)
    assert [row["label"] for row in found.ladder[1:]] == ["+ placement: popularity", "+ assigner: cost rule"]
    assert found.ladder[1]["decode_resident_hit_rate"] > found.ladder[0]["decode_resident_hit_rate"] == 0
    placed, whole = found.ladder[1:]
    assert placed["pcie_bytes_per_token"] == 0 <= whole["pcie_bytes_per_token"]


def test_parts_are_switched_off_on_each_of_two_gpus() -> None:
    two = SCENARIO.with_(gpus=2, policy="dali")
    found = ablate(two, draws=1)
    assert [row["refused"] for row in found.ladder] == [None] * 5
    assert found.ladder[-1]["tpot_ms"] == compare(two, ["dali"], draws=1).rows()[0]["tpot_ms"]
    assert found.ladder[0]["decode_resident_hit_rate"] == 0.0 < found.ladder[1]["decode_resident_hit_rate"]


def test_a_policy_without_parts_is_its_own_ladder() -> None:
    found = ablate(SCENARIO.with_(policy="naive-cpu"), draws=1)
    assert [row["parts"] for row in found.ladder] == [[]]
    assert found.all_but_one == []


def test_one_part_needs_no_second_table() -> None:
    found = ablate(SCENARIO.with_(policy="on-demand"), draws=1)
    assert [row["label"] for row in found.ladder] == ["no part: every expert copied, none kept", "+ cache: lru"]
    assert found.all_but_one == []


@pytest.mark.parametrize("name", ["hybrimoe", "edgemoe", "adapmoe", "moe-infinity", "static-threshold", "oracle"])
def test_a_prefetcher_that_is_on_prefetches(name: str) -> None:
    """Without the cache that it brings experts to, too: they are staged, and the row says so."""
    found = ablate(DEEP.with_(policy=name), draws=1)
    for row in (*found.ladder, *found.all_but_one):
        prefetches = sum(row[f"prefetches_{outcome}"] for outcome in ("used", "late", "wasted", "withdrawn"))
        assert (prefetches > 0) == ("prefetcher" in row["parts"])
    [bare] = [row for row in found.all_but_one if row["part"] == "cache"]
    assert bare["label"] == "without cache, prefetches staged"
    assert bare["pcie_swap_bytes_per_token"] == 0


def test_what_is_searched_is_carried_out_whoever_is_placed() -> None:
    """MoE-Lightning's placement finds the plan of its assigner and prefetcher: off, it seats nobody, and no more."""
    found = ablate(DEEP.with_(policy="moe-lightning"), draws=1)
    assert [row["refused"] for row in (*found.ladder, *found.all_but_one)] == [None] * 7
    [empty] = [row for row in found.all_but_one if row["part"] == "placement"]
    assert empty["decode_resident_hit_rate"] == 0
    assert empty["cache_slots"] == found.ladder[-1]["cache_slots"]


def test_the_number_of_processes_changes_no_byte(dali: Ablation) -> None:
    assert json.dumps(ablate(SCENARIO, jobs=2)) == json.dumps(dali)


# --- what cannot run --------------------------------------------------------------------------------------------------


@pytest.fixture
def no_staging(monkeypatch: pytest.MonkeyPatch) -> Ablation:
    """A policy that loads all into its cache and has no staging: with the cache off, loads have no room."""
    compose = preparing.compose

    def composed(*given: Any, **context: Any) -> Composition:
        parts = {"placement": RandomPlacement(0), "assigner": LoadAll(), "cache": LruCache()}
        return replace(compose(*given, **context), **parts, needs=Needs(), demand_slots=0)

    monkeypatch.setattr(preparing, "compose", composed)
    return ablate(SCENARIO.with_(policy="layer-wise", cached_share=0.5, prompt_tokens=1), draws=2)


def test_parts_that_cannot_do_without_another_say_why(no_staging: Ablation) -> None:
    refused = [row for row in (*no_staging.ladder, *no_staging.all_but_one) if row["refused"]]
    assert [row["label"] for row in refused] == ["+ assigner: load all", "without cache"]
    for row in refused:
        assert row["refused"].startswith("the other parts cannot run alone: ")
        assert row["refused"].endswith("without any staging slot: give it demand_slots >= 1")
        assert "tpot_ms" not in row
    assert no_staging.ladder[-1]["speedup"] > 0


def test_an_error_of_the_program_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Composition:
        raise KeyError("ours")

    monkeypatch.setattr(preparing, "without", broken)
    with pytest.raises(KeyError, match="ours"):
        simulate_parts(preparing.prepare(SCENARIO), "fiddler", {}, ())


def test_a_policy_that_cannot_run_is_refused(tmp_path: Path) -> None:
    write_trace(toy_trace([[[0]], [[1]]], prompt_tokens=1), tmp_path / "bare.safetensors")
    scenario = Scenario(trace=str(tmp_path / "bare.safetensors"), model=None, cached_share=0.5)
    with pytest.raises(MissingFromTraceError, match="needs the forecast residual@1"):
        ablate(scenario)


# --- the picture ------------------------------------------------------------------------------------------------------


def made(*times: tuple[float, float], refused: bool = False) -> Ablation:
    """Two draws of a policy with a cache, then a prefetcher, by their TPOT."""
    rows = [
        {"label": label, "labels": [], "parts": [], "refused": None, "speedup": times[0][0] / pair[0],
         "tpot_ms": fmean(pair), "tpot_ms_min": min(pair), "tpot_ms_max": max(pair),
         "draws": [{"tpot_ms": tpot} for tpot in pair]}
        for label, pair in zip(("no part", "+ cache", "+ prefetcher", "without cache"), times, strict=True)
    ]
    rows[2]["parts"] = ["cache", "prefetcher"]
    if refused:
        rows[1] = {"label": "+ cache", "parts": [], "refused": "no room"}
    return Ablation({}, "mine", rows[:3], rows[3:])


def colours(figure: Figure) -> list[str]:
    names = {"#555555": "bare", "#0072b2": "saves", "#d55e00": "costs", "#bbbbbb": "unclear"}
    return [names[to_hex(patch.get_facecolor())] for patch in figure.axes[0].patches]


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_picture_says_which_part_helps() -> None:
    """The cache saves time in both draws, the prefetcher costs some; without the cache it is slower."""
    figure = plot_ladder(made((40.0, 60.0), (20.0, 30.0), (22.0, 33.0), (35.0, 70.0)))
    assert colours(figure) == ["bare", "saves", "costs", "saves"]
    assert words(figure) == ["50.0 ms", "25.0 ms   2.00x", "27.5 ms   1.82x", "52.5 ms   1.14x"]
    assert figure.get_suptitle() == "mine: 1.8x faster with all its parts, 50.0 to 27.5 ms per token"
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()][:2] == ["no part", "+ cache"]


def test_what_draws_disagree_on_is_not_claimed() -> None:
    """The cache helps in one draw and hurts in the other; the prefetcher changes less than 1 %."""
    figure = plot_ladder(made((40.0, 60.0), (20.0, 70.0), (20.1, 70.1), (20.1, 70.1)))
    assert colours(figure) == ["bare", "unclear", "unclear", "unclear"]
    [legend] = figure.subfigs[0].legends
    assert "less than 1 %, or draws disagree" in [text.get_text() for text in legend.get_texts()]


def test_changed_routing_is_marked() -> None:
    found = made((40.0, 60.0), (20.0, 30.0), (22.0, 33.0), (35.0, 70.0))
    found.ladder[2]["labels"].append("changes routing")
    figure = plot_ladder(found)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()][1:3] == ["+ cache", "+ prefetcher ~"]
    assert "~ changes the routing" in [text.get_text() for text in figure.subfigs[0].legends[0].get_texts()]


def test_what_cannot_run_has_its_place_in_the_picture() -> None:
    figure = plot_ladder(made((40.0, 60.0), (20.0, 30.0), (22.0, 33.0), (35.0, 70.0), refused=True))
    assert words(figure)[1] == "cannot run without the rest"
    assert colours(figure) == ["bare", "unclear", "saves"]


def test_a_prefill_alone_draws_no_ladder() -> None:
    rows = [{"label": "no part", "parts": [], "refused": None, "tpot_ms": None}]
    with pytest.raises(PictureError, match="expected runs with decode steps"):
        plot_ladder(Ablation({}, "mine", rows, []))
