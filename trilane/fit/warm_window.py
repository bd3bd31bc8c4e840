"""Warm windows: TPOT on another machine over a few steps that start from where the answer has led a policy.

Where the other machine leads a policy to copy other experts, such steps would not show the effect of that, and the
prompt and half of the decode steps are played. (The GPU's own rates have little effect on what is copied.) Compared
with gains from all steps (parts 25 % better, in eleven questions; best-exact, dali and mixtral-offloading@impl), those
from half of the steps were off by 2 percentage points in the mean and 9 at most; those from a few warm ones by 0.3 and
2.2 (with parts that do not change what is copied).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from policies.protocols import Budget, InitialPlacement, Placement
from sim.runs.columns import columns_of_rows
from sim.runs.prepare import Prepared
from sim.runs.spans import Row
from sim.simulate import spans_of
from trilane.fit.policy_result import PlayedPolicy, Residents, decode_steps_of, half_of

STEPS = 8  # from the middle of those that were played
NEAR = 0.25  # relative difference of the window's TPOT from the answer's up to which the window is used


class WarmPlacement:
    """The slots of a placement, with other experts in them from the first token on."""

    def __init__(self, placement: Placement, residents: Residents) -> None:
        self._placement, self._residents = placement, residents

    def place(self, budget: Budget) -> InitialPlacement:
        """Divide the budget as the placement does; it must be that of the run that left the residents."""
        return replace(self._placement.place(budget), residents=self._residents)


@dataclass(frozen=True)
class WarmWindow:
    """The base of comparisons of one policy between machines.

    ``placed``: the experts in the cache before the first token. ``residents``: those after the answer, with which the
    window starts; None where the window's TPOT is not near the answer's. ``base_ms`` and ``half_ms``: TPOT of the
    window, and of half of the decode steps.
    """

    placed: Residents
    residents: Residents | None
    base_ms: float
    half_ms: float

    def gain(self, better: Prepared, *, other_copies: bool) -> float:
        """Old TPOT over that of ``better``, minus 1. ``other_copies``: whether the policy may copy other experts."""
        if other_copies or self.residents is None or placed_in(better) != self.placed:
            return self.half_ms / half_tpot_ms(better) - 1
        return self.base_ms / warm_tpot_ms(better, self.residents) - 1


def warm_window(prepared: Prepared, played: PlayedPolicy) -> WarmWindow:
    """``played``: the policy on its own machine."""
    base_ms = warm_tpot_ms(prepared, played.residents)
    near = abs(base_ms / played.result.tpot_ms - 1) < NEAR
    return WarmWindow(placed_in(prepared), played.residents if near else None, base_ms, played.half_tpot_ms)


def placed_in(prepared: Prepared) -> Residents:
    """The experts that the policy places in the cache before the first token."""
    residents = prepared.compose().placement.place(prepared.checked().budget).residents
    return tuple(tuple(sorted(experts)) for experts in residents)


def half_tpot_ms(prepared: Prepared) -> float:
    """TPOT of the answer from the prompt and half of its decode steps."""
    prompt = [step for step in prepared.demand if step.phase == "prefill"]
    decode = [step for step in prepared.demand if step.phase == "decode"]
    some = prepared.over([*prompt, *decode[: half_of(len(decode))]])
    return _mean_ms(spans_of(some), prepared.answer_tokens)


def warm_tpot_ms(prepared: Prepared, residents: Residents) -> float:
    """TPOT of a few decode steps alone, with these experts on the GPU before them."""
    composition = prepared.compose()
    warm = replace(composition, placement=WarmPlacement(composition.placement, residents))
    decode = [step for step in prepared.demand if step.phase == "decode"]
    first = max(len(decode) - STEPS, 0) // 2
    steps = decode[first : first + STEPS]
    return _mean_ms(spans_of(prepared.with_composition(warm).over(steps)), len(steps))


def _mean_ms(rows: list[Row], answer_tokens: int) -> float:
    """TPOT, from the ends of the steps alone."""
    ends = [row for row in rows if row[4] == "wait"]
    return decode_steps_of(columns_of_rows(ends), answer_tokens).mean_ms
