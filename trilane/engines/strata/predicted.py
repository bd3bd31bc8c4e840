"""Predictions of one request that was measured, in two ways: with the hits of its log, and without."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trilane.engines.strata.cache import hit_rate, swapped
from trilane.engines.strata.prompt import prompt_ms
from trilane.engines.strata.requests import StrataRequest, WindowCounts
from trilane.engines.strata.settings import cache_slots
from trilane.engines.strata.window import WindowCosts, WindowTime, window_time

ENGINE = "strata"
QUANTITIES = (
    "window, hits given", "window, hits predicted", "decode tokens/s", "prompt", "several GPUs, decode",
    "several GPUs, prompt",
)
USUAL_DRAFTS, USUAL_ACCEPTED = 2.1, 0.7  # of a window where the row does not say: means of the open requests of 2026-11
_NS_PER_MS = 1e6


@dataclass(frozen=True)
class Predicted:
    """One request; times in ms. None where the row lacks what is compared, or does not say what is needed."""

    request: StrataRequest
    costs: WindowCosts

    @cached_property
    def given(self) -> WindowTime | None:
        """A window with the hits and the reads of the log."""
        counts = self.request.counts
        if counts is None:
            return None
        return window_time(self.costs, counts, self.request.context_tokens, None, swapped(self.held_share, counts.rows))

    @cached_property
    def counts(self) -> WindowCounts:
        """WindowCounts of a window by the slots of the cache; rows are those of the log, or usual ones."""
        known = self.request.counts
        drafts = USUAL_DRAFTS if known is None else known.drafts
        rows = 1 + drafts if known is None else known.rows
        entries = rows * self.request.shape.top_k
        hits = entries * hit_rate(self.held_share, rows)
        crossing = 0.0
        if self.pcie_share is None and known is not None and known.pcie:
            crossing = known.pcie / (known.cpu + known.pcie)
        missed = entries - hits
        return WindowCounts(rows, drafts, hits, (1 - crossing) * missed, crossing * missed)

    @cached_property
    def by_slots(self) -> WindowTime:
        """A window with predicted hits."""
        swaps = swapped(self.held_share, self.counts.rows)
        return window_time(self.costs, self.counts, self.request.context_tokens, self.pcie_share, swaps)

    @property
    def held_share(self) -> float:
        """Share of all experts in the cache: the row's slots, or those that the card has room for."""
        request, shape = self.request, self.request.shape
        slots = request.cache_slots
        if slots is None:
            context = request.context or request.context_tokens
            slots = cache_slots(shape, self.costs.hardware, context, request.kv_tokens)
        return min(slots / (shape.moe_layers * shape.experts), 1.0)

    @property
    def pcie_share(self) -> float | None:
        """Share of the missed experts that cross the link: the row's, or by the engine's rule. None: what the log
        counted."""
        if self.request.pcie_frac is None and self.request.pcie_reads is not None:
            return None
        return usual_share(self.costs) if self.request.pcie_frac is None else self.request.pcie_frac

    @property
    def hit_rates(self) -> tuple[float, float] | None:
        """The predicted and the measured rate of hits, by entry."""
        if (known := self.request.counts) is None:
            return None
        return self.counts.hits / sum(self.counts[2:]), known.hits / sum(known[2:])

    @cached_property
    def prompt_ms(self) -> float | None:
        tokens = self.request.read_tokens
        if not tokens or self.request.read_ms is None:
            return None
        before, share = max((self.request.prompt_tokens or 0) - tokens, 0), self.request.pcie_frac
        share = usual_share(self.costs) if share is None else share
        return prompt_ms(self.costs, tokens, before, self.held_share, share)

    @property
    def tokens_per_window(self) -> float:
        """Tokens by which a window lengthens the answer: those of the row, or usual ones."""
        windows, tokens = self.request.windows or 0, self.request.gen_tokens
        if windows > 0 and tokens:
            return tokens / windows
        return 1 + USUAL_DRAFTS * USUAL_ACCEPTED

    @property
    def pairs(self) -> dict[str, tuple[float, float]]:
        """Predicted and measured value of each quantity that both have; times, and of speeds their inverse."""
        request, found = self.request, dict[str, tuple[float, float]]()
        times = {QUANTITIES[0]: self.given, QUANTITIES[1]: self.by_slots}
        for name, time in times.items():
            if time is not None and request.window_ms is not None:
                found[name] = time.total_ns / _NS_PER_MS, request.window_ms
        if request.window_ms is None and request.tg_tok_s and request.decode_ms is None:
            token_ms = self.by_slots.total_ns / _NS_PER_MS / self.tokens_per_window
            found[QUANTITIES[2]] = token_ms, 1000 / request.tg_tok_s
        if self.prompt_ms is not None and request.read_ms:
            found[QUANTITIES[3]] = self.prompt_ms, request.read_ms
        return found


def usual_share(costs: WindowCosts) -> float:
    """Share of the misses that cross the link, by the rule of engines 0.1.37 to 0.1.41."""
    work = costs.work
    return work.pcie_share.value * min(costs.hardware.link.h2d_bytes_per_s / work.share_bytes_per_s.value, 1.0)
