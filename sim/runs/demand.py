"""Demand: the steps of a run, with the routing and the forecasts of every layer, ready for a session."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from policies.mechanism.views import Forecast, Phase, Routing
from policies.parts.future import Future
from policies.protocols import Needs
from traces.batches import Rows, StepRows, best_ranks, count_experts
from traces.forecasts import NoisyForecasts
from traces.layout import ForecastKey
from traces.trace import Trace, rows_apart
from trilane.common.errors import TrilaneError

WITH_SCORES = ("partial",)  # forecasts whose scores are read by policies that read tokens


class StepDemand(NamedTuple):
    """One forward pass. ``context`` is the KV length of each sequence once the step's tokens are in it."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which is not needed here
    phase: Phase
    tokens: int
    context: tuple[int, ...]
    routings: Sequence[Routing]  # by layer
    forecasts: Sequence[Sequence[Forecast]]  # by layer at which they are known
    scores: np.ndarray | None  # [tokens, layers, experts]
    sequences: tuple[int, ...] = ()  # of each token; empty unless the policy needs tokens
    drafted: int = 0  # tokens that the step verifies (``traces.batches``)
    generated: int = 1  # tokens by which the step lengthens each answer

    @property
    def head_rows(self) -> int:
        """Rows of the LM head: one a sequence, and one for each draft."""
        return len(self.context) + self.drafted


KnownDemand: TypeAlias = dict[tuple[Hashable, ...], list[StepDemand]]  # by all that it depends on


class MissingFromTraceError(TrilaneError):
    """A policy needs what the trace does not hold; the message says what, and how to get it."""


def demand_of(
    trace: Trace, steps: Sequence[StepRows], needs: Needs, noisy: NoisyForecasts | None = None
) -> list[StepDemand]:
    """Turn composed steps into demand, with what ``needs`` asks for and nothing more.

    ``noisy`` forecasts take the place of those that the trace lacks; weights take that of scores, but not for policies
    that change the routing. Raises MissingFromTraceError where scores or forecasts are lacking all the same.
    """
    _check_needs(trace, needs, noisy)
    return [_step(trace, step, needs, noisy) for step in steps]


def shared_demand(
    known: KnownDemand, trace: Trace, steps: tuple[StepRows, ...], needs: Needs, noisy: NoisyForecasts | None
) -> Sequence[StepDemand]:
    """``demand_of``, computed once for all callers that share ``known``. Demand that holds every token is large, and is
    not kept."""
    if needs.tokens:
        return demand_of(trace, steps, needs, noisy)
    layers = tuple(sorted(needs.forecast_layers.items()))
    key = (trace, steps, noisy, needs.scores, needs.forecasts, layers, needs.forecast_phases)
    if key not in known:
        known[key] = demand_of(trace, steps, needs, noisy)
    return known[key]


def lacking(trace: Trace, needs: Needs) -> list[ForecastKey]:
    """The forecasts that a policy needs and the trace does not hold."""
    needed = [ForecastKey(*pair) for pair in needs.forecasts]
    return [key for key in needed if key.kind != "oracle" and key not in trace.forecasts]


def future_of(demand: Sequence[StepDemand]) -> Future:
    """All layer events of a run in order: what only a clairvoyant policy may see."""
    return Future([(s.index, layer, r.active) for s in demand for layer, r in enumerate(s.routings)])


def _step(trace: Trace, step: StepRows, needs: Needs, noisy: NoisyForecasts | None) -> StepDemand:
    ids = np.asarray(trace.topk_ids[step.rows])
    layers, experts = ids.shape[1], trace.shape.experts
    routings = [Routing(active, tokens) for active, tokens in _split(count_experts(ids, experts))]
    if needs.tokens:
        weights = np.asarray(trace.topk_weights[step.rows])
        routings = [
            r._replace(token_ids=ids[:, layer].tolist(), token_weights=weights[:, layer].tolist())
            for layer, r in enumerate(routings)
        ]
    by_layer: list[list[Forecast]] = [[] for _ in range(layers)]
    for key in map(ForecastKey._make, needs.forecasts if step.phase in needs.forecast_phases else ()):
        reached = needs.forecast_layers.get(key.kind)
        for forecast in _forecasts(trace, step, routings, key, needs.tokens, noisy):
            if reached is None or forecast.layer in reached:
                for layer in _known_at(forecast, key):
                    by_layer[layer].append(forecast)
    scores = _scores(trace, step.rows) if needs.scores else None
    if scores is not None:
        scores.flags.writeable = False  # shared by all policies of a setting
    context = tuple(before + tokens for before, tokens in zip(step.context, step.tokens, strict=True))
    owners = tuple(np.repeat(step.sequences, step.tokens).tolist()) if needs.tokens else ()
    return StepDemand(
        step.index, step.phase, len(step.rows), context, tuple(routings),
        tuple(tuple(f) for f in by_layer), scores, owners, step.drafted, step.generated,
    )


def _scores(trace: Trace, rows: Rows) -> np.ndarray:
    """[tokens, layers, experts]: of a trace without scores the weights of the chosen experts, and 0 for the others."""
    if trace.scores is not None:
        return np.asarray(trace.scores[rows])
    ids, weights = np.asarray(trace.topk_ids[rows]), trace.topk_weights[rows]
    scores = np.zeros((*ids.shape[:2], trace.shape.experts), weights.dtype)
    np.put_along_axis(scores, ids.astype(np.intp), weights, axis=2)
    return scores


def _split(counts: np.ndarray, rank: np.ndarray | None = None) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(active, tokens) of each layer: ascending by expert; with ranks, descending by tokens, ties by lower rank."""
    layer, expert = np.nonzero(counts)
    tokens = counts[layer, expert]
    if rank is not None:
        order = np.lexsort((expert, rank[layer, expert], -tokens, layer))
        layer, expert, tokens = layer[order], expert[order], tokens[order]
    ends = np.searchsorted(layer, np.arange(1, counts.shape[0] + 1)).tolist()
    experts, counted = expert.tolist(), tokens.tolist()
    return [(tuple(experts[a:b]), tuple(counted[a:b])) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def _forecasts(
    trace: Trace, step: StepRows, routings: Sequence[Routing], key: ForecastKey, by_token: bool,
    noisy: NoisyForecasts | None,
) -> list[Forecast]:
    """Forecasts of one kind for every layer that has one; those of each token only with ``by_token``."""
    kind, lookahead = key
    if kind == "oracle":
        return [_oracle(layer, routing) for layer, routing in enumerate(routings) if layer >= lookahead]
    rows, about = _rows_of(trace, step, key)
    if not len(rows):
        return []
    ids, scores = _forecast_experts(trace, key, rows, about, noisy)
    chosen, experts = ids[:, :, : trace.shape.top_k], trace.shape.experts
    split = _split(count_experts(chosen, experts), best_ranks(chosen, experts))
    ahead = key.layers_ahead
    later = key.lookahead - 1 if key.by_token else 0
    forecasts = [
        Forecast(layer + ahead, kind, *split[layer], steps_ahead=later) for layer in range(ids.shape[1] - ahead)
    ]
    if not by_token:
        return forecasts
    return [
        forecast._replace(
            token_ids=ids[:, layer].tolist(), token_scores=() if scores is None else scores[:, layer].tolist()
        )
        for layer, forecast in enumerate(forecasts)
    ]


def _forecast_experts(
    trace: Trace, key: ForecastKey, rows: Rows, about: Rows, noisy: NoisyForecasts | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Experts [tokens, layers, m] and their scores, if there are any: recorded in ``rows``, or noisy ones ``about``
    other rows."""
    held = trace.forecasts.get(key)
    if held is not None:
        return np.asarray(held.ids[rows]), None if held.scores is None else np.asarray(held.scores[rows])
    assert noisy is not None
    return noisy.ids(trace, about, key), None


def _known_at(forecast: Forecast, key: ForecastKey) -> Sequence[int]:
    """The layers with which a forecast is given: that which makes it; all before its own if an earlier token does, the
    first if it is about a later step."""
    if forecast.steps_ahead:
        return (0,)
    return range(forecast.layer) if key.by_token else (forecast.layer - key.lookahead,)


def _rows_of(trace: Trace, step: StepRows, key: ForecastKey) -> tuple[Rows, Rows]:
    """The rows that hold a step's forecasts, and those that they are about. By token they are made by the token before
    a decode step; there are none where a sequence has no such token, or no later one.
    """
    if not key.by_token:
        return step.rows, step.rows
    about = rows_apart(trace, key.lookahead - 1)[step.rows] if key.lookahead > 1 else step.rows
    before = rows_apart(trace, -key.lookahead)[about]
    return (before[:0] if step.phase == "prefill" or (about < 0).any() or (before < 0).any() else before), about


def _oracle(layer: int, routing: Routing) -> Forecast:
    pairs = sorted(zip(routing.active, routing.tokens, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return Forecast(layer, "oracle", tuple(e for e, _ in pairs), tuple(w for _, w in pairs))


def _check_needs(trace: Trace, needs: Needs, noisy: NoisyForecasts | None) -> None:
    """Raises MissingFromTraceError where a trace, with noisy forecasts, cannot give what a policy needs."""
    if needs.scores and needs.changes_routing and trace.scores is None:
        raise MissingFromTraceError("the policy needs the scores of all experts, the trace has none: capture them too")
    for key in lacking(trace, needs):
        scored = needs.tokens and key.kind in WITH_SCORES
        if scored or noisy is None or not noisy.reach(key.lookahead):
            held = ", ".join(map(str, trace.forecasts)) or "none"
            example = f"[{', '.join(['0.8'] * key.lookahead)}]"
            noise = f"`--set noisy_forecast_recall='{example}'`, or `noisy_forecast_recall` in the scenario"
            raise MissingFromTraceError(
                f"the policy needs the forecast {key}, the trace has {held}: capture the model with "
                f"`trilane trace capture`, choose a policy without it (`trilane policies` lists what each needs)"
                + (" (noisy forecasts have no scores)" if scored else f", or state their recall ({noise})")
            )
    for key, forecast in trace.forecasts.items():
        if needs.tokens and key in needs.forecasts and key.kind in WITH_SCORES and forecast.scores is None:
            raise MissingFromTraceError(
                f"the policy needs the scores of the forecast {key}, the trace has its experts alone: capture the "
                f"model again with `trilane trace capture`, or choose a policy without it"
            )
