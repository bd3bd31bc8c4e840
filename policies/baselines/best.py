"""The better compositions: mixes of the parts, found by search (``notebooks/better_compositions.ipynb``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from policies.mix import Mix
from policies.system import register
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
    keep the model's routing."""

    placement: Literal["none", "random", "popular"] = "popular"
    pool: bool = True
    forecast: Literal["gate", "residual", "quasi_hidden", "estimator"] = "quasi_hidden"
    cache: Literal["static", "fifo", "lru", "lfu", "mrs", "score-window"] = "mrs"
    alpha: Share = 0.1
    keep: Count | None = 12
    background: Literal["none", "prefill", "decode"] = "prefill"  # else what a prompt leaves depends on the CPU's share

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
