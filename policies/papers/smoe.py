"""SMoE: substitution, score-window cache, prefetches from a partial forward pass, two-pointer split.

The expert-cache router (Section IV-B, Algorithm 1) replaces unimportant experts that are not on the GPU by others of
nearly the same score that are. Alpha may be chosen as the least substitution that meets a limit on the time per token
(Section V-C, Eq. 5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from policies.mechanism.views import (
    INFINITE_NS,
    Assignment,
    Commitment,
    ExpertId,
    Forecast,
    LayerView,
    PolicyError,
    Routing,
)
from policies.parts.assigners import LoadAll, by_tokens
from policies.parts.caches import DemandCache
from policies.parts.objective import assignment_of, durations, makespan
from policies.parts.placements import Pooled, random_or_popular
from policies.parts.prefetchers import next_forecast
from policies.parts.routers import TrueRouter, combine_weights, routing_of_tokens
from policies.protocols import Assigner, Composition, Needs
from policies.system import BuildContext, ChoiceError, Policy, register
from trilane.common.hints import Count, Share

_STEPS = 1000  # of the one-dimensional search over the measured range


class CacheRouter:
    """Exchanges low-score experts that miss. With S the (k+1)-th highest score of a token (the highest not selected):

    - its *top-score* experts are those selected with a score above (1 + ``alpha``) S: they always stay;
    - its *low-score* experts are the other selected ones: they stay if they are on the GPU, in flight, or
      top-score for any token of the batch, since then they are computed anyway;
    - a low-score expert that misses is exchanged for the best one not selected with a score above (1 - ``alpha``) S
      that is on the GPU, or top-score for any token. Where such substitutes run out, the lowest-scored of those that
      miss are exchanged, and the highest-scored stay, to be loaded or computed on the CPU.

    Our readings, where listing and text differ or leave it open: a first pass over all tokens finds the top-score
    experts, a second one exchanges; a score at the bound is low; each token keeps k experts (the listing's ``L <=
    score`` lets a (k+1)-th in). A token that exchanges weighs its experts by their scores, which sum up to 1 where the
    model makes them (``norm_topk``).

    ``listing``: two things as printed. One pass, so that a token sees the top-score experts of the tokens before it
    only; and all low-score experts are exchanged as far as there are substitutes, those on the GPU too.
    """

    looks_ahead = False

    def __init__(self, alpha: float, listing: bool = False, norm_topk: bool = True) -> None:
        self.alpha = alpha
        self.listing = listing
        self.norm_topk = norm_topk

    def route(self, view: LayerView) -> Routing:
        """The routing in force; ``view.routing`` itself if nothing is exchanged. Needs scores and tokens."""
        routing, scores = view.routing, view.scores
        assert scores is not None
        available = {expert for expert, ns in view.ready_ns.items() if ns != INFINITE_NS}
        available.update(view.residency.resident[view.layer], view.residency.staged[view.layer])
        if not self.listing and len(available.intersection(routing.active)) == len(routing.active):
            return routing
        others = [_without(ids, own) for ids, own in zip(routing.token_ids, scores, strict=True)]
        chosen = self._choose(routing.token_ids, scores, others, available)
        if all(new is old for new, old in zip(chosen, routing.token_ids, strict=True)):
            return routing
        tokens = zip(routing.token_ids, routing.token_weights, chosen, scores, strict=True)
        weights = [kept if new is old else combine_weights(own, new, self.norm_topk) for old, kept, new, own in tokens]
        return routing_of_tokens(chosen, weights)

    def commit(self, view: LayerView, forecasts: Sequence[Forecast]) -> Commitment | None:
        """None: no layer is routed ahead."""
        return None

    def _choose(
        self, token_ids: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], others: Sequence[Sequence[float]],
        available: set[int],
    ) -> list[Sequence[int]]:
        """The experts of each token; ``available`` grows by the top-score experts."""
        tops = []
        for ids, own, rest in zip(token_ids, scores, others, strict=True):
            bound = (1 + self.alpha) * max(rest)
            tops.append([expert for expert in ids if own[expert] > bound])
        if not self.listing:
            available.update(*tops)
        chosen = []
        for ids, rest, top in zip(token_ids, others, tops, strict=True):
            available.update(top)
            chosen.append(self._exchange(ids, rest, top, available))
        return chosen

    def _exchange(
        self, ids: Sequence[int], rest: Sequence[float], top: Sequence[int], available: Container[int]
    ) -> Sequence[int]:
        """One token's experts by descending score; ``ids`` itself if they stay."""
        leaving = [e for e in ids if e not in top and (self.listing or e not in available)]
        if not leaving:
            return ids
        floor = (1 - self.alpha) * max(rest)
        spare = [e for e, score in enumerate(rest) if score > floor and e in available]
        spare = sorted(spare, key=rest.__getitem__, reverse=True)[: len(leaving)]
        if not spare:
            return ids
        gone = leaving[len(leaving) - len(spare) :]
        return [e for e in ids if e not in gone] + spare


def _without(ids: Sequence[int], own: Sequence[float]) -> Sequence[float]:
    """The scores of the experts that are not selected, by expert; 0 for the others."""
    rest = list(own)
    for expert in ids:
        rest[expert] = 0.0
    return rest


class TopScorePrefetcher:
    """Section IV-C: absent experts of the next layer whose forecast score exceeds (1 + ``alpha``) times the token's
    (k+1)-th, by descending score, until the next layer's own loads begin.

    They go into the cache, where the eviction of Section IV-B makes room: the paper has no other place for
    prefetches. Where several tokens choose an expert its highest score counts (ours). The forecast's top-score experts
    that are resident are protected until the next foresight (ours), or one prefetch would displace another.
    """

    into: Literal["cache", "staging"] = "cache"

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        """Top-score experts of the next layer that are not resident there."""
        layer = view.layer + 1
        return [
            ExpertId(layer, expert)
            for expert in self._top(view, forecasts)
            if expert not in view.residency.resident[layer]
        ]

    def protect(self, view: LayerView, forecasts: Sequence[Forecast]) -> frozenset[ExpertId]:
        """All top-score experts of the next layer."""
        return frozenset(ExpertId(view.layer + 1, expert) for expert in self._top(view, forecasts))

    def _top(self, view: LayerView, forecasts: Sequence[Forecast]) -> list[int]:
        """Top-score experts of any token, by descending forecast score, ties to the lower id."""
        forecast = next_forecast(view, forecasts, "partial")
        if forecast is None:
            return []
        if len(forecast.token_scores) < len(forecast.token_ids):
            raise PolicyError(
                f"SMoE's prefetcher, layer {view.layer}: expected the scores of forecast partial@1 for "
                f"{len(forecast.token_ids)} tokens, got {len(forecast.token_scores)}: declare Needs(tokens=True) and "
                f"use a trace that holds them"
            )
        k = len(view.routing.token_ids[0])
        best: dict[int, float] = {}
        for ids, scores in zip(forecast.token_ids, forecast.token_scores, strict=True):
            bound = (1 + self.alpha) * scores[k] if len(scores) > k else 0.0
            for expert, score in zip(ids[:k], scores, strict=False):
                if score > bound:
                    best[expert] = max(score, best.get(expert, 0.0))
        return sorted(best, key=lambda expert: (-best[expert], expert))


class ScoreWindowCache(DemandCache):
    """Section IV-B, Eq. 3: evicts the member whose mean score over the layer's last ``window`` steps is lowest; ties to
    the lower id.

    Every expert's score counts, active or not. A step of several tokens counts their mean score (ours). Eq. 3 adds up
    n + 1 steps where the text says n: here n, which is not published (16, ours). The paper's *shield*, which keeps
    the experts that the layer at work uses, is the session's pin: it holds from the moment the routing is known until
    the layer ends. Needs scores.
    """

    def __init__(self, layers: int, experts: int, window: int = 16) -> None:
        self._recent = [deque[list[float]](maxlen=window) for _ in range(layers)]
        self._sums = [[0.0] * experts for _ in range(layers)]
        self._groups: dict[int, set[ExpertId]] = {}

    def observe(self, view: LayerView) -> None:
        """Move the layer's window on by one step."""
        assert view.scores is not None
        layer, tokens = view.layer, len(view.scores)
        new = view.scores[0] if tokens == 1 else [sum(column) / tokens for column in zip(*view.scores, strict=True)]
        recent = self._recent[layer]
        leaves = recent[0] if len(recent) == recent.maxlen else [0.0] * len(new)
        self._sums[layer] = [
            total + score - past for total, score, past in zip(self._sums[layer], new, leaves, strict=True)
        ]
        recent.append(list(new))

    def admitted(self, key: ExpertId, group: int) -> None:
        """A new member."""
        self._groups.setdefault(group, set()).add(key)

    def evicted(self, key: ExpertId, group: int) -> None:
        """No longer a member; its scores still count."""
        self._groups[group].remove(key)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The member of lowest mean score that is not blocked."""
        free = [
            (self._sums[key.layer][key.expert] / (len(self._recent[key.layer]) or 1), key)
            for key in self._groups.get(group, ())
            if key not in blocked
        ]
        return min(free)[1] if free else None


def split(missing: int, load_cost: int, cpu_cost: int, sooner: bool) -> int:
    """Number of ``missing`` experts to load, given the costs of a load and of a CPU expert, in any unit.

    Algorithm 2 gives the next expert to the side with less work so far, loads first. ``sooner``: to the side
    that would finish it sooner, loads on ties, which minimises max(n_load C_load, n_cpu C_cpu), Eq. 4.
    """
    loads, t_load, t_cpu = 0, 0, 0
    for _ in range(missing):
        if t_load + sooner * load_cost <= t_cpu + sooner * cpu_cost:
            loads, t_load = loads + 1, t_load + load_cost
        else:
            t_cpu += cpu_cost
    return loads


class TwoPointer:
    """Section V-A, Algorithm 2: missing experts from the best-scored end are loaded, from the other end computed on the
    CPU, so that both take about as long (:func:`split`). Experts on the GPU, or in flight, run there.

    C_load is the layer's copy time, C_cpu the mean time of the last ``history`` CPU experts (the paper's p, not
    published: 32, ours). A policy has no clock: both are the planner's times of what was decided, not measurements. The
    first time C_cpu is the mean over the layer's missing experts. An expert that several tokens need counts once, with
    the highest of their scores (ours). GPU time is ignored, as in the paper. ``sooner``: see :func:`split`.
    """

    def __init__(self, history: int = 32, sooner: bool = False) -> None:
        self.sooner = sooner
        self._past: deque[int] = deque(maxlen=history)

    def assign(self, view: LayerView) -> Assignment:
        """Loads by descending score, CPU experts by ascending score. Needs scores and tokens."""
        active, ready = view.routing.active, view.ready_ns
        missing = [i for i, expert in enumerate(active) if ready[expert] == INFINITE_NS]
        if missing:
            scores = best_scores(view)
            missing.sort(key=lambda i: scores[active[i]], reverse=True)
        gpu_ns, cpu_ns = durations(view)
        first_cpu_ns, first_gpu_ns = view.costs[view.layer].first_cpu_ns, view.costs[view.layer].first_gpu_ns
        loads = self._loads(view, [cpu_ns[i] for i in missing])
        on_cpu = missing[loads:][::-1]
        self._past.extend(cpu_ns[i] + (first_cpu_ns if place == 0 else 0) for place, i in enumerate(on_cpu))
        on_gpu = [i not in on_cpu for i in range(len(active))]
        order = [i for i in by_tokens(view.routing.tokens) if i not in missing] + missing[:loads] + on_cpu
        return assignment_of(view, order, on_gpu, makespan(gpu_ns, cpu_ns, on_gpu, first_cpu_ns, first_gpu_ns))

    def _loads(self, view: LayerView, cpu_ns: Sequence[int]) -> int:
        """Number of missing experts to load; both costs times the length of the history, to stay whole numbers."""
        past = self._past or cpu_ns
        return split(len(cpu_ns), view.costs[view.layer].copy_ns * len(past), sum(past), self.sooner)


def best_scores(view: LayerView) -> dict[int, float]:
    """Highest score among the tokens that are routed to each active expert."""
    assert view.scores is not None
    best: dict[int, float] = {}
    for ids, own in zip(view.routing.token_ids, view.scores, strict=True):
        for expert in ids:
            if own[expert] > best.get(expert, -1.0):
                best[expert] = own[expert]
    return best


class AlphaChoice(NamedTuple):
    """The alpha to use, the time that is expected with it, and whether that meets the limit."""

    alpha: float
    tpot_ms: float
    feasible: bool


def choose_alpha(alphas: Sequence[float], tpots_ms: Sequence[float], limit_ms: float, degree: int = 1) -> AlphaChoice:
    """Fit a polynomial of ``degree`` (the paper: low; here 1 or 2) to times measured at ``alphas``, and take the least
    alpha of the measured range whose fitted time is at most ``limit_ms``; the largest, not feasible, if none is.

    The paper assumes that quality only falls with alpha, which its own Table IV does not always show: judge the answer
    by the model's quality. Raises ChoiceError for too few measurements, or another degree.
    """
    if degree not in (1, 2) or len(set(alphas)) <= degree or len(alphas) != len(tpots_ms):
        raise ChoiceError(
            f"choice of alpha: expected degree 1 or 2 and more alphas than that, each with a time, "
            f"got degree {degree}, {len(set(alphas))} alphas and {len(tpots_ms)} times"
        )
    fit = np.polynomial.Polynomial.fit(alphas, tpots_ms, degree)
    grid = np.linspace(min(alphas), max(alphas), _STEPS + 1)
    times = fit(grid)
    fast_enough = np.flatnonzero(times <= limit_ms)
    chosen = int(fast_enough[0]) if len(fast_enough) else _STEPS
    return AlphaChoice(float(grid[chosen]), float(times[chosen]), len(fast_enough) > 0)


@register("smoe", "resident experts replace low-score ones; two pointers", source="SMoE, Sections IV-V")
@dataclass(frozen=True)
class Smoe(Policy):
    """Parameters of SMoE. The paper starts from a GPU that holds some experts and does not say which: here even slots.

    alpha: substitution threshold, 0 to 1; 0 keeps the model's routing. The paper uses 0.35, 0.30 and 0.25 (S1-S3,
        Section VI-B); the default is the least, that of its largest model (Qwen2-57B, S3).
    listing: Algorithm 1 as printed instead of the text: one pass, so that a token sees the top-score experts of the
        tokens before it only; and low-score experts on the GPU are exchanged too.
    window: steps that the cache averages over; not published, ours.
    assigner: Algorithm 2 as printed ("two_pointer"), or with the objective of Eq. 4 ("two_pointer_min"); "load-all" is
        Fig. 14 without CPU-assisted scheduling.
    history: CPU experts over which C_cpu is averaged; not published, ours.
    pool: one cache over all layers, as in the released code; the paper does not say.
    start: experts on the GPU at first: drawn at "random", or each layer's most "popular" on calibration prompts.
    prefetch: copy forecast top-score experts (Section IV-C); off: the "+CR" of Fig. 14 with CPU-assisted scheduling.
    demand_slots: staging slots for loads that the cache has no room for (ours).
    """

    alpha: Share = 0.25
    listing: bool = False
    window: Count = 16
    assigner: Literal["two_pointer", "two_pointer_min", "load-all"] = "two_pointer"
    history: Count = 32
    prefetch: bool = True
    pool: bool = False
    start: Literal["random", "popular"] = "random"
    demand_slots: Count = 2

    @property
    def needs(self) -> Needs:
        """Scores of all experts; a forecast for prefetches; calibration where the start needs it."""
        return Needs(
            scores=True, tokens=True, forecasts=(("partial", 1),) if self.prefetch else (),
            changes_routing=self.alpha > 0, calibration=self.start == "popular",
        )

    def compose(self, context: BuildContext) -> Composition:
        """SMoE as evaluated in Section VI, unless parameters say otherwise."""
        alpha, placement = self.alpha, random_or_popular(self.start, context.seed)
        return Composition(
            placement=Pooled(placement) if self.pool else placement,
            router=CacheRouter(alpha, self.listing, context.norm_topk) if alpha else TrueRouter(),
            assigner=self._assigner(),
            prefetcher=TopScorePrefetcher(alpha) if self.prefetch else None,
            cache=ScoreWindowCache(context.layers, context.experts, self.window),
            demand_slots=self.demand_slots,
        )

    def _assigner(self) -> Assigner:
        if self.assigner == "load-all":
            return LoadAll()
        return TwoPointer(self.history, sooner=self.assigner == "two_pointer_min")
