"""Sampling: a long answer from few decode steps, and a long prompt from the routing of few tokens.

*Sampled steps.* A cache that adapts needs some tens of tokens after the prompt before it holds what the answer needs,
so the mean of the first steps alone would judge it cold. Of an answer of N tokens, S decode steps are played. The first
half of the S are the first steps of the answer, one by one. The other half has the routing that follows in the trace,
and contexts that are spread evenly over the rest of the answer; in every mean over the answer, it stands for all of the
rest. Where S is N, each step stands for itself. How far TPOT is off was measured: ``trilane.study.sampling_error``.

*Sampled prompt.* To synthesise and to decide about each of 100,000 prompt tokens would take minutes and change little:
from a few hundred tokens on, a prefill uses every expert of a layer, and in the same proportions. A prompt of N tokens
is that of P tokens repeated n times: the same active experts, n times their workloads. Scores of the P tokens stand for
all of them, since policies read their mean. Attention, KV cache and copies see all n x P tokens, which is N but for a
remainder below n. A policy that reads every token plays the P tokens alone; its run has no time to first token.

With drafts (``traces.windows``) a step makes several tokens: S are the tokens that are played.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from policies.mechanism.views import Forecast, Routing
from sim.runs.demand import StepDemand
from sim.runs.scenario import Scenario, ScenarioError
from traces.batches import StepRows, compose
from traces.trace import Trace
from traces.windows import (
    Window,
    accepted_shares,
    drawn_windows,
    offered_shares,
    recorded_windows,
    tokens_per_step,
    verifying_steps,
)

Workload = TypeVar("Workload", Routing, Forecast)


# --- which steps are played -------------------------------------------------------------------------------------------


class SampledSteps(NamedTuple):
    """The steps to play; how often the routing of the prefill is repeated; and the tokens of the whole answer."""

    steps: tuple[StepRows, ...]
    prompt_repeats: int
    answer_tokens: int


def steps_of(scenario: Scenario, trace: Trace) -> SampledSteps:
    """The steps that a scenario plays. Raises BatchError for a batch that the trace cannot fill, and ScenarioError for
    drafts whose acceptance is not stated."""
    lengths = _lengths(scenario, trace, scenario.draft_tokens)
    windows = _windows(scenario) if scenario.draft_tokens else None
    steps = compose(
        trace, batch=scenario.batch, prompt_tokens=lengths.prompt, generated_tokens=lengths.composed,
        sequences=scenario.sequences, prefill_chunk_tokens=scenario.prefill_chunk_tokens,
    )
    decode = [step for step in steps if step.phase == "decode"]
    del steps[len(steps) - len(decode) :]
    played, answer = (len(decode) if tokens is None else tokens for tokens in (lengths.played, lengths.answer))
    if scenario.sampled:
        for number, place in enumerate(answer_places(played, answer)):
            decode[number] = _moved(decode[number], number, place, lengths.prompt_left_out)
    if windows is not None:
        decode = verifying_steps(
            decode, played, windows, scenario.seed, scenario.draft_again, scenario.rejected_drafts
        )
    return SampledSteps((*steps, *decode), lengths.prompt_repeats, answer)


class _Lengths(NamedTuple):
    """Tokens of a sequence; None: as recorded. ``composed``: of the answer, those played and what their drafts need."""

    prompt: int | None
    answer: int | None
    played: int | None
    composed: int | None
    prompt_repeats: int = 1
    prompt_left_out: int = 0


def _lengths(scenario: Scenario, trace: Trace, drafts: int) -> _Lengths:
    """Lengths of prompt and answer, and how much of them a scenario plays."""
    prompt, answer = scenario.prompt_tokens, scenario.generated_tokens
    lengths = _Lengths(prompt, answer, answer, answer)
    if not scenario.sampled:
        return lengths
    recorded = _recorded_tokens(scenario, trace)
    if scenario.sampled_prompt_tokens is not None:
        whole = recorded[0] if prompt is None else prompt
        repeats = max(-(-whole // max(min(recorded[0], scenario.sampled_prompt_tokens), 1)), 1)
        routed = whole // repeats
        lengths = lengths._replace(prompt=routed, prompt_repeats=repeats, prompt_left_out=whole - routed)
    if scenario.sampled_steps is not None:
        answer = recorded[1] if answer is None else answer
        played = min(answer, scenario.sampled_steps, recorded[1])
        lengths = lengths._replace(answer=answer, played=played, composed=min(answer, played + drafts, recorded[1]))
    return lengths


def _windows(scenario: Scenario) -> Iterator[Window]:
    """The drafts that each step makes and accepts. Raises ScenarioError where shares are not stated."""
    drafts, acceptance, offered = scenario.draft_tokens, scenario.draft_acceptance, scenario.draft_offered
    if scenario.draft_windows is not None:
        return recorded_windows(scenario.draft_windows)
    shares = () if acceptance is None else accepted_shares(drafts, acceptance)
    if len(shares) < drafts:
        raise ScenarioError(
            f"draft_tokens {drafts}: expected the acceptance of each of these drafts, got {len(shares)}; state it, "
            f"such as `--set draft_acceptance=0.8`, each after the one before, or a list by position"
        )
    if isinstance(offered, tuple) and len(offered) < drafts:
        raise ScenarioError(f"draft_tokens {drafts}: expected as many shares in draft_offered, got {len(offered)}")
    return drawn_windows(shares, scenario.seed, None if offered is None else offered_shares(drafts, offered))


def tokens_a_step(scenario: Scenario) -> float | None:
    """Tokens that a step with drafts makes, in the mean; None without drafts, or where their shares are not stated."""
    drafts, acceptance, offered = scenario.draft_tokens, scenario.draft_acceptance, scenario.draft_offered
    if not drafts or (acceptance is None and scenario.draft_windows is None):
        return None
    if scenario.draft_windows is not None:
        again = scenario.draft_again and fmean(accepted < made for made, accepted in scenario.draft_windows)
        return (1 + fmean(accepted for _, accepted in scenario.draft_windows)) / (1 + again)
    assert acceptance is not None
    return tokens_per_step(drafts, acceptance, scenario.draft_again, 1.0 if offered is None else offered)


def _recorded_tokens(scenario: Scenario, trace: Trace) -> tuple[int, int]:
    """Prompt and decode tokens that every sequence of the batch has in the trace."""
    steps = compose(trace, batch=scenario.batch, sequences=scenario.sequences)
    prompts = [min(step.tokens) for step in steps if step.phase == "prefill"]
    return (prompts[0] if prompts else 0), len(steps) - len(prompts)


def _moved(step: StepRows, number: int, place: int, prompt_tokens: int) -> StepRows:
    """A decode step, the ``number``-th that is played, at ``place`` in the answer, after a longer prompt."""
    return replace(step, context=tuple(tokens - number + place + prompt_tokens for tokens in step.context))


def answer_places(played: int, answer: int) -> list[int]:
    """The tokens of the answer before each step that is played; the last step that is spread is the answer's last."""
    first = one_by_one(played, answer)
    spread, rest = played - first, answer - first
    return [*range(first), *(first + (rest - 1) * (place + 1) // spread for place in range(spread))]


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


def longest_sequence(steps: Sequence[StepRows], prompt_repeats: int) -> int:
    """Tokens of the longest sequence, prompt and generated, whose prompt's routing is repeated."""
    return max(
        (before + new) * (prompt_repeats if step.phase == "prefill" else 1)
        for step in steps
        for before, new in zip(step.context, step.tokens, strict=True)
    )


def _more(work: Workload, times: int) -> Workload:
    return work._replace(tokens=tuple(tokens * times for tokens in work.tokens))


# --- what a step stands for -------------------------------------------------------------------------------------------


def one_by_one(played: int, answer: int) -> int:
    """Number of ``played`` decode steps that stand for themselves alone."""
    return played if played >= answer else played // 2


class Weights(NamedTuple):
    """How often each decode step counts in the answer: 1, and ``later`` from step ``late_step`` on."""

    late_step: int
    later: float

    def of(self, step: NDArray[np.int64]) -> NDArray[np.int64] | NDArray[np.float64]:
        """Weights of many steps."""
        return np.where(step < self.late_step, 1, self.later)

    def of_step(self, step: int) -> float:
        """Weight of one step."""
        return 1.0 if step < self.late_step else self.later


EQUAL_WEIGHTS = Weights(0, 1)  # each step stands for itself


def weights_of(decode_steps: Sequence[int], answer: int, generated: Sequence[int] | None = None) -> Weights:
    """Weights of decode steps that stand for an answer of ``answer`` tokens.

    ``decode_steps``: numbers of the steps that are played, in order; ``generated``: tokens that each makes (None: one).
    """
    made = [0, *accumulate(generated or [1] * len(decode_steps))]
    first = one_by_one(made[-1], answer)
    if first == made[-1]:
        return EQUAL_WEIGHTS
    last = bisect_left(made, made[-1]) - 1  # that makes a token
    late = min(bisect_left(made, first), last)
    return Weights(decode_steps[late], (answer - made[late]) / (made[-1] - made[late]))
