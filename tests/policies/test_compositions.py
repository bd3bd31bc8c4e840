"""What every policy is made of with its default parameters: parts, staging slots, and how its decisions are charged."""

from __future__ import annotations

from dataclasses import fields

import pytest

from policies.mechanism.views import INFINITE_NS
from policies.registry import compose
from tests.policies.test_parameters import CONTEXT

# Of a model of 8 layers of 64 experts, 2 a token, and a batch of 2. Fields that are those of any composition, and the
# router that changes nothing, are left out.
COMPOSITIONS = {
    "on-demand": {"placement": "NoPlacement()", "assigner": "LoadAll()", "cache": "LruCache()"},
    "layer-wise llama.cpp ktransformers@layer-wise": {
        "placement": "LayerWisePlacement()", "assigner": "ResidentOrCpu()", "cache": "StaticCache()",
        "demand_slots": "0", "decision_cost": "'layer-wise'",
    },
    "naive-cpu": {
        "placement": "NoPlacement()", "assigner": "ResidentOrCpu()", "cache": "StaticCache()", "demand_slots": "0",
    },
    "llama.cpp@impl": {
        "placement": "LayerWisePlacement()",
        "assigner": "FromTokens(least=64, large=LoadAll(), small=ResidentOrCpu())", "cache": "StaticCache()",
        "demand_slots": "1",
    },
    "ktransformers": {
        "placement": "PopularityPlacement(uniform=False, popularity=None)",
        "assigner": "ByPhase(prefill=LoadAll(), decode=ResidentOrCpu())", "cache": "StaticCache()",
    },
    "strata": {
        "placement": "PopularityPlacement(uniform=False, popularity=None)",
        "assigner": "FromTokens(least=128, large=LoadAll(), "
            "small=SettledShare(assigner=MissShare(share=0.55, most=16), most=16, probed=8, share=None))",
        "awaits_swaps": "True", "cache": "AdaptiveTier(every=4, most=96, decay=0.7, least=2, margin=1.5, steps=0)",
        "demand_slots": "16", "decision_cost": "'fiddler'",
    },
    "kt-deferral": {
        "placement": "PopularityPlacement(uniform=False, popularity=None)",
        "assigner": "ByPhase(prefill=ByPhase(prefill=LoadAll(), decode=ResidentOrCpu()), "
            "decode=DeferLowest(assigner=ResidentOrCpu(), deferred=None, immediate=2))",
        "cache": "StaticCache()",
    },
    "moe-lightning": {
        **dict.fromkeys(
            ("placement", "assigner", "prefetcher"), "FixedPlan(steps=400, most=4, streamed=None, into='staging')"
        ),
        "cache": "StaticCache()", "prefetch_slots": "4",
    },
    "moe-lightning@impl": {
        "placement": "PopularityPlacement(uniform=True, popularity=None)", "assigner": "StreamLayer()",
        "prefetcher": "NextLayer(into='staging')", "cache": "StaticCache()", "prefetch_slots": "64",
    },
    "deepspeed": {
        "placement": "NoPlacement()", "assigner": "StreamLayer()", "prefetcher": "NextLayer(into='staging')",
        "cache": "StaticCache()", "prefetch_slots": "64",
    },
    "mixtral-offloading": {
        "placement": "LastExperts()", "assigner": "LoadAll()",
        "prefetcher": "TopPrefetcher(size=2, considered=None, kind='gate', into='staging', protects=False)",
        "cache": "SpeculativeLruCache()", "prefetch_slots": "4",
    },
    "mixtral-offloading@impl": {
        "placement": "LastExperts()", "assigner": "LoadAll()", "cache": "LruCache()", "writes_back": "'in turn'",
        "demand_slots": "4",
    },
    "moe-infinity": {
        "placement": "Pooled(placement=PopularityPlacement(uniform=False))", "assigner": "LoadAll()",
        "prefetcher": "ActivationPrefetcher(size=16, lookahead=8, floor=0.5, into='cache')",
        "cache": "ActivationCache()",
    },
    "moe-infinity@impl": {
        "placement": "PoolPlacement()", "assigner": "LoadAll()", "cache": "LfuCache(history=False, recency=False)",
    },
    "edgemoe": {
        "placement": "Pooled(placement=PopularityPlacement(uniform=False))", "assigner": "LoadAll()",
        "prefetcher": "ProfilePrefetcher(profile=ActivationProfile(together=False), size=2, among_all=True, "
        "routing=None, into='cache')",
        "cache": "DistanceLfuCache()",
    },
    "adapmoe": {
        "placement": "SlotsByMissesFull(slots=SlotsByMisses())", "assigner": "LoadAll()",
        "prefetcher": "TopPrefetcher(size=1, considered=None, kind='gate', into='cache', protects=True)",
        "cache": "LruCache()",
    },
    "fiddler": {
        "placement": "PopularityPlacement(uniform=False, popularity=None)", "assigner": "CostRule()",
        "cache": "StaticCache()",
    },
    "fiddler@impl": {
        "placement": "PopularityPlacement(uniform=False, popularity=None)",
        "assigner": "ThresholdAssigner(theta=9, stay=True)", "cache": "StaticCache()", "demand_slots": "1",
    },
    "dali": {
        "placement": "RandomPlacement(seed=0)", "assigner": "GreedyAssigner()",
        "prefetcher": "TopPrefetcher(size=4, considered=None, kind='residual', into='staging', protects=False)",
        "cache": "WindowCache(admits=False, window=4, update=8, guard=False, busiest=False, begins=True)",
        "prefetch_slots": "8",
    },
    "dali-ilp": {
        "placement": "RandomPlacement(seed=0)", "assigner": "ExactAssigner()",
        "prefetcher": "TopPrefetcher(size=4, considered=None, kind='residual', into='staging', protects=False)",
        "cache": "WindowCache(admits=False, window=4, update=8, guard=False, busiest=False, begins=True)",
        "prefetch_slots": "8", "decision_cost": "'dali-ilp'",
    },
    "dali-beam": {
        "placement": "RandomPlacement(seed=0)", "assigner": "BeamAssigner(width=2)",
        "prefetcher": "TopPrefetcher(size=4, considered=None, kind='residual', into='staging', protects=False)",
        "cache": "WindowCache(admits=False, window=4, update=8, guard=False, busiest=False, begins=True)",
        "prefetch_slots": "8", "decision_cost": "'dali-beam'",
    },
    "hybrimoe": {
        "placement": "RandomPlacement(seed=0)",
        "assigner": "SimulationAssigner(schedule=Schedule(rule='finish', guard=True))",
        "prefetcher": "ImpactPrefetcher(schedule=Schedule(rule='finish', guard=True), size=4, discount=1.0, "
            "kind='gate', pooled=False, arrival=True, into='cache')",
        "cache": "MrsCache(background=None, by_score=False, reached_first=False, keep=4, alpha=0.3, tokens='mean')",
    },
    "hybrimoe@impl": {
        "placement": "RandomPlacement(seed=0)", "assigner": "ByPhase(prefill=LoadAll(), decode=HssAssigner())",
        "cache": "MrsCache(background=None, by_score=False, reached_first=False, keep=4, alpha=0.5, tokens='first')",
    },
    "static-threshold": {
        "placement": "PopularityPlacement(uniform=False, popularity=None)",
        "assigner": "ThresholdAssigner(theta=None, stay=True)",
        "prefetcher": "TopPrefetcher(size=4, considered=None, kind='gate', into='cache', protects=True)",
        "cache": "MrsCache(background=None, by_score=False, reached_first=False, keep=4, alpha=0.3, tokens='mean')",
    },
    "random-prefetch": {
        "placement": "RandomPlacement(seed=0)", "assigner": "GreedyAssigner()",
        "prefetcher": "RandomPrefetcher(experts=64, size=4, into='staging')", "cache": "StaticCache()",
        "prefetch_slots": "8",
    },
    "smoe": {
        "placement": "RandomPlacement(seed=0)", "router": "CacheRouter(alpha=0.25, listing=False, norm_topk=True)",
        "assigner": "TwoPointer(sooner=False)", "prefetcher": "TopScorePrefetcher(alpha=0.25, into='cache')",
        "cache": "ScoreWindowCache()",
    },
    "daop": {
        "placement": "PopularityPlacement(uniform=True)", "router": "PredictingRouter(norm_topk=True, degrade=True)",
        "assigner": "ResidentOrCpu(absent_ns=1)",
        "cache": "PromptSwapCache(experts=64, most=32, threshold=1.05, rule='guarded', retry=False)",
        "demand_slots": "0",
    },
    "daop@impl": {
        "placement": "PopularityPlacement(uniform=True)", "router": "PredictingRouter(norm_topk=True, degrade=True)",
        "assigner": "ByPhase(prefill=AfterSwaps(cpu_tokens=None), decode=ResidentOrCpu(absent_ns=1))",
        "cache": "PromptSwapCache(experts=64, most=8, threshold=1.05, rule='coded', retry=True)", "demand_slots": "8",
    },
    "router-pf quasi-pf est-pf hybrid-pf": {
        "placement": "NoPlacement()", "router": "SpeculativeRouter(norm_topk=True, top_k=2)",
        "assigner": "InExpertOrder()", "prefetcher": "BufferPrefetcher(into='staging')", "cache": "StaticCache()",
        "demand_slots": "4", "prefetch_slots": "8",
    },
    "router-pf@exact quasi-pf@exact est-pf@exact hybrid-pf@exact": {
        "placement": "NoPlacement()", "assigner": "InExpertOrder()", "prefetcher": "BufferPrefetcher(into='staging')",
        "cache": "StaticCache()", "demand_slots": "4", "prefetch_slots": "8",
    },
    "quasi-pf@impl": {
        "placement": "NoPlacement()", "router": "SpeculativeRouter(norm_topk=True, top_k=2)",
        "assigner": "ByPhase(prefill=StreamLayer(), decode=InExpertOrder())",
        "prefetcher": "LayerPrefetcher(into='staging', whole=NextLayer(into='staging'))", "cache": "StaticCache()",
        "demand_slots": "4", "prefetch_slots": "128",
    },
    "hobbit": {
        "placement": "PoolPlacement()",
        "router": "MixedWidthRouter(thresholds=Thresholds(narrow=0.6, skip=0.9), copies=Copies(experts=64))",
        "assigner": "LoadAll()",
        "prefetcher": "AdaptivePrefetcher(thresholds=Thresholds(narrow=0.6, skip=0.9), copies=Copies(experts=64), "
            "top_k=2, into='cache')",
        "cache": "FourScoresCache(router=MixedWidthRouter(thresholds=Thresholds(narrow=0.6, skip=0.9), "
            "copies=Copies(experts=64)), recent=0.25, frequent=0.25, precise=0.25, near=0.25, layers=8, step=1)",
    },
    "best-exact": {
        "placement": "Pooled(placement=PopularityPlacement(uniform=False, popularity=None))",
        "assigner": "PipelineAssigner(copy_weight=1.0)", "prefetcher": "ForecastPrefetcher(into='cache', pooled=True)",
        "cache": "MrsCache(background='prefill', by_score=False, reached_first=True, keep=12, alpha=0.1, "
            "tokens='mean')",
        "decision_cost": "'best-exact'",
    },
    "best-approx": {
        "placement": "Pooled(placement=PopularityPlacement(uniform=False, popularity=None))",
        "router": "CacheRouter(alpha=0.2, listing=False, norm_topk=True)",
        "assigner": "PipelineAssigner(copy_weight=1.0)",
        "prefetcher": "ForecastPrefetcher(into='cache', pooled=True)",
        "cache": "MrsCache(background='prefill', by_score=False, reached_first=True, keep=12, alpha=0.1, "
            "tokens='mean')",
        "decision_cost": "'best-approx'",
    },
    "mix": {
        "placement": "RandomPlacement(seed=0)", "assigner": "PipelineAssigner(copy_weight=1.0)",
        "prefetcher": "ForecastPrefetcher(into='cache', pooled=False)", "cache": "LruCache()",
        "decision_cost": "'mix'",
    },
    "oracle": {
        "placement": "FuturePlacement(pool=False)", "assigner": "ExactAssigner()",
        "prefetcher": "TopPrefetcher(size=64, considered=None, kind='oracle', into='cache', protects=False)",
        "cache": "BeladyBypassCache()", "prefetch_slots": "4",
    },
}
BY_POLICY = {policy: parts for policies, parts in COMPOSITIONS.items() for policy in policies.split()}
_SHARED = (  # with another part, or where a run is
    "matcher", "cache", "plan", "future", "layer", "reached", "event", "place",
)


@pytest.mark.parametrize("policy", BY_POLICY)
def test_parts_of_every_policy(policy: str) -> None:
    made = compose(policy, context=CONTEXT)
    parts = [field for field in fields(made)[:-3] if getattr(made, field.name) != field.default]
    found = {field.name: in_short(getattr(made, field.name)) for field in parts}
    assert found == {"router": "TrueRouter()", **BY_POLICY[policy]}


def in_short(part: object) -> str:
    """A value, or a part with its plain values and its own parts; what it has counted so far is left out."""
    if part is None or isinstance(part, bool | int | float | str):
        return "" if part == INFINITE_NS else repr(part)
    if not type(part).__module__.startswith("policies."):
        return ""
    names = [name for name in (*getattr(part, "__dict__", ()), "into") if hasattr(part, name)]
    held = {name.lstrip("_"): getattr(part, name) for name in names}
    shown = {name: in_short(value) for name, value in held.items() if name not in _SHARED}
    return f"{type(part).__name__}({', '.join(f'{name}={text}' for name, text in shown.items() if text)})"
