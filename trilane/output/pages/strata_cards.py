"""The page of ``trilane tune --engine strata`` for several cards: one card, layers split over all, and helpers."""

from __future__ import annotations

from trilane.engines.strata.cards_tune import CardsWay, StrataCardsTuning
from trilane.output.pages.output import Part, heading, number, pairs, percent, table
from trilane.output.pages.widths import Command


def strata_cards_page(found: StrataCardsTuning) -> list[Part]:
    """Everything that is printed."""
    way, best = found.way, found.best
    facts = {
        "decode": f"{1000 / best.token_ms:.1f} tokens/s: a window of {number(best.window.total_ns / 1e6)} ms gives "
                  f"{best.tokens:.2f} tokens",
        "first token": f"{found.ttft_ms / 1000:.1f} s for {found.question.prompt_tokens:,} tokens",
        "cards": _cards(way),
        "caches": f"{percent(best.hit_rate)} of what windows ask for",
    }
    return [
        heading(f"{found.model} in strata on {found.machine}: {way.name}"), found.about, "",
        Command(" ".join(way.arguments)), "", pairs(facts.items()), "",
        heading("Ways to use the cards, shortest whole answer first"), _ways(found), "",
        "layer split: cards take turns in a window, pieces of prompts overlap; helpers: the first card computes all "
        "but experts, and prompts alone; they are taken where 5% ahead",
        "under Windows, with several GPUs, the engine pins 8 GiB of the experts only: fewer cross the link",
    ]


def _cards(way: CardsWay) -> str:
    if not way.layers:
        return ", ".join(f"{card} {slots:,} experts" for card, slots in zip(way.cards, way.slots, strict=True))
    each = zip(way.cards, way.layers, way.slots, strict=True)
    return ", then ".join(f"{card} {layers} layers, {slots:,} experts" for card, layers, slots in each)


def _ways(found: StrataCardsTuning) -> Part:
    ordered = sorted(found.ways, key=lambda way: way.answer_ms(found.question.generated))
    rows = [
        [
            way.name, " + ".join(map(str, way.layers)), " + ".join(f"{slots:,}" for slots in way.slots),
            percent(way.speed.hit_rate), number(1000 / way.speed.token_ms), f"{way.ttft_ms / 1000:.1f} s",
        ]
        for way in ordered
    ]
    return table(["", "layers", "experts", "hits", "tokens/s", "first token"], rows)
