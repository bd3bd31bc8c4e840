"""Predictions of requests that several cards answered, with a range of layers each."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from trilane.common.units import GIB
from trilane.engines.strata.machines import machines_of
from trilane.engines.strata.predicted import QUANTITIES, USUAL_DRAFTS, Predicted, usual_share
from trilane.engines.strata.requests import StrataRequest
from trilane.engines.strata.split import Stage, auto_layers, card_slots, split_time, stages_of
from trilane.engines.strata.split_prompt import split_prompt_ms
from trilane.engines.strata.window import WindowTime

PINNED_ON_WINDOWS = 8 * GIB  # of the experts, with several contexts (docs/MULTI_GPU.md)
_FIRST_LAYERS = re.compile(r"layer split (\d+(?:,\d+)*)")
_HELPERS = re.compile("helper|peer|expert-cache-device")


def cards_refused(request: StrataRequest) -> str:
    """Why a request of several cards is not asked; empty if it is."""
    if _HELPERS.search(request.note):
        return "helpers, whose experts no log counts"
    ends = _first_layers(request)
    rising = sorted({0, *ends, request.shape.moe_layers}) == [0, *ends, request.shape.moe_layers]
    if ends and not (rising and len(ends) == request.n_gpus - 1):
        return f"a split at {', '.join(map(str, ends))} that {request.n_gpus} GPUs cannot have"
    return ""


def _first_layers(request: StrataRequest) -> list[int]:
    """First layer of each card but the first, where the row says."""
    return [int(layer) for layer in match[1].split(",")] if (match := _FIRST_LAYERS.search(request.note)) else []


@dataclass(frozen=True)
class PredictedOnCards(Predicted):
    """One request of cards of one kind, or of those whose titles are joined by " + "."""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The cards, with the row's split and slots, or those that ``auto`` chooses."""
        request, shape = self.request, self.request.shape
        machines = machines_of(request)
        context = request.context or request.context_tokens
        room = card_slots(shape, machines, context, request.kv_tokens)
        ends = [0, *_first_layers(request), shape.moe_layers]
        layers = [after - before for before, after in pairwise(ends)] if len(ends) > 2 else auto_layers(shape, room)
        room = tuple(min(slots, number * shape.experts) for slots, number in zip(room, layers, strict=True))
        costs = [replace(self.costs, hardware=machine) for machine in machines]
        return stages_of(costs, layers, self._stated(room))

    def _stated(self, room: tuple[int, ...]) -> tuple[int, ...]:
        """The row's slots: of the first card, whose line of the log comes first, if their size is below its memory, or
        of all. Other cards have as many in proportion to their room."""
        stated, size = self.request.cache_slots, self.request.cache_gib
        if stated is None:
            return room
        if stated >= self.request.shape.moe_layers * self.request.shape.experts:
            return (stated,) * len(room)
        of_first = size is not None and size * GIB < self.costs.hardware.gpu.memory_bytes
        whole = room[0] if of_first else sum(room)
        return tuple(round(stated * slots / max(whole, 1)) for slots in room)

    @property
    def shares(self) -> list[float]:
        """Share of each card's misses over its link: the row's, or by the engine's rule; under Windows only of pinned
        experts."""
        pinned = 1.0
        if self.request.os == "Windows":
            pinned = min(PINNED_ON_WINDOWS / self.request.shape.routed_bytes, 1.0)
        own = self.request.pcie_frac
        return [pinned * (usual_share(stage.costs) if own is None else own) for stage in self.stages]

    @cached_property
    def split(self) -> WindowTime:
        """A window with predicted hits; rows are those of the log, or usual ones."""
        known = self.request.counts
        drafts, rows = (USUAL_DRAFTS, 1 + USUAL_DRAFTS) if known is None else (known.drafts, known.rows)
        return split_time(self.stages, rows, drafts, self.request.context_tokens, self.shares)

    @property
    def hit_rates(self) -> None:
        """None: those of one cache alone are compared."""

    @cached_property
    def prompt_ms(self) -> float | None:
        tokens, known = self.request.read_tokens, self.request.read_ms is not None
        if not tokens or not known or self.request.os == "Windows":  # at which rate the rest is staged is not known
            return None
        before = max((self.request.prompt_tokens or 0) - tokens, 0)
        return split_prompt_ms(self.stages, tokens, before, self.shares)

    @property
    def pairs(self) -> dict[str, tuple[float, float]]:
        """See ``Predicted``; windows, or tokens where the row states none."""
        request, found = self.request, dict[str, tuple[float, float]]()
        window_ms = self.split.total_ns / 1e6
        if request.window_ms is not None:
            found[QUANTITIES[4]] = window_ms, request.window_ms
        elif request.tg_tok_s:
            found[QUANTITIES[4]] = window_ms / self.tokens_per_window, 1000 / request.tg_tok_s
        if self.prompt_ms is not None and request.read_ms:
            found[QUANTITIES[5]] = self.prompt_ms, request.read_ms
        return found
