"""The page of ``trilane tune --engine strata``: arguments, what they give, and why these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traces.models.names import parted
from trilane.common.units import GB
from trilane.engines.strata import MODEL
from trilane.engines.strata.tune import StrataTuning
from trilane.output.pages.output import Part, heading, number, pairs, percent, signed_percent, table
from trilane.output.pages.widths import Command

_NAMES = {
    "pcie_share": "share of misses over the link", "workers": "workers of the pool",
    "min_draft_probability": "least probability of a draft", "kv_tokens": "keys and values on the card, tokens",
}
_PARTS = {
    "routing_ns": "attention, routers, head", "kv_ns": "keys, values over the link",
    "gpu_experts_ns": "experts on the GPU",
    "copies_ns": "experts over the link", "waiting_ns": "waiting for the pool", "drafts_ns": "drafts",
    "swaps_ns": "swapped experts", "host_ns": "host, commit",
}


def strata_tune_page(found: StrataTuning) -> list[Part]:
    """Everything that is printed."""
    best = found.best
    facts = {
        "decode": f"{1000 / best.token_ms:.1f} tokens/s: a window of {number(best.window.total_ns / 1e6)} ms gives "
                  f"{best.tokens:.2f} tokens, of {best.counts.drafts:.1f} drafts",
        "first token": f"{found.ttft_ms / 1000:.1f} s for {found.question.prompt_tokens:,} tokens",
        "cache": f"{best.setting.slots:,} experts, {found.cache_bytes / GB:.1f} GB; {percent(best.hit_rate)} of what "
                 f"windows ask for",
        "engine's own setting": f"{1000 / found.usual.token_ms:.1f} tokens/s",
    }
    return [
        heading(f"{found.model} in strata on {found.machine}"), found.about, "",
        Command(" ".join(found.arguments)), "", pairs(facts.items()), "",
        heading("Why this setting"), _choices(found), "",
        heading("Tokens a second by the share of misses over the link"), _speeds("share", found.tokens_by_share), "",
        heading("By the most drafts of a window"), _speeds("drafts", found.tokens_by_drafts), "",
        heading("By room for a context, for the same prompt and answer"), _contexts(found), "",
        heading("By weights"), _speeds("weights", found.tokens_by_weights), "",
        heading("One window"), _window(found), "",
        "drafts and hits depend on the text: those of a usual one are taken (docs/strata.md has the errors)",
    ]


def next_to_part(found: StrataTuning | None) -> list[Part]:
    """A remark on the pages of other engines; nothing where Strata does not run."""
    if found is None:
        return []
    speed = f"{1000 / found.best.token_ms:.1f} tokens/s, the first after {found.ttft_ms / 1000:.1f} s"
    in_weights = f"Strata, an engine for {MODEL}, in {parted(found.model).weights}"
    return ["", f"{in_weights}: {speed}; its settings: trilane tune {MODEL} --engine strata"]


def _choices(found: StrataTuning) -> Part:
    rows = [
        [_NAMES[choice.name], _value(choice.name, choice.best), _value(choice.name, choice.usual),
         signed_percent(choice.slower)]
        for choice in found.choices
    ]
    return table(["", "best", "engine's own", "a token then"], rows)


def _value(name: str, value: float) -> str:
    return "all" if name == "kv_tokens" and not value else f"{value:g}"


def _contexts(found: StrataTuning) -> Part:
    rows = [
        [f"{context:,}", _value("kv_tokens", speed.kv_tokens), f"{speed.slots:,}", number(speed.tokens_per_s)]
        for context, speed in found.by_context.items()
    ]
    return table(["context", "on the card", "experts", "tokens/s"], rows)


def _speeds(name: str, speeds: Mapping[Any, float]) -> Part:
    values = [str(each).removesuffix(".0") for each in speeds]
    return table([name, *values], [["tokens/s", *map(number, speeds.values())]])


def _window(found: StrataTuning) -> Part:
    times = vars(found.best.window)
    whole = found.best.window.total_ns
    rows = [[_PARTS[name], number(ns / 1e6), percent(ns / whole)] for name, ns in times.items() if name in _PARTS]
    return table(["part", "ms", "share"], rows)
