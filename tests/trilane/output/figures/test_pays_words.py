"""What is said of an answer before its numbers: whose cache, which drafts, and that a text changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.protocols import PolicyKind
from tests.kit.questions import hand_made_map, small_question
from traces.models.shape import ModelShape
from trilane.engines.question import Question
from trilane.output.figures.pays_words import NamedSide, other_caches, remarks_of, using_side, without_side
from trilane.study.pays.gain_map import Cell, GainMap, PlayedSide
from trilane.study.pays.ideas import PaysQuestion

OWN_CACHE = "llama.cpp@cache: llama.cpp's own cache (--moe-cache-mib, PR 29887), the one of `trilane tune`"


def answer(question: PaysQuestion, x: float, y: float, without: str = "llama.cpp", using: str = "llama.cpp") -> GainMap:
    """A machine's cell, of two policies."""
    cell = Cell(x, y, PlayedSide(without, (10.0,), {}), PlayedSide(using, (12.0,), {}))
    return GainMap(question, "model on machine", ((cell,),), (0, 0))


def test_the_two_caches_have_different_names_and_each_says_how_to_ask_for_the_other() -> None:
    patches = hand_made_map()
    assert [line.split(":")[0] for line in remarks_of(patches)] == ["llama-cache-lru"]
    assert other_caches(patches) == [f"{OWN_CACHE}: +10% here, 16.5 tokens/s; its map: --policy llama.cpp@cache"]
    own = answer(small_question("cache", policy="llama.cpp@cache"), 0.5, 100.0, using="llama.cpp@cache")
    assert remarks_of(own) == [OWN_CACHE]
    assert other_caches(own) == ["without --policy: the cache of patches, llama-cache-lru"]


def test_a_cache_of_llama_cpp_that_cannot_run_says_why() -> None:
    found = hand_made_map()
    lacking = replace(found.cell, using=PlayedSide("llama.cpp@cache", (), {}, "too small"))
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
    assert remarks_of(found) == ["kt-deferral ~ changes the output; not judged"]
    assert without_side(found) == NamedSide("kt-deferral", ("0 deferred",), PolicyKind.KEEPS)
    assert using_side(found) == NamedSide("kt-deferral", ("1 deferred",), PolicyKind.CHANGES)


def test_so_does_a_policy_that_replaces_experts() -> None:
    found = answer(small_question("cache", policy="buddy"), 0.5, 100.0, using="buddy")
    assert remarks_of(found) == ["buddy ~ changes the output; not judged"]


def test_sides_say_what_they_differ_in() -> None:
    link, memory = answer(small_question("link"), 0.5, 12.0), answer(small_question("memory"), 12.0, 20.0)
    drafts = answer(small_question("speculation"), 0.7, 3)
    assert [(without_side(each).values, using_side(each).values) for each in (link, memory, drafts)] == [
        (("12 GB/s",), ("24 GB/s",)), (("12 GB",), ("15 GB",)), (("0 drafts a step",), ("3 drafts a step",)),
    ]
