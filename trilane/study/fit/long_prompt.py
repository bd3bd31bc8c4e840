"""Long prompts from short routing: the routing of the first few hundred prompt tokens, repeated.

Making up, and deciding about, each of 100,000 prompt tokens would take minutes and change little: from a few hundred
tokens on, a prefill uses every expert of a layer, and in the same proportions. So a prompt of N tokens is that of P
tokens n times over: the same active experts, n times their workloads. Scores of the P tokens stand for all of them,
since policies look at their mean. Attention, KV cache and copies see all n x P tokens, N but for a remainder below n.
All of it is one prefill step.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from policies.mechanism.views import Forecast, Routing
from sim.runs.demand import StepDemand
from traces.batches import compose
from traces.trace import Trace
from trilane.study.fit.answer_steps import most_steps
from trilane.study.fit.question import Question

Told = TypeVar("Told", Routing, Forecast)
PROMPT_ROWS = 256  # that are routed one by one at most, all sequences together


class Lengths(NamedTuple):
    """What is played of each sequence."""

    prompt: int  # tokens that are routed one by one
    times: int  # how often they are repeated
    steps: int  # decode steps


def lengths_of(trace: Trace, question: Question) -> Lengths:
    """As much of the trace as is worth playing. Raises BatchError for a batch that the trace cannot fill."""
    steps = compose(trace, batch=question.batch)
    prompts = [min(step.tokens) for step in steps if step.phase == "prefill"] or [0]
    rows = max(min(prompts[0], PROMPT_ROWS // question.batch), 1)
    times = -(-question.context // rows)
    decode = min(question.generated, most_steps(question.batch), len(steps) - 1)
    return Lengths(question.context // times, times, decode)


def repeated(step: StepDemand, times: int) -> StepDemand:
    """A prefill step of ``times`` as many tokens; a decode step as it is."""
    if step.phase == "decode" or times == 1:
        return step
    return step._replace(
        tokens=step.tokens * times,
        context=tuple(tokens * times for tokens in step.context),
        routings=tuple(_more(routing, times) for routing in step.routings),
        forecasts=tuple(tuple(_more(forecast, times) for forecast in some) for some in step.forecasts),
    )


def _more(told: Told, times: int) -> Told:
    return told._replace(tokens=tuple(tokens * times for tokens in told.tokens))
