"""Every policy with every part of a machine 25 % better, and once more: what is slower then, in the mean of sequences.

``python -m tests.invariants.better_parts`` prints the cases, of which ``test_better_machines`` knows the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from statistics import mean
from typing import NamedTuple

from policies.registry import policy_names
from sim.runs.columns import columns_of_rows
from sim.runs.demand import MissingFromTraceError
from sim.runs.prepare import Prepared, prepare
from sim.simulate import spans_of
from traces.library import load_trace
from trilane.engines.gains import PARTS, ScaledPart
from trilane.engines.question import Question
from trilane.fit.policy_result import decode_steps_of
from trilane.fit.prepared_question import prepared_for
from trilane.fit.sensitivity import with_better

SLOWER = 0.01  # at most: what is copied is chosen anew
STEPS = 24  # decode steps: enough to fill a cache anew, few enough for all policies
TIMES = 2  # that a part is made 25 % better
SEQUENCES = 8  # in whose mean a part counts that made one sequence slower
QUESTIONS = {  # most of the experts of the first fit, a third of the other's
    "qwen3-30b-a3b": Question(
        "qwen3-30b-a3b", "rtx-3060", "ddr5-5600", prompt_tokens=32, generated=STEPS, policies=policy_names()
    ),
    "deepseek-v2-lite": Question(
        "deepseek-v2-lite", "rtx-3060", "ddr4-3200", weights="bf16", prompt_tokens=32, generated=STEPS,
        policies=policy_names(),
    ),
}


class Slower(NamedTuple):
    """A better part that makes a policy slower; ``loss``: new time per token over the old one, minus 1, in the mean."""

    policy: str
    part: str
    loss: float


@cache
def asked(model: str) -> Prepared:
    """A question, prepared for every policy."""
    return prepared_for(QUESTIONS[model])


@cache
def sequences(model: str) -> tuple[Prepared, ...]:
    """The question, asked of one sequence after another."""
    one = asked(model)
    name = one.scenario.trace.replace("/1x", f"/{SEQUENCES}x")
    trace = load_trace(name)
    each = (one.scenario.with_(trace=name, sequences=(place,)) for place in range(SEQUENCES))
    return tuple(prepare(scenario, trace).on(one.hardware) for scenario in each)


def slower(model: str, policy: str) -> Iterator[Slower]:
    """The parts with which a policy becomes slower by more than 1 %, in one sequence and in the mean of several.

    Raises MissingFromTraceError for a policy that needs what the question's trace lacks.
    """
    prepared = asked(model).with_policy(policy)
    before_ms = _tpot_ms(prepared)
    for part in PARTS:
        if max(_losses(prepared, part, before_ms)) > SLOWER:
            others = [other.with_policy(policy) for other in sequences(model)]
            each = [tuple(_losses(other, part, _tpot_ms(other))) for other in others]
            loss = max(map(mean, zip(*each, strict=True)))
            if loss > SLOWER:
                yield Slower(policy, part.name, loss)


def _losses(prepared: Prepared, part: ScaledPart, before_ms: float) -> Iterator[float]:
    """Losses of each improvement, over the machine before it."""
    for _ in range(TIMES):
        prepared = with_better(prepared, part)
        after_ms = _tpot_ms(prepared)
        yield after_ms / before_ms - 1
        before_ms = after_ms


def _tpot_ms(prepared: Prepared) -> float:
    return decode_steps_of(columns_of_rows(spans_of(prepared)), prepared.answer_tokens).mean_ms


if __name__ == "__main__":
    for model in QUESTIONS:
        for policy in policy_names():
            with suppress(MissingFromTraceError):
                for case in slower(model, policy):
                    print(f"{model:20} {case.policy:26} {case.part:16} {case.loss:+.1%}", flush=True)
