"""``trilane tune --engine strata`` for several cards: ways, arguments, refusals."""

from __future__ import annotations

import pytest
from rich.table import Table

from sim.costs.engine import load_fitted
from trilane.engines.question import FitError, Question
from trilane.engines.strata.cards_tune import HELPERS, WORTH_HELPERS, StrataCardsTuning, cards_tuning
from trilane.output.pages.strata_cards import strata_cards_page

PARTS = {"gpu": "2x-rtx-3090", "ram": "ddr5-6000", "cpu": "ryzen-9-9900x", "threads": 8}


def tuned(**changed: object) -> StrataCardsTuning:
    question = Question("qwen3.8-flash-next", **{**PARTS, **changed})  # type: ignore[arg-type]
    return cards_tuning(question, load_fitted("strata"), question.load_machine())


def test_ways_have_one_card_the_engines_split_and_helpers() -> None:
    found = tuned()
    by_name = {way.name: way for way in found.ways}
    assert list(by_name) == ["RTX 3090 alone", "layer split, auto", HELPERS]
    assert sum(by_name["layer split, auto"].layers) == 48
    assert "--layer-split auto" in by_name["layer split, auto"].arguments
    assert {"--expert-cache-device1 auto", "--remote-expert-opt"} <= {*by_name[HELPERS].arguments}
    assert by_name["layer split, auto"].speed.token_ms < by_name["RTX 3090 alone"].speed.token_ms


def test_the_answer_is_the_shortest_and_helpers_must_be_well_ahead() -> None:
    found = tuned()
    times = {way.name: way.answer_ms(256) for way in found.ways}
    others = min(ms for name, ms in times.items() if name != HELPERS)
    assert found.way.answer_ms(256) == (times[HELPERS] if times[HELPERS] * (1 + WORTH_HELPERS) < others else others)


def test_unequal_cards_have_the_quicker_one_last_and_first_with_helpers() -> None:
    found = tuned(gpu="rtx-3060+rtx-5090")
    by_name = {way.name: way for way in found.ways}
    assert by_name["layer split, auto"].cards[-1] == "RTX 5090"
    assert by_name[HELPERS].cards[0] == "RTX 5090"
    first, last = by_name["layer split, auto"].layers
    quickest = by_name["layer split"]
    assert f"--layer-split {quickest.layers[0]}" in quickest.arguments
    assert quickest.speed.token_ms <= by_name["layer split, auto"].speed.token_ms
    assert first < last


def test_six_cards_have_no_helpers() -> None:
    names = [way.name for way in tuned(gpu="6x-rtx-3060").ways]
    assert HELPERS not in names
    assert "layer split, auto" in names


def test_a_page_and_a_record_have_all_ways() -> None:
    found = tuned()
    ways = [part for part in strata_cards_page(found) if isinstance(part, Table)][-1]
    assert ways.row_count == len(found.ways) == len(found.to_dict()["ways"])
    assert found.to_dict()["command"] == " ".join(found.way.arguments)


@pytest.mark.parametrize(("changed", "expected"), [
    ({"gpu": "rtx-3090+rx-7900-xtx"}, "expected cards of one vendor, got amd and nvidia"),
    ({"gpu": "2x-arc-b580"}, "strata does not run on Intel's GPUs"),
    ({"ram_gb": 16, "gpu": "2x-rtx-3060"}, r"the host lacks \d+\.\d GB for the experts"),
    ({"gpu": "2x-gtx-1060-3gb"}, "has no room for a cache of experts"),
    ({"batch": 2}, "expected one request at a time"),
])
def test_what_cannot_run_is_refused(changed: dict[str, object], expected: str) -> None:
    with pytest.raises(FitError, match=expected):
        tuned(**changed)
