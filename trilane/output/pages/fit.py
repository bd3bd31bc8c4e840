"""The page of ``trilane fit``: the engine that people run first, then the best policy, and what that rests on."""

from __future__ import annotations

from sim.costs.engine import load_engine
from trilane.common.units import in_gb
from trilane.engines.question import Question
from trilane.fit.answer import Fit
from trilane.fit.policy_answer import PolicyAnswer
from trilane.fit.policy_result import MemoryUse, PolicyResult
from trilane.output.pages.fit_engine import caveats, duration, engine_section, host_told, question_told, sizes_told
from trilane.output.pages.fit_policies import policies_section, token_time
from trilane.output.pages.output import Part, heading, number, pairs, percent, table

_LANES = {"h2d": "copies", "cpu": "the CPU's experts", "host": "launches and decisions of the host"}
_WORSE = -0.02  # a smaller loss may be the error of a few steps (trilane.fit.warm_window)
_DISAGREE = 0.005  # less is told as 0%
_BADLY = "(the policy uses it badly)"
_NEAR = 256  # tokens: --prompt max comes so near the length that a model was trained for


def fit_page(fit: Fit) -> list[Part]:
    """Everything that is printed."""
    asked = fit.question
    told = filter(None, [fit.about, _length(asked.tokens, fit.trained_tokens)])
    policies = caveats(fit.notes) if fit.policies is None else _policies(fit, fit.policies)
    title = heading(f"{fit.model} on {fit.machine}: {question_told(asked)}")
    return [title, *told, *engine_section(fit), *policies]


def _length(tokens: int, trained: int | None) -> str:
    """What the model was trained for, where the question comes near it or goes beyond."""
    if trained is None or tokens <= trained - _NEAR:
        return ""
    if tokens <= trained:
        return f"This is the length that the model was trained for, {trained:,} tokens with the answer."
    return f"The model was trained for {trained:,} tokens, and here are {tokens:,}: answers may be of little use."


def _policies(fit: Fit, played: PolicyAnswer) -> list[Part]:
    asked = fit.question
    return [*_answer(asked, played), *_disagreement(fit, played), *_memory(played), *policies_section(asked, played),
            *_limits(played), *_supports(played), *caveats(played.traps)]


# --- the answer -------------------------------------------------------------------------------------------------------


def _answer(asked: Question, fit: PolicyAnswer) -> list[Part]:
    best, spread = fit.best, f" +- {number(fit.best.spread_ms, 2)}" if fit.best.spread_ms else ""
    ran = "the one that was profiled" if fit.engine == "measured" else f"{fit.engine}: {load_engine(fit.engine).about}"
    facts = [
        ("best policy", _best(fit)),
        ("time per output token", f"{token_time(best.tpot_ms, asked)}{spread} ms ({', '.join(_bounds(fit))})"),
        ("tokens/s", _speeds(best, asked)),
        ("time to first token", _first(fit)),
        ("limited by", fit.limited_by),
        *_waits(best),
        ("decode steps played", _steps(asked, fit)),
        ("routing", fit.routing),
        ("engine of the policies", ran),
    ]
    return ["", heading("with the best policy"), pairs(facts)]


def _disagreement(fit: Fit, played: PolicyAnswer) -> list[str]:
    """Where the engine's predicted speed is above that of the best policy."""
    engine, best = fit.engine, played.best
    if engine is None or fit.question.generated == 1 or best.tpot_ms < (1 + _DISAGREE) * engine.tpot_ms:
        return []
    return [f"{engine.engine} is predicted to be faster, {number(1000 / engine.tpot_ms)} tokens/s: the two models "
            f"disagree by {percent(best.tpot_ms / engine.tpot_ms - 1)}"]


def _best(fit: PolicyAnswer) -> str:
    from policies.registry import system

    if fit.memory.all_fits:
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


def _memory(fit: PolicyAnswer) -> list[Part]:
    memory = fit.memory
    free = memory.gpu_bytes - memory.fixed_bytes - memory.cache_bytes
    parts = {
        "weights that every token needs": memory.every_token_bytes, "KV cache": memory.kv_bytes,
        "staging": memory.staging_bytes, "reserve": memory.reserve_bytes, "expert cache": memory.cache_bytes,
        "free": free,
    }
    host = host_told(memory.host_bytes, memory.host_reserve_bytes)
    rows = [
        ("GPU memory", f"{in_gb(memory.gpu_bytes)} GB = {sizes_told(parts)}"),
        ("experts on the GPU", _cached(memory)),
        ("host memory", "none for experts, once the model is loaded" if memory.all_fits else host),
    ]
    return ["", heading("what fits"), pairs(rows)]


def _cached(memory: MemoryUse) -> str:
    per_layer = memory.experts // memory.layers
    return (
        f"{memory.cached_experts:,} of {memory.experts:,}, {memory.cached_experts / memory.layers:.1f} of {per_layer} "
        f"a layer ({percent(memory.cached_experts / memory.experts)})"
    )


# --- what it rests on -------------------------------------------------------------------------------------------------


def _limits(fit: PolicyAnswer) -> list[Part]:
    rows = [[gain.part, percent(gain.tpot), _BADLY * (gain.tpot < _WORSE)] for gain in fit.gains]
    title = f"what a part 25% better gives with the policy {fit.best.policy}, to about 2%"
    return ["", heading(title), table(("part", "more tokens/s", ""), rows)]


def _supports(fit: PolicyAnswer) -> list[Part]:
    rows = [(support.confidence, support.key, f"{support.value:.4g}", support.source) for support in fit.supports]
    if not rows:
        return []
    return ["", heading("the weakest numbers that it depends on most"),
            table(("confidence", "number", "value", "source"), rows, text_columns=4, wrap=True)]
