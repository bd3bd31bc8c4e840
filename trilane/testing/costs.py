"""Cost tables for worlds: the same costs for every step, and tables in other units of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from policies.mechanism.views import ExpertCosts
from sim.costs.cost_table import CostError, CostTable, StepCosts


@dataclass(frozen=True)
class ConstantSteps:
    """The same costs for every step."""

    costs: StepCosts

    def step(self, tokens: int, context: Sequence[int]) -> StepCosts:
        return self.costs


def scaled(costs: CostTable, c: int) -> CostTable:
    """``costs`` with every time multiplied by the whole number ``c`` >= 1; ratios and sizes stay (law 9)."""
    if not isinstance(c, int) or c < 1:
        raise CostError(f"scaled: c must be a whole number >= 1 so that times stay whole, got {c!r}")
    draft = costs.draft._replace(**_times(costs.draft._asdict(), c))
    experts = costs.map_experts(lambda expert: _scaled_expert(expert, c)).experts
    return replace(costs, **_times(vars(costs), c), experts=experts, draft=draft, scale=costs.scale * c)


def _scaled_expert(costs: ExpertCosts, c: int) -> ExpertCosts:
    narrow = costs.narrow and costs.narrow._replace(costs=_scaled_expert(costs.narrow.costs, c))
    return costs._replace(**_times(costs._asdict(), c), narrow=narrow)


def _times(fields: Mapping[str, Any], c: int) -> dict[str, Any]:
    """Those that are in ns, alone or by workload, times ``c``."""
    times = {name: ns for name, ns in fields.items() if name.split("_")[-1] == "ns" and ns is not None}
    return {name: ns * c if isinstance(ns, int) else tuple(each * c for each in ns) for name, ns in times.items()}
