"""The better compositions: mixes of the parts, found by search (``notebooks/better_compositions.ipynb``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from policies.mix import Mix
from policies.parts.caches import StaticCache
from policies.parts.host_level import AfterReads, ReadForecast
from policies.protocols import Composition
from policies.system import BuildContext, register
from trilane.common.hints import Count, Share

TUNED_POLICIES = ("best-exact", "best-approx")
TUNED_ON_TRACES = ("mini-deepseek", "mini-moe")  # of the search that found them; a later one found nothing better
TUNED_ON_SEQUENCES = range(10)


@register(
    "best-exact",
    "the fastest mix of parts found that keeps the routing",
    source="ours, notebooks/better_compositions.ipynb",
)
@dataclass(frozen=True)
class BestExact(Mix):
    """Parameters of ``mix``. The defaults have the least mean time per token that the search found among the mixes that
    keep the model's routing.

    disk: "seen": where a disk holds the experts, the GPU keeps those that it holds at first (one that leaves it is read
        again), the host's memory keeps the others by the score of ``cache``, and the next layer's experts are read
        ahead by ``forecast``. "ignored": the mix as it is, and the scenario's ``host_keeps``.
    """

    placement: Literal["none", "random", "popular"] = "popular"
    pool: bool = True
    forecast: Literal["gate", "residual", "quasi_hidden", "estimator"] = "quasi_hidden"
    cache: Literal["static", "fifo", "lru", "lfu", "mrs", "score-window"] = "mrs"
    alpha: Share = 0.1
    keep: Count | None = 12
    background: Literal["none", "prefill", "decode"] = "prefill"  # else what a prompt leaves depends on the CPU's share
    disk: Literal["seen", "ignored"] = "seen"

    def compose(self, context: BuildContext) -> Composition:
        made = super().compose(context)
        if self.disk == "ignored" or not any(costs.read_ns for costs in context.costs):
            return made
        return replace(
            made, assigner=AfterReads(made.assigner), cache=StaticCache(), prefetcher=None, prefetch_slots=0,
            host_cache=self._cache(context), host_prefetcher=ReadForecast(context.top_k, self.forecast),
        )

    def _decision_cost(self) -> str:
        return "best-exact"


@register(
    "best-approx",
    "best-exact with SMoE's substitution, as far as it changes little",
    source="ours, notebooks/better_compositions.ipynb; SMoE, Section IV-B",
)
@dataclass(frozen=True)
class BestApprox(BestExact):
    """Parameters of ``mix``. The defaults are best-exact's, with the strongest substitution that changed at most 5 % of
    the routing weight on average where it was searched."""

    substitution: Share = 0.2

    def _decision_cost(self) -> str:
        return "best-approx"
