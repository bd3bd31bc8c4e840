"""Words for values, for what was run and for what a sweep shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from policies.baselines.best import TUNED_ON_SEQUENCES, TUNED_ON_TRACES, TUNED_POLICIES
from policies.protocols import PolicyKind
from policies.registry import policy_names
from tests.kit.questions import hand_made_map, small_question
from traces.models.shape import ModelShape
from trilane.engines.question import Question
from trilane.output.figures.pays_words import NamedSide, other_caches, remarks_of, using_side, without_side
from trilane.output.figures.quality_words import cost_text
from trilane.output.figures.words import (
    Interval,
    best_of,
    fastest,
    gain,
    hardly_matters,
    intervals,
    sampled,
    setting_words,
    settled_from,
    tally,
    times_table,
    tuned,
    value_text,
    value_words,
)
from trilane.study.pays.gain_map import Cell, GainMap
from trilane.study.pays.ideas import PaysQuestion
from trilane.study.pays.played_map import PlayedSide


def test_where_the_side_without_prefetches_begins_to_copy_is_told() -> None:
    found = replace(hand_made_map(), question=small_question("prefetch", draws=2), alternative=None)
    copies = {**found.cell.without.facts, "pcie_bytes_per_token": 2.0**20}
    near = tuple(replace(cell, without=cell.without._replace(facts=copies)) for cell in found.rows[0])
    begins = "the same without prefetches copies experts where an upload takes 100 us, and none where it takes 300: "
    assert any(line.startswith(begins) for line in remarks_of(replace(found, rows=(near, found.rows[1]))))
    assert not any("copies experts where" in line for line in remarks_of(found))


@pytest.mark.parametrize(("name", "value", "text", "words"), [
    ("cached_share", 0.3, "30%", "30% cached"),
    ("cached_share", 1 / 7, "14.3%", "14.3% cached"),
    ("batch", 4, "4", "batch 4"),
    ("pcie_gbps", 16.0, "16", "16 GB/s"),
    ("prompt_tokens", 1024, "1,024", "1,024 tokens"),
    ("pcie", "5x16", "5x16", "PCIe 5x16"),
    ("hardware", "rtx3090-ddr4", "rtx3090-ddr4", "rtx3090-ddr4"),
    ("parameters.window", 8, "8", "window 8"),
    ("parameters.window", "default", "default", "default window"),
    ("gpu.memory_bytes", 8e9, "8 GB", "8 GB"),
    ("gpu.memory_bytes", 8e8, "800,000,000", "800,000,000 bytes"),
    ("link.h2d_bytes_per_s", 12.5e9, "12.5 GB/s", "12.5 GB/s"),
    ("gpu_memory_gb", None, "the card's own", "the card's own memory"),
    ("gpu_memory_gb", "the card's own", "the card's own", "the card's own memory"),
    ("prompt_tokens", None, "as recorded", "prompts as recorded"),
    ("model", None, "the trace's own", "the trace's own model"),
    ("pcie_gbps", None, "the machine's own", "the machine's own PCIe bandwidth"),
    ("parameters", '{"window":2,"evict":"idlest"}', "window=2, evict=idlest", "window=2, evict=idlest"),
])
def test_words(name: str, value: Any, text: str, words: str) -> None:
    assert value_text(name, value) == text
    assert value_words(name, value) == words


def test_a_setting_names_what_has_the_value() -> None:
    assert setting_words("pcie_gbps", 16.0) == "PCIe bandwidth 16 GB/s"
    assert setting_words("batch", 4) == "batch 4"
    assert setting_words("gpu.memory_bytes", 8e9) == "gpu memory 8 GB"
    assert setting_words("gpu_memory_gb", None) == "the card's own memory"
    assert setting_words("hardware", "rtx3090-ddr4") == "rtx3090-ddr4"


def test_tuned_policies_are_named_where_their_own_sequences_are_played() -> None:
    """The search played sequences 0 to 9 of both bundled traces (notebooks/search_compositions.py)."""
    remark = tuned(["dali", "best-exact"], "mini-moe:2", [3, 40])
    assert "best-exact was tuned on sequences 0 to 9" in remark
    assert tuned(["dali"], "mini-moe", [3]) == ""
    assert tuned(["best-exact"], "mini-moe", [10, 40]) == ""
    assert tuned(["best-exact"], "my-trace.safetensors", [3]) == ""


def test_tuned_policies_are_those_of_the_search() -> None:
    study = Path(__file__).parents[4] / "notebooks" / "search_compositions.py"
    code = study.read_text(encoding="utf-8")
    assert f"TUNING_SEQUENCES, HELD_OUT_SEQUENCES = {TUNED_ON_SEQUENCES!r}".replace("range(0, 10)", "range(10)") in code
    assert all(f'"{trace}' in code for trace in TUNED_ON_TRACES)
    assert set(TUNED_POLICIES) <= set(policy_names())


def test_a_sampled_answer_is_named_with_the_measured_error() -> None:
    assert sampled(60, 60, 1) == ""
    remark = sampled(32, 1000, 4)
    assert all(word in remark for word in ("32 of 1,000", "batch 4", "24 runs", "0.8%", "2.5%"))
    assert "not measured" not in remark
    assert "fewer than 24 were not measured" in sampled(8, 60, 1)


# --- what a sweep shows -----------------------------------------------------------------------------------------------

A, B, C = (("a", PolicyKind.KEEPS), ("b", PolicyKind.KEEPS), ("c", PolicyKind.KEEPS))


def table(axis: str, values: list[object], **times: list[float]) -> pd.DataFrame:
    columns = {(name, PolicyKind.KEEPS): mine for name, mine in times.items()}
    return pd.DataFrame(columns, index=pd.Index(values, name=axis))


def test_one_policy_of_two_kinds_is_two_columns() -> None:
    """With one value of a parameter it keeps the routing, with the other it does not."""
    rows = pd.DataFrame({
        "batch": [1, 2, 1], "policy": "mix", "kind": [PolicyKind.KEEPS, PolicyKind.KEEPS, PolicyKind.CHANGES],
        "tpot_ms": [5.0, 9.0, 4.0],
    })
    times = times_table(rows, "batch", [1, 2, 4])
    assert times.index.tolist() == [1, 2]  # nothing ran with 4
    assert best_of(times) == [("mix", PolicyKind.CHANGES), ("mix", PolicyKind.KEEPS)]
    assert fastest(times) == "mix ~ is fastest below batch 2, mix from there on"


def test_the_fastest_stays_the_fastest_within_two_percent() -> None:
    times = table("batch", [1, 2, 4], a=[10.0, 10.2, 10.3], b=[11.0, 10.0, 10.0])
    assert intervals(times) == [Interval(A, (1, 2)), Interval(B, (4,))]
    assert "a is fastest or within 2% of the fastest below batch 4, b " in fastest(times)


def test_a_policy_that_cannot_run_is_not_the_fastest() -> None:
    times = table("batch", [1, 2], a=[10.0, float("nan")], b=[20.0, 30.0])
    assert intervals(times) == [Interval(A, (1,)), Interval(B, (2,))]


@pytest.mark.parametrize(("times", "expected"), [
    ({"a": [10.0, 5.0, 4.0], "b": [20.0, 9.0, 8.0]}, "a is fastest throughout: 10.0 to 4.0 ms per token"),
    ({"a": [10.0, 5.0, 4.0], "b": [20.0, 4.0, 3.0]}, "a is fastest below 40% cached, b from there on"),
    ({"a": [1.0, 2.0, 3.0], "b": [3.0, 1.0, 2.0], "c": [9.0, 9.0, 1.0]},
     "a is fastest below 40% cached, b below 80% cached, c from there on"),
])
def test_fastest(times: dict[str, list[float]], expected: str) -> None:
    assert fastest(table("cached_share", [0.2, 0.4, 0.8], **times)) == expected


def test_many_intervals_and_names_are_counted() -> None:
    often = table("batch", [1, 2, 4, 8, 16], a=[1.0, 2.0, 1.0, 2.0, 1.0], b=[2.0, 1.0, 2.0, 1.0, 2.0])
    assert fastest(often) == "a is fastest in 3 of 5 settings, b in 2"
    names = table("hardware", ["x", "y", "z"], a=[1.0, 2.0, 1.0], b=[2.0, 1.0, 2.0])
    assert fastest(names) == "a is fastest in 2 of 3 settings, b in 1"
    assert fastest(names.iloc[:1]) == "a is fastest at x: 1.0 ms per token"


def test_from_where_the_policy_hardly_matters() -> None:
    """The median is 2.0, 1.1, 1.5 and 1.05 times the lowest: within 10 % at 2, but for good only from 8 on."""
    times = table("batch", [1, 2, 4, 8], a=[1.0] * 4, b=[2.0, 1.1, 1.5, 1.05], c=[9.0] * 4)
    assert settled_from(times) == 8
    assert hardly_matters(times).startswith("from batch 8 on ")
    assert hardly_matters(times.iloc[-1:]).startswith("throughout, ")
    assert settled_from(times.iloc[:3]) is None
    assert hardly_matters(times.iloc[:3]) == ""
    assert settled_from(times[[A, B]]) is None  # of two policies, half are always the fastest


@pytest.mark.parametrize(("times", "facts"), [
    ([20.0, 10.0], ("from 8 GB/s to 64 GB/s ", "falls by 2.00x", "20.0 to 10.0 ms")),
    ([10.0, 15.0], ("rises by 1.50x", "10.0 to 15.0 ms")),
    ([10.0, 9.9], ("hardly changes", "10.0 to 9.9 ms")),
])
def test_gain(times: list[float], facts: tuple[str, ...]) -> None:
    sentence = gain(table("pcie_gbps", [8.0, 64.0], a=times, b=[2 * time for time in times]))
    assert all(fact in sentence for fact in facts)


def test_one_value_gains_nothing() -> None:
    assert gain(table("pcie_gbps", [12.0], a=[10.0], b=[20.0])) == ""


def test_tally() -> None:
    assert tally([A]) == "a is fastest in the one setting"
    assert tally([A, A], "hits most") == "a hits most in all 2 settings"
    assert tally([A, B, A]) == "a is fastest in 2 of 3 settings, b in 1"
    many = [(name, PolicyKind.CLAIRVOYANT if name == "b" else PolicyKind.KEEPS) for name in "aaabbccde"]
    assert tally(many) == "a is fastest in 3 of 9 settings, b * in 2, c in 2, others in 2"


# --- what is said of an answer before its numbers ---------------------------------------------------------------------


OWN_CACHE = "llama.cpp@cache: llama.cpp's own cache (--moe-cache-mib, PR 29887), the one of `trilane tune`"


def answer(question: PaysQuestion, x: float, y: float, without: str = "llama.cpp", using: str = "llama.cpp") -> GainMap:
    """A machine's cell, of two policies."""
    cell = Cell(x, y, PlayedSide(without, "llama.cpp", (10.0,), {}), PlayedSide(using, "llama.cpp", (12.0,), {}))
    return GainMap(question, "model on machine", ((cell,),), (0, 0), 100.0)


def test_the_two_caches_have_different_names_and_each_says_how_to_ask_for_the_other() -> None:
    patches = hand_made_map()
    assert [line.split(":")[0] for line in remarks_of(patches)[:1]] == ["llama-cache-lru"]
    assert remarks_of(patches)[1].startswith("its cache holds the popular experts of other texts at first, and hits ")
    assert other_caches(patches) == [f"{OWN_CACHE}: +10% here, 16.5 tokens/s; its map: --policy llama.cpp@cache"]
    own = answer(small_question("cache", policy="llama.cpp@cache"), 0.5, 100.0, using="llama.cpp@cache")
    assert remarks_of(own) == [OWN_CACHE]
    assert other_caches(own) == ["without --policy: the cache of patches, llama-cache-lru"]


def test_a_cache_of_llama_cpp_that_cannot_run_says_why() -> None:
    found = hand_made_map()
    lacking = replace(found.cell, using=PlayedSide("llama.cpp@cache", "llama.cpp-cache", (), {}, "too small"))
    assert other_caches(replace(found, alternative=lacking)) == [
        f"{OWN_CACHE}: cannot run here: too small; its map: --policy llama.cpp@cache"
    ]


def test_what_a_link_is_bought_for_may_be_a_cache_of_patches() -> None:
    link = small_question("link")
    assert remarks_of(answer(link, 0.5, 12.0)) == []
    assert "PR 27861" in remarks_of(answer(link, 0.5, 12.0, using="llama-cache-lru"))[0]


@pytest.mark.parametrize(("layers", "remark"), [
    (None, "if mixtral-8x7b@bf16:2 had a draft layer (MTP), which is not known, and {} were accepted"),
    (0, "if mixtral-8x7b@bf16:2 had a draft layer (MTP), which it has not, and {} were accepted"),
    (1, "mixtral-8x7b@bf16:2 has a draft layer (MTP); if {} are accepted"),
])
def test_drafts_need_a_layer_that_makes_them(layers: int | None, remark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = small_question("speculation").fit.model_shape

    def shape(question: Question) -> ModelShape:
        return replace(plain, mtp_layers=layers)

    monkeypatch.setattr(Question, "model_shape", property(shape))
    assumed = remarks_of(answer(small_question("speculation"), 0.7, 3))
    assert assumed == [remark.format("70% (assumed; --x) of the drafts behind accepted ones")]
    asked = remarks_of(answer(small_question("speculation", x=0.42), 0.42, 3))
    assert asked == [remark.format("42% (--x) of the drafts behind accepted ones")]


def test_the_output_changes_where_any_expert_is_deferred() -> None:
    found = answer(small_question("deferral"), 1, 20.0, "kt-deferral", "kt-deferral")
    assert remarks_of(found) == [f"kt-deferral ~ changes the output, which costs quality: {cost_text('kt-deferral')}"]
    assert without_side(found) == NamedSide("kt-deferral", ("0 deferred",), PolicyKind.KEEPS)
    assert using_side(found) == NamedSide("kt-deferral", ("1 deferred",), PolicyKind.CHANGES)


def test_so_does_a_policy_that_replaces_experts() -> None:
    found = answer(small_question("cache", policy="buddy"), 0.5, 100.0, using="buddy")
    assert remarks_of(found) == [f"buddy ~ changes the output, which costs quality: {cost_text('buddy')}"]


def test_sides_say_what_they_differ_in() -> None:
    link, memory = answer(small_question("link"), 0.5, 12.0), answer(small_question("memory"), 12.0, 20.0)
    drafts = answer(small_question("speculation"), 0.7, 3)
    assert [(without_side(each).values, using_side(each).values) for each in (link, memory, drafts)] == [
        (("12 GB/s",), ("24 GB/s",)), (("12 GB",), ("15 GB",)), (("0 drafts a step",), ("3 drafts a step",)),
    ]
