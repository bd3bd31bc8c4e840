"""Draws: one scenario over other sequences and seeds, so that results have a spread; every policy gets the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from policies.registry import ChoiceError
from sim.runs.demand import MissingFromTraceError
from sim.runs.memory import BudgetError
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario, ScenarioError
from traces.layout import DECODE, PREFILL
from trilane.study.player import LastPrepared, Watch, in_order, play

REFUSALS = (BudgetError, ChoiceError, MissingFromTraceError, ScenarioError)

Row: TypeAlias = dict[str, Any]
Simulation: TypeAlias = Callable[[Prepared], Run]  # a function of a module, or a partial one: it is pickled


class Outcome(NamedTuple):
    """One simulation in one draw: a row (``Run.to_dict()``, ``seed``, ``sequences``), or the error that refused it.

    ``run``, with all its spans, is there in draw 0 alone.
    """

    row: Row
    run: Run | None = None
    refusal: Exception | None = None


def draws_of(scenario: Scenario, count: int) -> list[Scenario]:
    """The scenario itself and ``count`` - 1 like it, with the seeds that follow its own.

    Unless the scenario names ``sequences``, each draw takes ``batch`` other sequences of the trace, at random without
    replacement: of those that are long enough, the ones that the fewest draws before it took. Raises ScenarioError for
    a count below 1, and what ``prepare`` raises.
    """
    if count < 1:
        raise ScenarioError(f"expected at least 1 draw, the scenario itself, got {count}")
    setting = prepare(scenario)
    draws = [scenario.with_(seed=scenario.seed + place) for place in range(count)]
    if scenario.sequences is not None:
        return draws
    taken = Counter({sequence for step in setting.steps for sequence in step.sequences})
    usable = _long_enough(setting)
    for place, draw in enumerate(draws[1:], 1):
        rng = np.random.default_rng((scenario.seed % 2**32, place))
        shuffled = sorted(rng.permutation(usable).tolist(), key=taken.__getitem__)
        draws[place] = draw.with_(sequences=tuple(sorted(shuffled[: scenario.batch])))
        taken.update(shuffled[: scenario.batch])
    return draws


def _long_enough(setting: Prepared) -> list[int]:
    """Sequences with the prompt and decode tokens that are played; with any, if the scenario states no number."""
    scenario, trace, steps = setting.scenario, setting.trace, setting.steps
    prompts, decodes = (Counter(trace.sequence[trace.phase == phase].tolist()) for phase in (PREFILL, DECODE))
    decode_tokens = sum(step.generated for step in steps if step.phase == "decode")
    prompt = scenario.prompt_tokens or 0
    if scenario.sampled_prompt_tokens:
        prompt = min(steps[0].tokens) if steps[0].phase == "prefill" else 0
    decode = decode_tokens if scenario.generated_tokens or scenario.sampled_steps else min(decode_tokens, 1)
    return [
        sequence
        for sequence in dict.fromkeys(trace.sequence.tolist())
        if prompts[sequence] >= prompt and decodes[sequence] >= decode
    ]


# --- playing them -----------------------------------------------------------------------------------------------------


def play_draws(
    simulations: Mapping[str, Simulation], draws: Sequence[Scenario], jobs: int = 1, watch: Watch | None = None,
    insist: Collection[str] = (),
) -> dict[str, list[Outcome]]:
    """Run every simulation in every draw, over ``jobs`` processes; the results do not depend on their number.

    The first refusal of one that is named in ``insist`` is raised instead of noted.
    """
    tasks = [(simulate, draw, draw is draws[0]) for draw in draws for simulate in simulations.values()]
    outcomes: dict[str, list[Outcome]] = {name: [] for name in simulations}
    played = in_order(play(_outcome, tasks, lambda task: task[1].seed, jobs, watch))
    for name, outcome in zip(list(simulations) * len(draws), played, strict=True):
        outcomes[name].append(outcome)
        if name in insist and outcome.refusal:
            raise _naming(name, outcome.refusal)
    return outcomes


def _naming(policy: str, refusal: Exception) -> Exception:
    """The refusal with the name of the policy, one of several, in its message."""
    return refusal if repr(policy) in str(refusal) else type(refusal)(f"{policy}: {refusal}")


def refused(outcomes: Sequence[Outcome]) -> Exception | None:
    """The first reason why a simulation cannot run in all draws; None if it can."""
    return next((outcome.refusal for outcome in outcomes if outcome.refusal), None)


def _outcome(prepared: LastPrepared, task: tuple[Simulation, Scenario, bool]) -> Outcome:
    simulate, draw, keep = task
    try:
        run = simulate(prepared.of(draw))
    except REFUSALS as error:
        return Outcome({}, refusal=error)
    row = {**run.to_dict(), "seed": draw.seed, "sequences": list(run.scenario.sequences or ())}
    return Outcome(row, run if keep else None)


# --- one row out of many ----------------------------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> Row:
    """Means over the draws' rows, ``tpot_ms_min`` and ``tpot_ms_max``, and the rows themselves as ``draws``."""
    names = [name for name in rows[0] if name not in ("seed", "sequences")]
    means = {name: _mean([row.get(name) for row in rows]) for name in names}
    times = [row["tpot_ms"] for row in rows if row["tpot_ms"] is not None]
    spread = {"tpot_ms_min": min(times, default=None), "tpot_ms_max": max(times, default=None)}
    return {**means, **spread, "draws": list(rows)}


def _mean(values: Sequence[Any]) -> Any:
    """Mean of those that are numbers; what is the same in all draws, or no number, stays as it is."""
    if all(value == values[0] for value in values):
        return values[0]
    numbers = [value for value in values if isinstance(value, int | float)]
    return fmean(numbers) if numbers else values[0]


def tpot_ratio(above: Row, below: Row, less: int = 0) -> float | None:
    """TPOT over TPOT, minus ``less``, where both are known."""
    times = above.get("tpot_ms"), below.get("tpot_ms")
    return times[0] / times[1] - less if times[0] and times[1] else None
