"""Speculating Experts put together: Router-PF on two hidden states, Est-PF, Hybrid-PF, and for each its exact twin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from policies.papers.speculating_experts.parts import (
    BufferPrefetcher,
    InExpertOrder,
    LayerPrefetcher,
    SpeculativeRouter,
)
from policies.parts.assigners import ByPhase
from policies.parts.caches import StaticCache
from policies.parts.layer_streaming import StreamLayer
from policies.parts.lru import LruCache
from policies.parts.placements import NoPlacement
from policies.parts.routers import TrueRouter
from policies.protocols import Composition, Needs
from policies.system import BuildContext, ChoiceError, System, at_least, shares

SOURCE = "Speculating Experts, Section 5.1, Algorithm 1"
ESTIMATOR_SOURCE = "Speculating Experts, Sections 6.1-6.3"
Layers = Mapping[str, frozenset[int]]


@dataclass(frozen=True)
class SpeculationParameters:
    """Two buffers and nothing else, unless told otherwise.

    buffer_experts: experts that one of the two buffers holds. None: what a decode step may need, that is top-k for
        every sequence of the batch, at most a whole layer (K in the paper, which has batch 1). As many staging slots
        again take what layers load on demand, because demand loads and prefetches have separate quotas (ours).
    cache: "none" as in the paper, which leaves cache memory unused; "lru" keeps what was copied, by layer (ours).
    """

    buffer_experts: int | None = None
    cache: Literal["none", "lru"] = "none"

    def __post_init__(self) -> None:
        """A buffer that holds nothing is none."""
        at_least(self, buffer_experts=1)


@dataclass(frozen=True)
class HybridParameters(SpeculationParameters):
    """Those of every speculation, and where the estimator takes over.

    router_side: forecast of the other layers, "quasi_hidden" (Section 6.3) or "gate".
    threshold: the estimator forecasts a layer whose recall@K by the router side is lower on calibration prompts. 0.8 is
        ours: the paper only says "low".
    layers: those that the estimator forecasts, by number; None: by threshold, which needs calibration.
    """

    router_side: Literal["quasi_hidden", "gate"] = "quasi_hidden"
    threshold: float = 0.8
    layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        """A recall is a share."""
        super().__post_init__()
        shares(self, "threshold")


@dataclass(frozen=True)
class ImplParameters:
    """No parameters: the released code has two buffers of a layer each, and no cache."""


def speculation_needs(*kinds: str, exact: bool, **others: Any) -> Needs:
    """What executing forecasts of these kinds takes; an ``exact`` twin only prefetches by them."""
    forecasts = tuple((kind, 1) for kind in kinds)
    return Needs(tokens=not exact, forecasts=forecasts, gpu_only=True, changes_routing=not exact, **others)


def buffers(name: str, needs: Needs, parameters: SpeculationParameters, context: BuildContext) -> Composition:
    """Two buffers that any forecast fills; ``needs`` say which, and whether it is executed."""
    size = parameters.buffer_experts or min(context.top_k * context.batch, context.experts)
    keeps = parameters.cache == "lru"
    return Composition(
        name=name,
        placement=NoPlacement(),
        router=SpeculativeRouter(context.top_k, context.norm_topk) if needs.changes_routing else TrueRouter(),
        assigner=InExpertOrder(),
        prefetcher=BufferPrefetcher("cache" if keeps else "staging"),
        cache=LruCache() if keeps else StaticCache(),
        needs=needs,
        demand_slots=size,
        prefetch_slots=2 * size,
        parameters={**asdict(parameters), "buffer_experts": size},
    )


def estimated_layers(name: str, parameters: HybridParameters, context: BuildContext) -> list[int]:
    """The layers that the estimator forecasts. Raises ChoiceError if they cannot be told, or are not there."""
    if parameters.layers is not None:
        return _checked(name, parameters.layers, context.layers)
    key, calibration = (parameters.router_side, 1), context.required_calibration(name)
    if key not in calibration.recalls:
        held = ", ".join(f"{kind}@{lookahead}" for kind, lookahead in calibration.recalls) or "none"
        raise ChoiceError(
            f"policy {name!r} chooses layers by the recall of the forecast {key[0]}@1; calibration "
            f"{calibration.source} has forecasts {held}: capture it with that one too, or name the layers that the "
            f"estimator forecasts (parameter 'layers')"
        )
    recalls = calibration.recalls[key]
    return [layer for layer in range(1, context.layers) if recalls[layer] < parameters.threshold]


def _checked(name: str, layers: Sequence[int], count: int) -> list[int]:
    if not all(type(layer) is int and 0 < layer < count for layer in layers):
        raise ChoiceError(f"policy {name!r}: layers: expected numbers from 1 to {count - 1}, got {list(layers)}")
    return sorted(set(layers))


def by_layer(parameters: HybridParameters, estimated: Sequence[int], layers: int) -> Layers:
    """Who forecasts which layer, so that no forecast is paid for in vain."""
    rest = frozenset(range(1, layers)) - frozenset(estimated)
    return {parameters.router_side: rest, "estimator": frozenset(estimated)}


def speculation(name: str, kind: str, what: str, exact: bool, source: str = SOURCE) -> System:
    """One row: a forecast for all layers, executed or (``exact``) only prefetched by."""
    needs = speculation_needs(kind, exact=exact)

    def build(parameters: SpeculationParameters, context: BuildContext) -> Composition:
        return buffers(name, needs, parameters, context)

    return System(name, _summary(what, exact), source, SpeculationParameters, build, needs)


def hybrid(name: str, exact: bool) -> System:
    """One row: the estimator where the router side is too often wrong."""

    def build(parameters: HybridParameters, context: BuildContext) -> Composition:
        kinds, chosen = (parameters.router_side, "estimator"), estimated_layers(name, parameters, context)
        needs = speculation_needs(
            *kinds, exact=exact, calibration=parameters.layers is None,
            forecast_layers=by_layer(parameters, chosen, context.layers),
        )  # fmt: skip
        built = buffers(name, needs, parameters, context)
        return replace(built, parameters={**built.parameters, "layers": chosen})

    needs = speculation_needs("quasi_hidden", "estimator", exact=exact, calibration=True)
    what = "quasi-hidden state or estimator"
    return System(name, _summary(what, exact), ESTIMATOR_SOURCE, HybridParameters, build, needs)


def _summary(what: str, exact: bool) -> str:
    return f"two buffers, {what}; {'misses fetched again' if exact else 'forecasts are run'}"


IMPL_NEEDS = replace(speculation_needs("quasi_hidden", exact=False), forecast_phases=("decode",))


def build_impl(parameters: ImplParameters, context: BuildContext) -> Composition:
    """The released code (yalis, branch offload_prefetch): external/model.py and offloading/manager.py.

    Two buffers of a whole layer: a prefill, which needs no forecast, copies all experts of a layer and the next one's
    ahead (that it is routed truly is our reading); decode executes the quasi-hidden state's forecast and keeps nothing
    from token to token. Its host synchronises with every layer's prediction, as the engine's does for every policy.
    """
    built = buffers("quasi-pf@impl", IMPL_NEEDS, SpeculationParameters(), context)
    return replace(
        built,
        assigner=ByPhase(prefill=StreamLayer(context.experts), decode=InExpertOrder()),
        prefetcher=LayerPrefetcher(context.layers, context.experts),
        prefetch_slots=2 * context.experts,
        parameters={},
    )


GATE = ("gate", "next gate")
QUASI = ("quasi_hidden", "quasi-hidden state")
ESTIMATOR = ("estimator", "trained estimator")
QUASI_PF_IMPL = System(
    name="quasi-pf@impl",
    summary="whole layers in prefill, forecasts run in decode",
    source="axonn-ai/yalis b1970f7, branch offload_prefetch",
    parameters=ImplParameters,
    build=build_impl,
    needs=IMPL_NEEDS,
)
SPECULATING_EXPERTS = (
    speculation("router-pf", *GATE, exact=False),
    speculation("router-pf@exact", *GATE, exact=True),
    speculation("quasi-pf", *QUASI, exact=False),
    speculation("quasi-pf@exact", *QUASI, exact=True),
    QUASI_PF_IMPL,
    speculation("est-pf", *ESTIMATOR, exact=False, source=ESTIMATOR_SOURCE),
    speculation("est-pf@exact", *ESTIMATOR, exact=True, source=ESTIMATOR_SOURCE),
    hybrid("hybrid-pf", exact=False),
    hybrid("hybrid-pf@exact", exact=True),
)
