"""The check of law 10 (docs/design.md): whether a policy gave the same answers in measured and simulated runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from trilane.common.schema import to_dict

if TYPE_CHECKING:
    from realrun.execution.call_log import LoggedSession


class Counts(NamedTuple):
    """Hits, expert copies and their bytes, from a call log."""

    hits: int
    loads: int
    bytes: int


class Parity(NamedTuple):
    """The findings on law 10 (docs/design.md) from the call logs of a measured and a simulated run."""

    replay_identical: bool  # the executor's log, replayed in a fresh session, gave identical plans, hits, loads, bytes
    logs_identical: bool  # the simulator's and the executor's own logs gave identical plans
    timing_free: bool  # the policy neither prefetches nor swaps, so its logs must be identical
    changed_plans_share: float  # plans in which the two logs differ / plans
    measured: Counts
    predicted: Counts

    @property
    def held(self) -> bool:
        """True if the law holds: logs may differ if they depend on timing."""
        agrees = self.logs_identical and self.measured == self.predicted
        return self.replay_identical and (agrees or not self.timing_free)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the verdict."""
        return {**to_dict(self), "held": self.held}


class Answers(NamedTuple):
    """The answers of a session in a run, as digests, which are equal for equal answers.

    ``plans``: one digest for each step and layer, in order, of the whole plan except its makespan.
    """

    plans: tuple[str, ...]
    copies: str
    demand_only: bool  # every copy was a demand load
    counts: Counts


def answers_of(*sessions: LoggedSession) -> Answers:
    """The answers in the logs of a run's sessions, of which each GPU has one."""
    copies = [copy for session in sessions for copy in session.copies()]
    plans = {(number, *place): plan for number, session in enumerate(sessions)
             for place, plan in session.plans().items()}
    resident = sum(len(plan.resident) for plan in plans.values())
    return Answers(
        plans=tuple(_digest(plans[place]._replace(makespan_ns=0)) for place in sorted(plans)),
        copies=_digest(copies),
        demand_only=all(copy.kind == "demand" for copy in copies),
        counts=Counts(resident, len(copies), sum(copy.expert_bytes for copy in copies)),
    )


def plans_changed(one: Answers, other: Answers) -> float:
    """The share of layers with different plans in two runs; for the same policy and routing, timing is the cause."""
    same = sum(plan == theirs for plan, theirs in zip(one.plans, other.plans, strict=False))
    return (len(one.plans) - same) / max(1, len(one.plans))


def parity_of(measured: Answers, replay_identical: bool, predicted: Answers) -> Parity:
    """Law 10 (docs/design.md), in both its parts."""
    changed = plans_changed(measured, predicted)
    return Parity(
        replay_identical=replay_identical,
        logs_identical=changed == 0 and measured.copies == predicted.copies,
        timing_free=measured.demand_only and predicted.demand_only,
        changed_plans_share=changed,
        measured=measured.counts,
        predicted=predicted.counts,
    )


def parity_of_repeats(repeats: Sequence[tuple[Answers, bool]], predicted: Answers) -> Parity:
    """The findings on the first repeat that breaks law 10, else on the last. With each: whether a fresh
    session gives its answers to its calls."""
    found = [parity_of(answers, replayed, predicted) for answers, replayed in repeats]
    return next((parity for parity in found if not parity.held), found[-1])


def _digest(answer: object) -> str:
    return blake2b(json.dumps(answer, default=_plain).encode(), digest_size=8).hexdigest()


def _plain(value: Any) -> object:
    """Sets and numbers of numpy in a form for JSON. Raises TypeError for anything else."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"expected numbers, texts, tuples and sets in an answer, got {type(value).__name__}")
