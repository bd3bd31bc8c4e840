"""Speculating Experts (Section 5.1, Algorithm 1): two expert buffers, filled one layer ahead by a forecast.

Router-PF on two hidden states, Est-PF, Hybrid-PF, and for each an exact variant. While the experts of layer l are
computed from one buffer, those forecast for layer l+1 are copied into the other; a forecast may then be executed as it
is, without the true router. The last layer forecasts nothing for the next token (the paper does not say), so the first
layer of every step is routed by its router and copied then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from policies.mechanism.views import Assignment, ExpertId, Forecast, LayerView
from policies.parts.assigners import ByPhase, StreamLayer
from policies.parts.caches import LruCache, StaticCache
from policies.parts.objective import assignment_of, durations
from policies.parts.placements import NoPlacement
from policies.parts.prefetchers import NextLayer, NoProtection, next_forecast
from policies.parts.routers import ForecastRouter, TrueRouter
from policies.protocols import Composition, Needs
from policies.system import BuildContext, ChoiceError, Policy, register
from trilane.common.hints import Count, Share

SOURCE = "Speculating Experts, Section 5.1, Algorithm 1"
ESTIMATOR_SOURCE = "Speculating Experts, Sections 6.1-6.3"


class SpeculativeRouter(ForecastRouter):
    """Executes the forecast in decode: the next layer's routing is each token's ``top_k`` best, never verified.

    A prefill uses the true router (our reading: Section 5.2 leaves nothing to predict there).
    """

    def __init__(self, top_k: int, norm_topk: bool = True) -> None:
        super().__init__(norm_topk)
        self.top_k = top_k

    def select(self, ranked: Sequence[int], view: LayerView) -> Sequence[int]:
        """The best, on either device."""
        return ranked[: self.top_k]


class InExpertOrder:
    """All experts on the GPU; absent ones are copied, and streamed through the buffers, in expert order."""

    def assign(self, view: LayerView) -> Assignment:
        gpu_ns, _ = durations(view)
        expected = view.costs[view.layer].first_gpu_ns + sum(gpu_ns)
        return assignment_of(view, range(len(gpu_ns)), [True] * len(gpu_ns), expected)


class BufferPrefetcher(NoProtection):
    """Fills the other buffer with the experts forecast for the next layer, in expert order.

    In prefill there may be more than the buffer holds: they follow as its slots become free (ours; Section 5.2 loads
    every expert).
    """

    def __init__(self, into: Literal["cache", "staging"] = "staging") -> None:
        self.into = into

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        forecast = next_forecast(view, forecasts)
        return [] if forecast is None else [ExpertId(forecast.layer, expert) for expert in sorted(forecast.active)]


class LayerPrefetcher(BufferPrefetcher):
    """Prefetches as those of BufferPrefetcher in decode; in prefill, all experts of the next layer (yalis,
    offloading/manager.py)."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        self._whole = NextLayer(layers, experts)

    def rank(self, view: LayerView, forecasts: Sequence[Forecast], plan: Assignment) -> Sequence[ExpertId]:
        if view.phase == "decode":
            return super().rank(view, forecasts, plan)
        return self._whole.rank(view, forecasts, plan)


def _needs(*kinds: str, exact: bool, calibration: bool = False) -> Needs:
    """The needs of executing forecasts of these kinds; an ``exact`` variant only prefetches by them."""
    forecasts = tuple((kind, 1) for kind in kinds)
    return Needs(
        tokens=not exact, forecasts=forecasts, calibration=calibration, gpu_only=True, changes_routing=not exact
    )


@dataclass(frozen=True)
class Speculation(Policy):
    """Two buffers and nothing else, unless parameters say otherwise.

    buffer_experts: experts that one of the two buffers holds. None: what a decode step may need, that is top-k for
        every sequence of the batch, at most a whole layer (K in the paper, which has batch 1). As many staging slots
        again hold what layers load on demand, because demand loads and prefetches have separate quotas (ours).
    cache: "none" as in the paper, which leaves cache memory unused; "lru" keeps what was copied, by layer (ours).
    """

    kind: ClassVar[str]  # of the forecast
    exact: ClassVar[bool] = False  # forecasts only prefetch

    buffer_experts: Count | None = None
    cache: Literal["none", "lru"] = "none"

    @property
    def needs(self) -> Needs:
        return _needs(self.kind, exact=self.exact)

    def compose(self, context: BuildContext) -> Composition:
        """Two buffers that any forecast fills."""
        size = self.buffer_experts or min(context.top_k * context.batch, context.experts)
        keeps = self.cache == "lru"
        return Composition(
            placement=NoPlacement(),
            router=TrueRouter() if self.exact else SpeculativeRouter(context.top_k, context.norm_topk),
            assigner=InExpertOrder(),
            prefetcher=BufferPrefetcher("cache" if keeps else "staging"),
            cache=LruCache() if keeps else StaticCache(),
            demand_slots=size,
            prefetch_slots=2 * size,
            parameters={"buffer_experts": size},
        )


@register("router-pf", "two buffers, next gate; forecasts are run", SOURCE)
class RouterPf(Speculation):
    kind = "gate"


@register("router-pf@exact", "two buffers, next gate; misses fetched again", SOURCE)
class RouterPfExact(RouterPf):
    exact = True


@register("quasi-pf", "two buffers, quasi-hidden state; forecasts are run", SOURCE)
class QuasiPf(Speculation):
    kind = "quasi_hidden"


@register("quasi-pf@exact", "two buffers, quasi-hidden state; misses fetched again", SOURCE)
class QuasiPfExact(QuasiPf):
    exact = True


@register(
    "quasi-pf@impl",
    "whole layers in prefill, forecasts run in decode",
    source="axonn-ai/yalis b1970f7, branch offload_prefetch",
)
@dataclass(frozen=True)
class QuasiPfImpl(Policy):
    """No parameters: the released code has two buffers of a layer each, and no cache."""

    needs = replace(_needs("quasi_hidden", exact=False), forecast_phases=("decode",))

    def compose(self, context: BuildContext) -> Composition:
        """The released code (yalis, branch offload_prefetch): external/model.py and offloading/manager.py.

        Two buffers of a whole layer: a prefill, which needs no forecast, copies all experts of a layer and the next
        one's ahead (that it uses the true router is our reading); decode executes the quasi-hidden state's forecast and
        keeps nothing from token to token. Its host synchronises with every layer's prediction, as the engine's does for
        every policy.
        """
        return replace(
            QuasiPf().compose(context),
            assigner=ByPhase(prefill=StreamLayer(context.experts), decode=InExpertOrder()),
            prefetcher=LayerPrefetcher(context.layers, context.experts),
            prefetch_slots=2 * context.experts,
            parameters={},
        )


@register("est-pf", "two buffers, trained estimator; forecasts are run", ESTIMATOR_SOURCE)
class EstPf(Speculation):
    kind = "estimator"


@register("est-pf@exact", "two buffers, trained estimator; misses fetched again", ESTIMATOR_SOURCE)
class EstPfExact(EstPf):
    exact = True


@register("hybrid-pf", "two buffers, quasi-hidden state or estimator; forecasts are run", ESTIMATOR_SOURCE)
@dataclass(frozen=True)
class HybridPf(Speculation):
    """Parameters of every speculation, and the layers that the estimator forecasts.

    router_side: forecast of the other layers, "quasi_hidden" (Section 6.3) or "gate".
    threshold: the estimator forecasts a layer whose recall@K by the router side is lower on calibration prompts. 0.8 is
        ours: the paper only says "low".
    layers: those that the estimator forecasts, by number; None: by threshold, which needs calibration.
    """

    router_side: Literal["quasi_hidden", "gate"] = "quasi_hidden"
    threshold: Share = 0.8
    layers: Sequence[int] | None = None

    @property
    def needs(self) -> Needs:
        return _needs(self.router_side, "estimator", exact=self.exact, calibration=self.layers is None)

    def compose(self, context: BuildContext) -> Composition:
        """Each layer with the forecast that was chosen for it, so that no forecast is computed in vain."""
        chosen, made = self._estimated(context), super().compose(context)
        rest = frozenset(range(1, context.layers)) - frozenset(chosen)
        forecast_layers: Mapping[str, frozenset[int]] = {self.router_side: rest, "estimator": frozenset(chosen)}
        needs = replace(self.needs, forecast_layers=forecast_layers)
        return replace(made, needs=needs, parameters={**made.parameters, "layers": chosen})

    def _estimated(self, context: BuildContext) -> list[int]:
        """The layers that the estimator forecasts. Raises ChoiceError if that is unknown, or if they do not exist."""
        if self.layers is not None:
            return _checked(self.layers, context)
        key, calibration = (self.router_side, 1), context.required_calibration()
        if key not in calibration.recalls:
            held = ", ".join(f"{kind}@{lookahead}" for kind, lookahead in calibration.recalls) or "none"
            raise ChoiceError(
                f"policy {context.policy!r} chooses layers by the recall of the forecast {key[0]}@1; calibration "
                f"{calibration.source} has forecasts {held}: capture it with that one too, or name the layers that the "
                f"estimator forecasts (parameter 'layers')"
            )
        recalls = calibration.recalls[key]
        return [layer for layer in range(1, context.layers) if recalls[layer] < self.threshold]


def _checked(layers: Sequence[int], context: BuildContext) -> list[int]:
    last = context.layers - 1
    if not all(type(layer) is int and 0 < layer <= last for layer in layers):
        raise ChoiceError(
            f"policy {context.policy!r}: layers: expected numbers from 1 to {last}, got {list(layers)}"
        )
    return sorted(set(layers))


@register("hybrid-pf@exact", "two buffers, quasi-hidden state or estimator; misses fetched again", ESTIMATOR_SOURCE)
class HybridPfExact(HybridPf):
    exact = True
