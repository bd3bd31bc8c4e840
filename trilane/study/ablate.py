"""The contribution of each part of a policy: its parts switched on one after the other, and off one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from policies.ablation import StagedPrefetcher, rungs, without
from policies.mechanism.views import PolicyError
from policies.protocols import Composition
from policies.system import ChoiceError
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.simulate import play as simulated
from trilane.study import DRAWS
from trilane.study.draws import Outcome, Row, draws_of, play_draws, refused, summary, tpot_ratio
from trilane.study.player import Watch, check_workers


class Ablation(NamedTuple):
    """A policy with some of its parts, over several draws of one scenario.

    ``ladder`` begins with all parts off and ends with the whole policy; ``all_but_one`` has a row for each part of
    several, with that one alone switched off. Rows are those of ``trilane.study.draws.summary`` and

    - ``label``: in plain words; ``part``: the one added or left out, None in the first row; ``parts``: those on;
    - ``speedup``: TPOT of the first row over this one's, draw by draw, then averaged;
    - ``over_whole``: TPOT over that of the whole policy, minus 1, in the same way;
    - ``refused``: why these parts cannot run without the others; such a row has none of the numbers.
    """

    scenario: dict[str, Any]
    policy: str
    ladder: list[Row]
    all_but_one: list[Row]


class _Mix(NamedTuple):
    """Some parts of a policy."""

    label: str
    part: str | None
    on: tuple[str, ...]

    @property
    def key(self) -> str:
        return " + ".join(self.on) or "no part"


def ablate(scenario: Scenario, *, draws: int = DRAWS, jobs: int = 1, watch: Watch | None = None) -> Ablation:
    """Take ``scenario.policy`` apart. Draws, jobs and watch are as in ``trilane.study.compare.compare``.

    Raises what ``simulate`` raises if the whole policy cannot run; ChoiceError if the other processes lack it.
    """
    check_workers([scenario.policy], jobs)
    policy, parameters = scenario.policy, scenario.parameters
    played = draws_of(scenario, draws)
    whole = prepare(scenario).composition
    ladder, all_but_one = _ladder(whole), _all_but_one(whole)
    simulations = {
        mix.key: partial(simulate_parts, policy=policy, parameters=parameters, on=mix.on)
        for mix in (ladder[-1], *ladder, *all_but_one)  # the whole policy first: if it cannot run, nothing else need
    }
    found = play_draws(simulations, played, jobs, watch, insist=(ladder[-1].key,))
    bare, full = found[ladder[0].key], found[ladder[-1].key]
    resolved = full[0].run.scenario.to_dict() if full[0].run else {}
    steps, gaps = ([_row(mix, found[mix.key], bare, full) for mix in mixes] for mixes in (ladder, all_but_one))
    return Ablation(resolved, policy, steps, gaps)


def simulate_parts(prepared: Prepared, policy: str, parameters: Mapping[str, object], on: Sequence[str]) -> Run:
    """Simulate a policy with those of its parts alone that are in ``on``. Raises ChoiceError where they cannot do
    without the others."""
    whole = prepared.with_policy(policy, parameters)
    off = [part for part in rungs(whole.composition) if part not in on]
    try:
        return simulated(whole.with_parts_off(off))
    except PolicyError as error:
        if not off:
            raise
        raise ChoiceError(f"the other parts cannot run alone: {error}") from error


def _ladder(whole: Composition) -> list[_Mix]:
    parts = rungs(whole)
    bare = "every expert copied, none kept" if whole.needs.gpu_only else "all experts on the CPU"
    steps = [
        _Mix(f"+ {part}: {_in_words(part, getattr(whole, part))}", part, parts[: place + 1])
        for place, part in enumerate(parts)
    ]
    return [_Mix(f"no part: {bare}", None, ()), *steps]


def _in_words(part: str, instance: object) -> str:
    """``RandomPlacement`` of the part ``placement``: random."""
    words = re.findall("[A-Z][^A-Z]*", type(instance).__name__)
    return " ".join(word.lower() for word in words if word.lower() != part) or part


def _all_but_one(whole: Composition) -> list[_Mix]:
    parts = rungs(whole)
    if len(parts) == 1:  # that is the ladder's first row
        return []
    return [_Mix(_without(part, whole), part, tuple(other for other in parts if other != part)) for part in parts]


def _without(part: str, whole: Composition) -> str:
    staged = isinstance(without(whole, [part]).prefetcher, StagedPrefetcher)
    return f"without {part}, prefetches staged" if staged else f"without {part}"


def _row(mix: _Mix, outcomes: Sequence[Outcome], bare: Sequence[Outcome], full: Sequence[Outcome]) -> Row:
    names = {"label": mix.label, "part": mix.part, "parts": list(mix.on)}
    if refusal := refused(outcomes):
        return {**names, "refused": str(refusal)}
    draws = [
        {**mine.row, "speedup": tpot_ratio(first.row, mine.row), "over_whole": tpot_ratio(mine.row, last.row, less=1)}
        for mine, first, last in zip(outcomes, bare, full, strict=True)
    ]
    return {**names, "refused": None, **summary(draws)}
