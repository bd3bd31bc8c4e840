"""Host time of decisions: simulated planning time is a number in a table, never the wall clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Confidence, read_file
from trilane.common.hints import Constraint, at_least, between

_FILE = Path(str(files("sim.machine"))) / "plan_costs.yaml"
Decision = Literal["plan", "foresee", "observe"]
_Ns = Annotated[float, between(0, 1e9)]
_MEASURED = Constraint("that names a measurement or an estimate", lambda source: not source.lower().startswith("to be"))


class PlanCost(NamedTuple):
    """One decision takes ``base_ns`` + ``per_active_expert_ns`` x active experts."""

    base_ns: Annotated[float, at_least(0)]
    per_active_expert_ns: Annotated[float, at_least(0)]

    def at(self, active: int, factor: float = 1.0) -> int:
        """Integer ns with ``active`` experts active on a host ``factor`` times as slow as the table's."""
        return int((self.base_ns + self.per_active_expert_ns * active) * factor + 0.5)

    def scaled(self, factor: float) -> PlanCost:
        """The cost on a host ``factor`` times as slow."""
        return PlanCost(self.base_ns * factor, self.per_active_expert_ns * factor)


def _free() -> Mapping[str, PlanCost]:
    return {"default": PlanCost(0, 0)}


@dataclass(frozen=True)
class PlanCosts:
    """Costs of the two decision points of a layer, and of what the cache learns from it, by policy name.

    What a cache learns of a routing is for later decisions: the host works on it while the GPU computes the layer.
    A name without a row is looked up without its ``@variant``, then as ``default``; all tables have a default.
    """

    plan: Mapping[str, PlanCost] = field(default_factory=_free)
    foresee: Mapping[str, PlanCost] = field(default_factory=_free)
    observe: Mapping[str, PlanCost] = field(default_factory=_free)

    def of(self, decision: Decision, policy: str) -> PlanCost:
        """Cost of ``plan_layer``, of ``foresee``, or of ``observe`` of the policy's cache."""
        table: Mapping[str, PlanCost] = getattr(self, decision)
        return next(table[name] for name in (policy, policy.partition("@")[0], "default") if name in table)

    def scaled(self, factor: float) -> PlanCosts:
        """The table of a host ``factor`` times as slow."""
        tables = (self.plan, self.foresee, self.observe)
        return PlanCosts(*({policy: cost.scaled(factor) for policy, cost in table.items()} for table in tables))

    def with_(self, plan: Mapping[str, PlanCost], foresee: Mapping[str, PlanCost]) -> PlanCosts:
        """The table with these rows in place of its own of the same names. They were measured with all that a session
        does in a layer: what the cache learns is in ``plan``."""
        observe = {**self.observe, **dict.fromkeys(plan, PlanCost(0, 0))}
        return PlanCosts({**self.plan, **plan}, {**self.foresee, **foresee}, observe)


class _CostRow(NamedTuple):
    base_ns: _Ns
    per_active_expert_ns: _Ns
    source: Annotated[str, _MEASURED]
    confidence: Confidence


class _CostFile(NamedTuple):
    plan: Mapping[str, _CostRow]
    foresee: Mapping[str, _CostRow]
    observe: Mapping[str, _CostRow]


@cache
def load_plan_costs(path: Path = _FILE) -> PlanCosts:
    """Read a plan cost table. Raises HardwareError."""
    file: _CostFile = read_file(_CostFile, path)
    for section, rows in file._asdict().items():
        if "default" not in rows:
            raise HardwareError(f"{path.name}: {section}: missing key: default, the cost of policies without a row")
    return PlanCosts(*({policy: PlanCost(*row[:2]) for policy, row in rows.items()} for rows in file))
