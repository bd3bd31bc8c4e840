"""How far a run deviates from what the model's own router chose. Only policies that change the routing do.

A routed (token, expert) pair may be lost: another expert runs in its stead, or none. A token's lost experts are matched
with those that run instead by descending weight. Why a pair is not what the model asked for:

  substituted         lost; the layer was routed when it was reached, and a substitute runs
  speculated_wrongly  lost; the layer was committed ahead, and the forecast has the stand-in among the token's first k
  degraded            lost; the layer was committed ahead, to a stand-in that the forecast does not have there
  dropped             lost; no expert runs instead
  added               one more expert runs than were routed
  stale               run, but on the activations of the layer before: stand-ins and the router's own experts alike
  deferred            run, but the result is added to the output of the next layer
  narrowed            run, but with a narrow copy of the expert's weights
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from policies.mechanism.views import Forecast, Phase, Plan, PolicyError, Routing

if TYPE_CHECKING:
    import pandas as pd

LOSSES = ("substituted", "speculated_wrongly", "degraded", "dropped")
CAUSES = (*LOSSES, "added", "stale", "deferred", "narrowed")
TOTALS = (
    "approximated_token_share", "approximated_weight_share", *(f"{loss}_weight_share" for loss in LOSSES),
    "stale_weight_share", "stale_pair_share", "deferred_weight_share",
    "narrowed_weight_share",
)
_BASES = {"token": "tokens", "pair": "pairs", "weight": "weight"}  # what a share is a share of
_SHARES = ("approximated_token", "approximated_weight", *(f"{cause}_{base}" for cause in CAUSES for base in _BASES))


class RoutingErrors:
    """Counts what a run changes, as a backend plays it, layer by layer.

    ``weight_of``: how often a step counts. ``experts``: of a layer; numbers from there on are those of narrow copies.
    None: there are no such copies.
    """

    def __init__(self, weight_of: Callable[[int], float] = lambda _: 1.0, experts: int | None = None) -> None:
        self._weight_of, self._experts = weight_of, experts
        self._counts: dict[tuple[Phase, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def observe(
        self, step: int, phase: Phase, routed: Routing, plan: Plan, forecasts: Sequence[Forecast] | None
    ) -> None:
        """A layer was planned. ``routed`` is its own router's choice; ``forecasts`` are those that the layer was
        committed from, None if it was routed when it was reached.

        Raises PolicyError if the routing in force does not say which experts each token has.
        """
        if len(plan.routing.token_ids) != len(routed.token_ids):
            raise PolicyError(
                f"layer {plan.layer}, {phase}: expected a routing in force with the experts of each of "
                f"{len(routed.token_ids)} tokens (token_ids), got those of {len(plan.routing.token_ids)}"
            )
        count, times = self._counts[phase, plan.layer], self._weight_of(step)
        tokens = zip(routed.token_ids, routed.token_weights, plan.routing.token_ids, strict=True)
        for token, (true, weights, run) in enumerate(tokens):
            forecast = None if forecasts is None else _first_of(forecasts, plan.layer, token, len(true))
            changes = [
                *_losses(true, [self._wide(e) for e in run], forecast),
                *(("stale", e) for e in run if e in plan.precomputed),
                *(("deferred", e) for e in run if e in plan.deferred),
                *(("narrowed", self._wide(e)) for e in run if e != self._wide(e)),
            ]
            count["tokens"] += times
            count["pairs"] += times * len(true)
            count["weight"] += times * sum(weights)
            _add(count, changes, dict(zip(true, weights, strict=True)), times)

    def _wide(self, expert: int) -> int:
        """The expert itself, for a narrow copy of it."""
        return expert if self._experts is None else expert % self._experts

    def frame(self) -> pd.DataFrame:
        """One row a phase and layer, prefill first: ``tokens``, ``pairs`` and ``weight`` of the true routing of the
        whole answer, and for each cause the shares of them that it concerns.

        ``approximated_token_share``: tokens that any cause concerns; ``approximated_weight_share``: routing weight of
        pairs that are lost, stale, deferred or narrowed.
        """
        import pandas as pd

        ordered = sorted(self._counts.items(), key=lambda item: (item[0][0] == "decode", item[0][1]))
        rows = [
            {"phase": phase, "layer": layer, "tokens": round(count["tokens"]), "pairs": round(count["pairs"]),
             "weight": count["weight"], **{f"{name}_share": _share(count, name) for name in _SHARES}}
            for (phase, layer), count in ordered
        ]
        return pd.DataFrame(rows, columns=["phase", "layer", *_BASES.values(), *(f"{name}_share" for name in _SHARES)])


def totals_of(frame: pd.DataFrame | None) -> dict[str, float | None]:
    """Shares over all layers of the decode steps, by name (``TOTALS``); None if there are none, or no change."""
    if frame is None or not (frame.phase == "decode").any():
        return dict.fromkeys(TOTALS)
    decode = frame[frame.phase == "decode"]
    return {name: _mean(decode, name) for name in TOTALS}


def _first_of(forecasts: Sequence[Forecast], layer: int, token: int, k: int) -> set[int]:
    """Experts that the forecasts of a layer put among a token's first k."""
    return {e for f in forecasts if f.layer == layer and f.token_ids for e in f.token_ids[token][:k]}


def _losses(true: Sequence[int], run: Sequence[int], forecast: set[int] | None) -> Iterator[tuple[str, int]]:
    """(cause, lost expert); an added expert is named itself."""
    lost, instead = [e for e in true if e not in run], [e for e in run if e not in true]
    for gone, stand_in in zip_longest(lost, instead):
        if gone is None:
            yield "added", stand_in
        elif stand_in is None:
            yield "dropped", gone
        elif forecast is None:
            yield "substituted", gone
        else:
            yield "speculated_wrongly" if stand_in in forecast else "degraded", gone


def _add(
    count: dict[str, float], changes: Sequence[tuple[str, int]], weight_of: dict[int, float], times: float
) -> None:
    """One token's changes, ``times`` over; experts that were not routed to it have no weight that could be lost."""
    for cause, expert in changes:
        weight = times * weight_of.get(expert, 0.0)
        count[f"{cause}_pair"] += times
        count[f"{cause}_weight"] += weight
        count["approximated_weight"] += weight
    for cause in {cause for cause, _ in changes}:
        count[f"{cause}_token"] += times
    count["approximated_token"] += times * bool(changes)


def _share(count: dict[str, float], name: str) -> float:
    whole = count[_BASES[name.rpartition("_")[2]]]
    return count[name] / whole if whole else 0.0


def _mean(frame: pd.DataFrame, name: str) -> float:
    base = frame[_BASES[name.removesuffix("_share").rpartition("_")[2]]]
    return float((frame[name] * base).sum() / (base.sum() or 1))
