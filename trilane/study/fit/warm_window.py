"""How much faster a policy is on another machine: over a few steps that begin where its answer has led it.

Where the other machine leads a policy to copy other experts, these steps would not tell what comes of that, and the
prompt and half of the answer's steps are played. (The GPU's own rates weigh little in what is copied.) Beside gains
from all steps (parts a quarter better, in eleven questions; best-exact, dali and mixtral-offloading@impl), those from
half were off by 2 percent points in the mean and 9 at most; those from a few warm ones by 0.3 and 2.2 (with parts that
change nothing).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from policies.protocols import Budget, InitialPlacement, Placement
from sim.runs.demand import StepDemand
from sim.simulate import spans_of
from trilane.study.fit.answer_steps import half_of
from trilane.study.fit.asked import Asked
from trilane.study.fit.policy_result import Played, Residents, residents_of, times_of

STEPS = 8  # from the middle of those that were played
NEAR = 0.25  # as much may their TPOT differ from the whole answer's: of a ratio between machines, it changes little


class WarmPlacement:
    """A placement's slots, and in them from the first token on whoever had come there by the end of a run."""

    def __init__(self, placement: Placement, residents: Residents) -> None:
        self._placement, self._residents = placement, residents

    def place(self, budget: Budget) -> InitialPlacement:
        """Divide the budget as the placement does; it must be that of the run."""
        return replace(self._placement.place(budget), residents=self._residents)


@dataclass(frozen=True)
class Yardstick:
    """How a policy's TPOT is compared between machines: over a few steps, unless these are not near the whole answer on
    the machine in question (``residents``: None). ``placed``: who is in the cache before the first token."""

    policy: str
    placed: Residents
    residents: Residents | None
    base_ms: float
    half_ms: float

    def faster(self, better: Asked, other_copies: bool) -> float:
        """Old TPOT over that of ``better``, minus 1; over half of the answer where others may be copied, or others are
        placed: by a policy that places by what the machine costs."""
        if other_copies or self.residents is None or _placed(better, self.policy) != self.placed:
            return self.half_ms / half_tpot_ms(better, self.policy) - 1
        return self.base_ms / warm_tpot_ms(better, self.policy, self.residents) - 1


def yardstick(asked: Asked, played: Played) -> Yardstick:
    """``played``: the policy on the machine in question, its run being over."""
    policy, whole_ms, residents = played.answer.policy, played.answer.tpot_ms, played.residents
    base_ms = warm_tpot_ms(asked, policy, residents)
    near = abs(base_ms / whole_ms - 1) < NEAR
    return Yardstick(policy, _placed(asked, policy), residents if near else None, base_ms, played.half_tpot_ms)


def _placed(asked: Asked, policy: str) -> Residents:
    return residents_of(asked.ready(policy).session())


def half_tpot_ms(asked: Asked, policy: str) -> float:
    """TPOT of the answer from the prompt and half of its steps."""
    prepared = asked.ready(policy)
    prompt = [step for step in prepared.demand if step.phase == "prefill"]
    decode = [step for step in prepared.demand if step.phase == "decode"]
    some = prepared.over([*prompt, *decode[: half_of(asked.steps)]])
    return times_of(spans_of(some), asked.question.generated).tpot_ms


def warm_tpot_ms(asked: Asked, policy: str, residents: Residents) -> float:
    """TPOT of a few decode steps alone, with these experts on the GPU before them."""
    composition = asked.setting.with_policy(policy).composition
    warm = replace(composition, placement=WarmPlacement(composition.placement, residents))
    prepared = asked.repeated(asked.setting.with_composition(warm))
    steps = _middle(prepared.demand)
    return times_of(spans_of(prepared.over(steps)), len(steps)).tpot_ms


def _middle(demand: Sequence[StepDemand]) -> list[StepDemand]:
    decode = [step for step in demand if step.phase == "decode"]
    first = max(len(decode) - STEPS, 0) // 2
    return decode[first : first + STEPS]
