"""SMoE's parts but for its router: prefetches by forecast score, the score-window cache, the two-pointer assigner."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import Literal

from policies.mechanism.views import INFINITE_NS, Assignment, ExpertId, Forecast, LayerView, PolicyError
from policies.parts.assigners import by_tokens
from policies.parts.caches import DemandCache
from policies.parts.objective import assignment_of, durations, makespan
from policies.parts.prefetchers import next_forecast


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
    """How many of ``missing`` experts to load, given the costs of a load and of a CPU expert, in any unit.

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
        """How many missing experts to load; both costs times the length of the history, to stay whole numbers."""
        past = self._past or cpu_ns
        return split(len(cpu_ns), view.costs[view.layer].copy_ns * len(past), sum(past), self.sooner)


def best_scores(view: LayerView) -> dict[int, float]:
    """For every active expert, the highest score among the tokens that are routed to it."""
    assert view.scores is not None
    best: dict[int, float] = {}
    for ids, own in zip(view.routing.token_ids, view.scores, strict=True):
        for expert in ids:
            if own[expert] > best.get(expert, -1.0):
                best[expert] = own[expert]
    return best
