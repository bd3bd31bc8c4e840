"""A step of speculative decoding with layers of the model itself that predict further tokens (MTP), in closed form.

It drafts tokens one after another, each with a layer like the model's and its head, all on the GPU, and then verifies
them together with one more: all experts that any of them chooses are read. What simulated runs do is in
``traces.speculation``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sim.costs.cost_table import DraftWork
from sim.costs.fitted_costs import fitted_costs
from traces.speculation import tokens_per_step
from trilane.study.fit.engine_speed import EngineSpeed
from trilane.study.split_speed import decode_time

_CLOSE = 1e-4  # of an acceptance


@dataclass(frozen=True)
class DraftedStep:
    """A step that drafts and verifies so many tokens. Times in ns."""

    drafts: int
    draft_ns: int  # of all drafts
    verify_ns: int

    @property
    def total_ns(self) -> int:
        """Of the step."""
        return self.draft_ns + self.verify_ns

    def token_ns(self, acceptance: float) -> float:
        """Time of a token in the mean, if a draft behind accepted ones is accepted with this probability."""
        return self.total_ns / tokens_per_step(self.drafts, acceptance)

    def break_even(self, plain_ns: int) -> float | None:
        """The acceptance with which a token takes ``plain_ns``, its time without drafts; None if it takes longer
        even where all drafts are accepted."""
        low, high = 0.0, 1.0
        if self.token_ns(high) > plain_ns:
            return None
        while high - low > _CLOSE:
            middle = (low + high) / 2
            low, high = (low, middle) if self.token_ns(middle) <= plain_ns else (middle, high)
        return high


def drafted_step(speed: EngineSpeed, drafts: int, active: float) -> DraftedStep:
    """A step of one sequence in the middle of the answer; ``active``: experts of a layer that any of its tokens
    chooses. Raises what ``fitted_costs`` raises."""
    shape, hardware, engine, split = speed.shape, speed.hardware, speed.engine, speed.split
    costs = replace(
        fitted_costs(shape, hardware, engine, 1, threads=split.threads), draft=DraftWork(1, shape.top_k)
    )  # fmt: skip
    draft_ns = costs.draft_costs(speed.middle_tokens).gpu_ns
    verified = decode_time(shape, hardware, engine, split, speed.middle_tokens, drafts=drafts, active=active)
    return DraftedStep(drafts, drafts * draft_ns, verified.total_ns)
