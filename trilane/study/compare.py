"""One scenario under several policies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from policies.registry import ChoiceError, policy_names, system
from sim.runs.prepare import Prepared
from sim.runs.run import Run, html_of
from sim.runs.scenario import Scenario
from sim.runs.vocabulary import Label
from sim.simulate import play as simulated
from trilane.study import DRAWS
from trilane.study.draws import Row, Simulation, draws_of, play_draws, refused, summary, tpot_ratio
from trilane.study.kinds import Ends, ends_of
from trilane.study.player import Watch, check_workers
from trilane.study.policy_choice import PolicyChoice, policy_in, policy_label

if TYPE_CHECKING:
    import pandas as pd


class Comparison(NamedTuple):
    """Policies in several draws of one scenario, best mean TPOT first, and why each that was refused cannot run.

    ``scenario`` is the resolved one, but for policy and parameters: those of each run are in its row. ``runs`` are
    those of the scenario itself (draw 0); ``draws`` holds the rows of all draws of each policy. A policy with
    parameters of its own is named with them: ``dali{window: 8}``. ``ends``: where the engine is a kind of programs, the
    rows of the scenario itself with its quickest and its slowest numbers (``trilane.study.kinds``).
    """

    scenario: Scenario
    runs: list[Run]
    draws: dict[str, list[Row]]
    refused: dict[str, str]
    ends: Mapping[str, list[Row]] = MappingProxyType({})

    def rows(self) -> list[Row]:
        """One JSON-ready row a policy: means over the draws, the spread of TPOT, and ``draws`` (see ``draws.summary``).

        ``regret`` is TPOT over that of the clairvoyant run of the same draw, minus 1; of several clairvoyant policies,
        the best is meant. Rows of a kind of programs have ``tpot_ms_quick`` and ``tpot_ms_slow``.
        """
        seers = (run.policy for run in self.runs if Label.CLAIRVOYANT in run.labels)
        best = self.draws.get(next(seers, ""))
        rows = [summary(_with_regret(self.draws[run.policy], best)) for run in self.runs]
        return [{**row, **self._range(row["policy"])} for row in rows]

    def _range(self, policy: str) -> Row:
        """TPOT at the ends of the kind of programs; nothing for other engines."""
        ends = zip(Ends._fields, self.ends.get(policy, ()), strict=False)
        return {f"tpot_ms_{name}": row["tpot_ms"] for name, row in ends}

    def to_frame(self) -> pd.DataFrame:
        """``rows()`` by policy, without the single draws."""
        import pandas as pd

        return pd.DataFrame(self.rows()).set_index("policy").drop(columns="draws")

    def __repr__(self) -> str:
        rows = [row for row in self.rows() if row["tpot_ms"] is not None]
        times = ", ".join(f"{row['policy']} {row['tpot_ms']:.2f}" for row in rows[:4]) + ", ..." * (len(rows) > 4)
        told = f"; mean TPOT in ms: {times}" if rows else ""
        return f"<Comparison of {len(self.runs)} policies, {len(self.refused)} refused{told}>"

    def _repr_html_(self) -> str:
        return html_of(self.rows())


def compare(
    scenario: Scenario, policies: Sequence[PolicyChoice] | None = None, *, draws: int = DRAWS, jobs: int = 1,
    watch: Watch | None = None,
) -> Comparison:
    """Simulate one scenario under several policies; by default under all that it can serve.

    Every policy plays the same ``draws``: the scenario itself, and others like it (``draws.draws_of``). ``jobs``
    processes share the work; more than one needs a caller that can be imported (``if __name__ == "__main__"``).
    ``scenario.parameters`` go to ``scenario.policy`` alone, where it is named without any; the others run with their
    defaults. ``watch`` is called with the progress after every run. Raises ChoiceError with all reasons, if none can
    run, and for a policy or a parameter that does not exist or that the other processes lack.
    """
    chosen = [policy_in(choice) for choice in (policy_names() if policies is None else policies)]
    if not chosen:
        raise ChoiceError("expected at least one policy to compare, got none")
    check_workers((name for name, _ in chosen), jobs)
    simulations: dict[str, Simulation] = {}
    for name, own in chosen:
        parameters = own or (scenario.parameters if name == scenario.policy else {})
        system(name).parse(parameters)
        if (label := policy_label(name, own)) in simulations:
            raise ChoiceError(f"expected every policy once, got {label} more often")
        simulations[label] = partial(_simulated, policy=name, parameters=parameters, label=label)
    found = play_draws(simulations, draws_of(scenario, draws), jobs, watch)
    refusals = {name: str(error) for name, outcomes in found.items() if (error := refused(outcomes))}
    if len(refusals) == len(found):
        raise ChoiceError(f"none of the policies can run: {_reasons(refusals)}")
    runs = [outcomes[0].run for name, outcomes in found.items() if name not in refusals]
    rows = {name: [outcome.row for outcome in outcomes] for name, outcomes in found.items() if name not in refusals}
    ends = _ends(simulations.keys() - refusals.keys(), simulations, scenario, jobs)
    ranked = sorted((run for run in runs if run), key=lambda run: _rank(rows[run.policy]))
    resolved = ranked[0].scenario.with_(policy=scenario.policy, parameters=scenario.parameters)
    return Comparison(resolved, ranked, rows, refusals, ends)


def _ends(
    names: Set[str], simulations: Mapping[str, Simulation], scenario: Scenario, jobs: int
) -> dict[str, list[Row]]:
    """The rows at the ends of a kind of programs, by policy; empty for other engines."""
    if (ends := ends_of(scenario)) is None:
        return {}
    played = play_draws({name: each for name, each in simulations.items() if name in names}, ends, jobs)
    return {name: [outcome.row for outcome in outcomes] for name, outcomes in played.items()}


def _simulated(prepared: Prepared, policy: str, parameters: Mapping[str, Any], label: str) -> Run:
    return replace(simulated(prepared.with_policy(policy, parameters)), policy=label)


def _reasons(refusals: Mapping[str, str]) -> str:
    """Every reason once, with all policies that it stops; of reasons that differ in numbers alone, the first."""
    stopped: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        stopped.setdefault(re.sub(r"[\d.]+", "", reason), []).append(name)
    return "; ".join(f"{', '.join(names)}: {refusals[names[0]]}" for names in stopped.values())


def _rank(rows: Sequence[Row]) -> tuple[float, str]:
    row = summary(rows)
    return (row["ttft_ms"] or 0.0) if row["tpot_ms"] is None else row["tpot_ms"], row["policy"]


def _with_regret(rows: Sequence[Row], best: Sequence[Row] | None) -> list[Row]:
    oracles = best or [{}] * len(rows)
    return [{**row, "regret": tpot_ratio(row, oracle, less=1)} for row, oracle in zip(rows, oracles, strict=True)]
