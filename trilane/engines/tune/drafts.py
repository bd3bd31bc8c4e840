"""Drafts by the model's own layers that predict further tokens (MTP), in llama.cpp: ``--spec-type draft-mtp``.

A step drafts tokens one after another, each with a layer like the model's and its head, all on the GPU, and then
verifies them together with one more: all experts that any of them chooses are read. This is its time in closed form;
what simulated runs do is in ``traces.batches``.

How many drafts are accepted depends on the text, and is not predicted. Published of llama.cpp: of 1, 2, 3 and 4 drafts
a step 88, 82, 71 and 64 % were accepted with Qwen3.6-35B-A3B (ggml-org/llama.cpp PR 22673, an RTX 3060 of a laptop,
nine kinds of text), which are 88, 87, 84 and 83 % of those behind accepted ones; 68 % of up to two with Gemma 4 31B (PR
23398), which are 76 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from sim.costs.cost_table import DraftWork
from sim.costs.fitted_costs import fitted_costs
from traces.layout import DECODE
from traces.models.shape import ModelShape
from traces.trace import Trace
from traces.windows import tokens_per_step
from trilane.engines.question import FitError
from trilane.engines.routing import routing_for
from trilane.engines.speed import EngineSpeed
from trilane.engines.split_speed import decode_time
from trilane.engines.tune.settings import Setting, TuneQuestion
from trilane.engines.tune.tuned import Workbench

PUBLISHED = (0.76, 0.88)
MEASURED_LESS = "9% to 20%"  # than is predicted, with 1 to 4 drafts on the laptop of PR 22673, in an early build
WORTH_DRAFTING = 0.1  # of a token's time
MOST_DRAFTS = 5
_CLOSE = 1e-4  # of an acceptance


@dataclass(frozen=True)
class DraftedStep:
    """A step that drafts and verifies so many tokens. Times in ns."""

    drafts: int
    draft_ns: int  # of all drafts
    verify_ns: int

    @property
    def total_ns(self) -> int:
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
    )
    draft_ns = costs.draft_costs(speed.middle_tokens).gpu_ns
    verified = decode_time(shape, hardware, engine, split, speed.middle_tokens, drafts=drafts, active=active)
    return DraftedStep(drafts, drafts * draft_ns, verified.total_ns)


@dataclass(frozen=True)
class Drafted:
    """So many drafts a step: its time, and tokens a second by the share that is accepted."""

    drafts: int
    step_ms: float
    break_even: float | None  # the share with which a token takes as long as without drafts; None: no share is enough
    tokens_per_s: Mapping[float, float]


@dataclass(frozen=True)
class DraftAnswer:
    """Gains of drafts with the best setting. ``layer_bytes``: of the layers that draft, and their cache. There are no
    ``choices`` where these have no room next to the model."""

    acceptances: tuple[float, ...]  # that were asked for, or the range that was published
    layer_bytes: int
    plain_tokens_per_s: float
    choices: tuple[Drafted, ...]
    best: Drafted | None  # with the least of the acceptances; None: none saves ``WORTH_DRAFTING``
    command: str | None


def draft_answer(question: TuneQuestion, bench: Workbench, setting: Setting) -> DraftAnswer | None:
    """None where there are no such layers, or none that the engine can use. Raises FitError for an acceptance that was
    named in vain."""
    shape = question.shape_with(setting.kv)
    why = _why_not(question, bench, shape)
    if why is not None or not (shape.mtp_layers or question.draft_acceptance is not None):
        if question.draft_acceptance is not None:
            raise FitError(f"tune: draft_acceptance: {why}")
        return None
    layer_bytes = (shape.mtp_layers or 1) * (shape.moe_layer_bytes + _cache_bytes(question, shape))
    acceptances = PUBLISHED if question.draft_acceptance is None else (question.draft_acceptance,)
    plain_ns, speed = bench.speed(setting).decode.total_ns, _with_less_memory(bench.speed(setting), layer_bytes)
    if not speed.has_room:
        return DraftAnswer(acceptances, layer_bytes, 1e9 / plain_ns, (), None, None)
    choices = tuple(_drafted(step, plain_ns, acceptances) for step in _steps(speed))
    best = max(choices, key=lambda choice: choice.tokens_per_s[acceptances[0]])
    faster = best.tokens_per_s[acceptances[0]] * (1 - WORTH_DRAFTING) > 1e9 / plain_ns
    words = [*bench.words(speed, setting), "--spec-type draft-mtp", f"--spec-draft-n-max {best.drafts}"]
    return DraftAnswer(
        acceptances, layer_bytes, 1e9 / plain_ns, choices, best if faster else None,
        " ".join(words) if faster else None,
    )


def _with_less_memory(speed: EngineSpeed, layer_bytes: int) -> EngineSpeed:
    """The speed next to the layers that draft, with as few layers on the host as that leaves room for."""
    reserve = speed.hardware.gpu.reserve_bytes + layer_bytes
    hardware = speed.hardware.with_numbers({"gpu.reserve_bytes": reserve})
    return replace(speed, hardware=hardware, question=replace(speed.question, n_cpu_moe=None))


def _why_not(question: TuneQuestion, bench: Workbench, shape: ModelShape) -> str | None:
    if "drafts" not in bench.engine.options:
        return f"expected llama.cpp, got {bench.engine.name}"
    if bench.hardware.further:
        return f"expected one GPU, got {len(bench.hardware.cards)}"
    if question.fit.batch > 1:
        return f"expected one sequence, got {question.fit.batch}"
    if shape.mtp_layers == 0:
        return f"{shape.name} holds no layers that predict further tokens"
    return None


def _cache_bytes(question: TuneQuestion, shape: ModelShape) -> int:
    """Keys and values of one layer, the largest."""
    tokens = question.fit.tokens
    return max(round(kind.cache_bytes(tokens, shape.cache_bits)) for kind, _ in shape.attention_counts)


def _steps(speed: EngineSpeed) -> Iterator[DraftedStep]:
    trace = routing_for(speed.question).trace
    for drafts in range(1, MOST_DRAFTS + 1):
        yield drafted_step(speed, drafts, active_experts(trace, 1 + drafts))


def active_experts(trace: Trace, tokens: int) -> float:
    """Experts of a layer that any of so many consecutive tokens of an answer chooses, in the mean."""
    ids = [trace.topk_ids[(trace.sequence == each) & (trace.phase == DECODE)] for each in np.unique(trace.sequence)]
    windows = [sliding_window_view(rows, tokens, axis=0) for rows in ids if len(rows) >= tokens]
    if not windows:
        raise FitError(f"tune: drafts: expected {tokens} tokens of an answer in the routing, found fewer")
    chosen = np.concatenate([each.reshape(*each.shape[:2], -1) for each in windows])  # steps, layers, choices
    ordered = np.sort(chosen, axis=-1)
    return float((1 + (np.diff(ordered, axis=-1) != 0).sum(axis=-1)).mean())


def _drafted(step: DraftedStep, plain_ns: int, acceptances: tuple[float, ...]) -> Drafted:
    rates = {acceptance: 1e9 / step.token_ns(acceptance) for acceptance in acceptances}
    return Drafted(step.drafts, step.total_ns / 1e6, step.break_even(plain_ns), rates)
