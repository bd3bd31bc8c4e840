"""One scenario under several policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from policies.registry import ChoiceError, policy_names, system
from sim.demand import MissingFromTraceError
from sim.memory import BudgetError
from sim.run import Run
from sim.scenario import Scenario, ScenarioError
from sim.simulate import CLAIRVOYANT, setting_of, simulate_setting


class Comparison(NamedTuple):
    """Runs of one scenario, best TPOT first, and why each policy that was left out cannot run in it.

    ``scenario`` is the resolved one, but for policy and parameters: those of each run are in its row.
    """

    scenario: dict[str, Any]
    runs: list[Run]
    left_out: dict[str, str]

    def rows(self) -> list[dict[str, Any]]:
        """One flat, JSON-ready row a run, with its ``regret``: TPOT over that of the clairvoyant run, minus 1."""
        rows = [run.to_dict() for run in self.runs]
        best = next((row["tpot_ms"] for row in rows if CLAIRVOYANT in row["labels"]), None)
        for row in rows:
            row["regret"] = row["tpot_ms"] / best - 1 if best and row["tpot_ms"] is not None else None
        return rows


def compare(
    scenario: Scenario,
    policies: Sequence[str] | None = None,
    *,
    watch: Callable[[Sequence[str]], Iterable[str]] = iter,
) -> Comparison:
    """Simulate one scenario under several policies; by default under all that it can serve.

    ``scenario.parameters`` go to ``scenario.policy`` alone; the others run with their defaults. ``watch`` goes through
    the names, to show progress. Raises what ``simulate`` raises, if a policy was asked for or none can run.
    """
    names = policy_names() if policies is None else policies
    for name in names:
        system(name)
    setting = setting_of(scenario)
    runs, left_out = [], {}
    for name in watch(names):
        try:
            runs.append(simulate_setting(setting, name, scenario.parameters if name == scenario.policy else {}))
        except (BudgetError, ChoiceError, MissingFromTraceError, ScenarioError) as error:
            if policies is not None or (name == names[-1] and not runs):
                raise
            left_out[name] = str(error)
    resolved = {**(runs[0].scenario if runs else {}), "policy": scenario.policy, "parameters": scenario.parameters}
    return Comparison(resolved, sorted(runs, key=_rank), left_out)


def _rank(run: Run) -> tuple[float, str]:
    metrics = run.metrics
    return (metrics.ttft_ms or 0.0) if metrics.tpot_ms is None else metrics.tpot_ms, run.policy
