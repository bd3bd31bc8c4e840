"""The page of ``trilane fit``: the engine that people run first, then the best policy, and what that rests on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from sim.costs.engine import load_engine
from trilane.common.units import in_gb
from trilane.pages.fit_engine import duration, engine_section
from trilane.pages.fit_policies import policies_section, token_time
from trilane.pages.output import heading, number, pairs, percent, table

if TYPE_CHECKING:
    from trilane.study.fit.answer import Fit
    from trilane.study.fit.memory_needed import MemoryUse
    from trilane.study.fit.policy_answer import PolicyAnswer
    from trilane.study.fit.policy_result import PolicyResult
    from trilane.study.fit.question import Question

_LANES = {"h2d": "copies", "cpu": "the CPU's experts", "host": "launches and decisions of the host"}
_WORSE = -0.02  # a smaller loss may be the error of a few steps (trilane.study.fit.warm_window)
_DISAGREE = 0.005  # less is told as 0%
_BADLY = "(the policy uses it badly)"
_NEAR = 256  # tokens: --prompt max comes so near the length that a model was trained for


def fit_page(fit: Fit) -> list[Text | Table | str]:
    """Everything that is printed."""
    policies = _traps(fit.notes) if fit.policies is None else _policies(fit, fit.policies)
    return [*_title(fit), *engine_section(fit), *policies]


def _title(fit: Fit) -> list[Text | Table | str]:
    asked = fit.question
    batch = "" if asked.batch == 1 else f", batch {asked.batch}"
    about = f"a prompt of {asked.prompt_tokens:,} tokens and {asked.generated:,} generated{batch}"
    told = [fit.about, _length(asked.tokens, fit.trained_tokens)]
    return [heading(f"{fit.model} on {fit.machine}: {about}"), *filter(None, told)]


def _length(tokens: int, trained: int | None) -> str:
    """What the model was trained for, where the question comes near it or goes beyond."""
    if trained is None or tokens <= trained - _NEAR:
        return ""
    if tokens <= trained:
        return f"This is the length that the model was trained for, {trained:,} tokens with the answer."
    return f"The model was trained for {trained:,} tokens, and here are {tokens:,}: answers may be of little use."


def _policies(fit: Fit, played: PolicyAnswer) -> list[Text | Table | str]:
    asked = fit.question
    return [*_answer(asked, played), *_disagreement(fit, played), *_memory(played), *policies_section(asked, played),
            *_limits(played), *_supports(played), *_traps(played.traps)]  # fmt: skip


# --- the answer -------------------------------------------------------------------------------------------------------


def _answer(asked: Question, fit: PolicyAnswer) -> list[Text | Table | str]:
    best = fit.best
    facts = [
        ("best policy", _best(fit)),
        ("time per output token", f"{_with_spread(best, asked)} ms ({', '.join(_bounds(fit))})"),
        ("tokens/s", _speeds(best, asked)),
        ("time to first token", _first(fit)),
        ("limited by", fit.limited_by),
        *_waits(best),
        ("decode steps played", _steps(asked, fit)),
        ("routing", fit.routing),
        ("engine of the policies", _engine(fit.engine)),
    ]
    return ["", heading("with the best policy"), pairs(facts)]


def _disagreement(fit: Fit, played: PolicyAnswer) -> list[str]:
    """Where the engine's predicted speed is above that of the best policy."""
    engine, best = fit.engine, played.best
    if engine is None or fit.question.generated == 1 or best.tpot_ms < (1 + _DISAGREE) * engine.tpot_ms:
        return []
    return [f"{engine.engine} is predicted to be faster, {number(1000 / engine.tpot_ms)} tokens/s: the two models "
            f"disagree by {percent(best.tpot_ms / engine.tpot_ms - 1)}"]  # fmt: skip


def _engine(name: str) -> str:
    if name == "measured":
        return "the one that was profiled"
    return f"{name}: {load_engine(name).about}"


def _best(fit: PolicyAnswer) -> str:
    from policies.registry import system

    if not fit.offloads:
        return "none needed: every expert is on the GPU, nothing is offloaded"
    return f"{fit.best.policy}: {system(fit.best.policy).summary}"


def _bounds(fit: PolicyAnswer) -> list[str]:
    """What the time is compared with."""
    seer = [] if fit.clairvoyant is None else [f"clairvoyant run {number(fit.clairvoyant.tpot_ms, 2)}"]
    bound, null = fit.bounds["lower_bound_tpot_ms"], fit.bounds["null_model_tpot_ms"]
    return [f"simulated; lower bound {number(bound, 2)}", *seer, f"null model {number(null, 2)}"]


def _first(fit: PolicyAnswer) -> str:
    if fit.best.ttft_ms is None:
        return "not simulated: this policy plays a shorter prompt"
    bound = duration(fit.bounds["lower_bound_ttft_ms"])
    return f"{duration(fit.best.ttft_ms)} (lower bound {bound}; the whole prompt in one piece)"


def _speeds(answer: PolicyResult, asked: Question) -> str:
    each = number(answer.tokens_per_s if asked.generated > 1 else None)
    if asked.batch == 1 or asked.generated == 1:
        return each
    return f"{each} per sequence, {number(answer.throughput_tokens_per_s)} in all"


def _with_spread(answer: PolicyResult, asked: Question) -> str:
    """TPOT and how far it is likely off."""
    told = token_time(answer.tpot_ms, asked)
    return f"{told} +- {number(answer.spread_ms, 2)}" if answer.spread_ms else told


def _steps(asked: Question, fit: PolicyAnswer) -> str:
    """How many decode steps were played, and what they stand for."""
    from sim.runs.sampling import one_by_one

    played, generated = fit.steps, asked.generated
    if played >= generated:
        return f"all {played}"
    first = one_by_one(played, generated)
    return f"{played} of {generated}: the first {first}, and {played - first} whose mean stands for all later ones"


def _waits(answer: PolicyResult) -> list[tuple[str, str]]:
    shares = {lane: share for lane, share in answer.stall_shares.items() if share and share >= 0.005}
    told = ", ".join(f"{percent(share)} of the time for {_LANES.get(lane, lane)}" for lane, share in shares.items())
    return [("the GPU waits", told)] if told else []


# --- what fits --------------------------------------------------------------------------------------------------------


def _memory(fit: PolicyAnswer) -> list[Text | Table | str]:
    memory = fit.memory
    free = memory.gpu_bytes - memory.fixed_bytes - memory.cache_bytes
    parts = {
        "weights that every token needs": memory.every_token_bytes, "KV cache": memory.kv_bytes,
        "staging": memory.staging_bytes, "reserve": memory.reserve_bytes, "expert cache": memory.cache_bytes,
        "free": free,
    }  # fmt: skip
    divided = " + ".join(f"{name} {in_gb(size)}" for name, size in parts.items() if size)
    rows = [
        ("GPU memory", f"{in_gb(memory.gpu_bytes)} GB = {divided}"),
        ("experts on the GPU", _cached(memory)),
        ("host memory", _host(memory)),
    ]
    return ["", heading("what fits"), pairs(rows)]


def _cached(memory: MemoryUse) -> str:
    per_layer = memory.experts // memory.layers
    return (
        f"{memory.cached_experts:,} of {memory.experts:,}, {memory.cached_experts / memory.layers:.1f} of {per_layer} "
        f"a layer ({percent(memory.cached_experts / memory.experts)})"
    )


def _host(memory: MemoryUse) -> str:
    if memory.all_fits:
        return "none for experts, once the model is loaded"
    experts, reserve = memory.host_bytes, memory.host_reserve_bytes
    return f"{in_gb(experts + reserve)} GB: experts {in_gb(experts)}, the system and the program {in_gb(reserve)}"


# --- what it rests on -------------------------------------------------------------------------------------------------


def _limits(fit: PolicyAnswer) -> list[Text | Table | str]:
    rows = [[gain.part, percent(gain.tpot), _BADLY * (gain.tpot < _WORSE)] for gain in fit.gains]
    title = f"what a part 25% better gives with the policy {fit.best.policy}, to about 2%"
    return ["", heading(title), table(("part", "more tokens/s", ""), rows)]


def _supports(fit: PolicyAnswer) -> list[Text | Table | str]:
    rows = [(support.confidence, support.key, f"{support.value:.4g}", support.source) for support in fit.supports]
    if not rows:
        return []
    return ["", heading("the weakest numbers that it depends on most"),
            table(("confidence", "number", "value", "source"), rows, text_columns=4, wrap=True)]  # fmt: skip


def _traps(told: Sequence[str]) -> list[Text | Table | str]:
    return ["", heading("caveats"), *_bullets(told)] if told else []


def _bullets(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" for line in lines]
