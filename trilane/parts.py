"""Parts for policies of your own: protocols, what a policy is shown and decides, and ready-made parts.

A policy is a ``Composition`` of a placement, a router, an assigner, a prefetcher and a cache. Each has a protocol here,
which says when its methods are called and what they may look at, and ready-made parts to take the others from.

>>> from trilane import Composition
>>> from trilane.parts import FromTokens, LruCache, NextLayer, PoolPlacement, TrueRouter
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trilane.common.lazy import lazy_names

if TYPE_CHECKING:  # the table of public names, read by ``lazy_names``
    from policies.calibration import Calibration as Calibration
    from policies.mechanism.views import Assignment as Assignment
    from policies.mechanism.views import ExpertCosts as ExpertCosts
    from policies.mechanism.views import ExpertId as ExpertId
    from policies.mechanism.views import Forecast as Forecast
    from policies.mechanism.views import LayerInput as LayerInput
    from policies.mechanism.views import LayerView as LayerView
    from policies.mechanism.views import ResidencyView as ResidencyView
    from policies.mechanism.views import Routing as Routing
    from policies.mechanism.views import Swap as Swap
    from policies.mechanism.views import Updates as Updates
    from policies.parts.assigners import ByPhase as ByPhase
    from policies.parts.assigners import CostRule as CostRule
    from policies.parts.assigners import FromTokens as FromTokens
    from policies.parts.assigners import LoadAll as LoadAll
    from policies.parts.assigners import ResidentOrCpu as ResidentOrCpu
    from policies.parts.assigners import StreamLayer as StreamLayer
    from policies.parts.assigners import ThresholdAssigner as ThresholdAssigner
    from policies.parts.belady import BeladyBypassCache as BeladyBypassCache
    from policies.parts.belady import BeladyCache as BeladyCache
    from policies.parts.caches import DemandCache as DemandCache
    from policies.parts.caches import FifoCache as FifoCache
    from policies.parts.caches import LfuCache as LfuCache
    from policies.parts.caches import LruCache as LruCache
    from policies.parts.caches import RandomCache as RandomCache
    from policies.parts.caches import RankedCache as RankedCache
    from policies.parts.caches import StaticCache as StaticCache
    from policies.parts.exact_assignment import ExactAssigner as ExactAssigner
    from policies.parts.future import Future as Future
    from policies.parts.pipeline_assigner import PipelineAssigner as PipelineAssigner
    from policies.parts.placements import LayerWisePlacement as LayerWisePlacement
    from policies.parts.placements import NoPlacement as NoPlacement
    from policies.parts.placements import PoolPlacement as PoolPlacement
    from policies.parts.placements import PopularityPlacement as PopularityPlacement
    from policies.parts.placements import RandomPlacement as RandomPlacement
    from policies.parts.prefetchers import ForecastPrefetcher as ForecastPrefetcher
    from policies.parts.prefetchers import NextLayer as NextLayer
    from policies.parts.prefetchers import NoProtection as NoProtection
    from policies.parts.prefetchers import TopPrefetcher as TopPrefetcher
    from policies.parts.prefetchers import next_forecast as next_forecast
    from policies.parts.routers import ForecastRouter as ForecastRouter
    from policies.parts.routers import TrueRouter as TrueRouter
    from policies.protocols import Assigner as Assigner
    from policies.protocols import Budget as Budget
    from policies.protocols import Cache as Cache
    from policies.protocols import InitialPlacement as InitialPlacement
    from policies.protocols import Placement as Placement
    from policies.protocols import Prefetcher as Prefetcher
    from policies.protocols import Router as Router
    from trilane.common.hints import above as above
    from trilane.common.hints import at_least as at_least
    from trilane.common.hints import between as between

__getattr__, __dir__, __all__ = lazy_names(__name__)
