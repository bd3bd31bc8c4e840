"""Speed of speculative decoding with layers of the model itself that predict further tokens (MTP), in closed form.

A step drafts tokens one after another, each with one layer like the model's and its head, all on the GPU, and then
verifies them together with one more token: all experts that any of them chooses are read. Drafts are accepted up to the
first that is not what the model writes (Leviathan et al., arXiv 2211.17192, section 3.1: with one share of acceptance).
"""

from __future__ import annotations

from dataclasses import dataclass

from sim.costs.engine import InferenceEngine
from sim.costs.fitted_costs import fitted_costs
from sim.costs.split_speed import StaticSplit, decode_time
from sim.machine.hardware import Hardware
from traces.models.shape import ModelShape

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

    def tokens(self, acceptance: float) -> float:
        """Tokens that it gives in the mean, if a draft behind accepted ones is accepted with this probability."""
        return sum(acceptance**place for place in range(self.drafts + 1))

    def token_ns(self, acceptance: float) -> float:
        """Time of a token in the mean."""
        return self.total_ns / self.tokens(acceptance)

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


def drafted_step(
    shape: ModelShape, hardware: Hardware, engine: InferenceEngine, split: StaticSplit, context: int, drafts: int,
    active: float,
) -> DraftedStep:  # fmt: skip
    """A step of one sequence of ``context`` tokens; ``active``: experts of a layer that any of its tokens chooses.

    Raises what ``fitted_costs`` raises.
    """
    costs = fitted_costs(shape, hardware, engine, 1, threads=split.threads)
    one, expert = costs.step(1, (max(context, 1),)), costs.experts[-1]
    layer_ns = one.attention_ns + one.gate_ns + one.shared_ns + one.combine_ns + shape.top_k * expert.gpu_ns[1]
    verified = decode_time(shape, hardware, engine, split, context, drafts=drafts, active=active)
    return DraftedStep(drafts, drafts * (layer_ns + one.head_ns), verified.total_ns)
