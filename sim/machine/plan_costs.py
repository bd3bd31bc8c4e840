"""What deciding costs on the host: simulated planning time is a number in a table, never the wall clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from sim.machine.plausibility import HardwareError
from trilane.common.yaml_files import read_yaml

_FILE = Path(str(files("sim.machine"))) / "presets" / "plan_costs.yaml"
_ROW = ("base_ns", "per_active_expert_ns", "source", "confidence")


class PlanCost(NamedTuple):
    """One decision takes ``base_ns`` + ``per_active_expert_ns`` x active experts."""

    base_ns: float
    per_active_expert_ns: float

    def at(self, active: int, factor: float = 1.0) -> int:
        """Integer ns with ``active`` experts active on a host ``factor`` times as slow as the table's."""
        return int((self.base_ns + self.per_active_expert_ns * active) * factor + 0.5)

    def scaled(self, factor: float) -> PlanCost:
        """The cost on a host ``factor`` times as slow."""
        return PlanCost(self.base_ns * factor, self.per_active_expert_ns * factor)


@dataclass(frozen=True)
class PlanCosts:
    """Costs of the two decision points of a layer, by policy name.

    A name that is not there is looked up without its ``@variant``, then as ``default``; both tables have a default.
    """

    plan: Mapping[str, PlanCost] = field(default_factory=lambda: {"default": PlanCost(0, 0)})
    foresee: Mapping[str, PlanCost] = field(default_factory=lambda: {"default": PlanCost(0, 0)})

    def plan_of(self, policy: str) -> PlanCost:
        """Cost of ``plan_layer``."""
        return _look_up(self.plan, policy)

    def foresee_of(self, policy: str) -> PlanCost:
        """Cost of ``foresee``."""
        return _look_up(self.foresee, policy)

    def scaled(self, factor: float) -> PlanCosts:
        """The table of a host ``factor`` times as slow."""
        return PlanCosts(
            {policy: cost.scaled(factor) for policy, cost in self.plan.items()},
            {policy: cost.scaled(factor) for policy, cost in self.foresee.items()},
        )

    def with_(self, plan: Mapping[str, PlanCost], foresee: Mapping[str, PlanCost]) -> PlanCosts:
        """The table with these rows in place of its own of the same names."""
        return PlanCosts({**self.plan, **plan}, {**self.foresee, **foresee})


def _look_up(table: Mapping[str, PlanCost], policy: str) -> PlanCost:
    for name in (policy, policy.partition("@")[0]):
        if name in table:
            return table[name]
    return table["default"]


def load_plan_costs(path: Path = _FILE) -> PlanCosts:
    """Read a plan cost table. Raises HardwareError on unknown or missing keys and negative costs."""
    document = read_yaml(path)
    if not isinstance(document, dict) or set(document) != {"plan", "foresee"}:
        raise HardwareError(f"{path}: expected the sections plan and foresee, got {document!r:.80}")
    return PlanCosts(**{section: _table(rows, f"{path.name}, {section}") for section, rows in document.items()})


def _table(rows: Mapping[str, Any], where: str) -> dict[str, PlanCost]:
    """All rows of one section."""
    if not isinstance(rows, dict) or "default" not in rows:
        raise HardwareError(f"{where}: expected one row a policy and a row 'default', got {rows!r:.80}")
    return {policy: _cost(row, f"{where}, {policy}") for policy, row in rows.items()}


def _cost(row: Any, where: str) -> PlanCost:
    """One row, checked."""
    if not isinstance(row, dict) or set(row) != set(_ROW):
        raise HardwareError(f"{where}: expected the keys {', '.join(_ROW)}, got {row!r}")
    if str(row["source"]).lower().startswith("to be"):
        raise HardwareError(f"{where}: expected where the cost is from, got {row['source']!r}; measure it first")
    cost = PlanCost(row["base_ns"], row["per_active_expert_ns"])
    if not all(isinstance(ns, int | float) and 0 <= ns <= 1e9 for ns in cost):
        raise HardwareError(f"{where}: costs must be 0..1e9 ns, got {tuple(cost)}")
    return cost
