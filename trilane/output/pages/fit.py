"""The page of ``trilane fit``: the engine that people run first, then the best policy, and what that rests on."""

from __future__ import annotations

from collections.abc import Sequence

from policies.protocols import PolicyKind
from sim.costs.engine import load_engine
from sim.runs.vocabulary import kind_of
from trilane.common.units import in_gb
from trilane.engines.gains import Gain
from trilane.engines.memory import SYSTEM
from trilane.engines.question import Question
from trilane.fit.answer import PolicyAnswer
from trilane.fit.fit import Fit
from trilane.fit.policy_result import MemoryUse, PolicyResult
from trilane.output.figures.marks import SIGNS
from trilane.output.pages.caveats import fit_caveats, limit_text
from trilane.output.pages.fit_engine import (
    caveats,
    duration,
    first_part,
    host_text,
    last_part,
    seconds,
    sizes_text,
)
from trilane.output.pages.output import Part, heading, legend, mebibytes, number, pairs, percent, table

_LANES = {"disk": "the disk", "h2d": "copies", "cpu": "the CPU's experts", "host": "launches and decisions of the host"}
_WORSE = -0.02  # a smaller loss may be the error of a few steps (trilane.fit.sensitivity)
_DISAGREE = 0.005  # less is told as 0%
_BADLY = "(the policy uses it badly)"
_OTHER, _EQUAL = "+", "="
_COLUMNS = ("policy", "TTFT s", "TPOT ms", "tokens/s", "answer s", "hit rate", "PCIe MiB/tok", "host GB")
_LEGEND = {
    "answer": "until the last of the generated tokens is there; the order of the table",
    "hit rate": "active experts that were on the GPU when their layer was routed, in decode steps",
    "host GB": "expert weights that the host's memory must hold (10^9 bytes)",
}
_DISK = "disk MiB/tok"
_DISK_LEGEND = {
    _DISK: "read in decode steps; the host's memory keeps the experts used last, unless a policy keeps others",
}
_MARK_LEGEND = {
    SIGNS[PolicyKind.CLAIRVOYANT]: "knows the future: shows what is left to gain, but is no bound",
    _EQUAL: "as fast as the best, within the spread of the steps that were played",
    _OTHER: "for comparison: not among those to choose from",
    SIGNS[PolicyKind.CHANGES]: (
        "sometimes runs other experts than the router chose; a prompt that is repeated is not played (no TTFT)"
    ),
}


def fit_page(fit: Fit) -> list[Part]:
    """Everything that is printed."""
    return [*first_part(fit), *(last_part(fit) if fit.policies is None else policies_part(fit, fit.policies, True))]


def policies_part(fit: Fit, played: PolicyAnswer, explain: bool = False) -> list[Part]:
    """All about the policies, and the caveats; ``explain``: what better parts give, and the weakest numbers."""
    question, gains = fit.question, played.gains
    explained = [] if gains is None or not explain else [*_limits(played, gains), *_supports(played)]
    return [*_answer(question, played), *_disagreement(fit, played), *_memory(played),
            *policies_section(question, played), *explained, *caveats(fit_caveats(fit, played))]


# --- the answer -------------------------------------------------------------------------------------------------------


def _answer(question: Question, fit: PolicyAnswer) -> list[Part]:
    best, spread = fit.best, f" +- {number(fit.best.spread_ms, 2)}" if fit.best.spread_ms else ""
    ran = "the one that was profiled" if fit.engine is None else f"{fit.engine}: {load_engine(fit.engine).about}"
    facts = [
        ("best policy", _best(fit)),
        ("time per output token", f"{token_time(best.tpot_ms, question)}{spread} ms ({', '.join(_bounds(fit))})"),
        ("tokens/s", _speeds(best, question)),
        ("time to first token", _first(fit)),
        *_waits(best),
        ("decode steps played", _steps(question, fit)),
        ("routing", fit.routing),
        *([("its statistics", fit.statistics)] if fit.statistics else []),
        ("engine of the policies", ran),
    ]
    return ["", heading("with the best policy"), pairs(facts)]


def _disagreement(fit: Fit, played: PolicyAnswer) -> list[str]:
    """Sentence where the engine's predicted speed is above that of the best policy."""
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
    """Times that the time is compared with."""
    seer = [] if fit.clairvoyant is None else [f"clairvoyant run {number(fit.clairvoyant.tpot_ms, 2)}"]
    bound, null = fit.bounds["lower_bound_tpot_ms"], fit.bounds["null_model_tpot_ms"]
    return [f"simulated; lower bound {number(bound, 2)}", *seer, f"null model {number(null, 2)}"]


def _first(fit: PolicyAnswer) -> str:
    if fit.best.ttft_ms is None:
        return "not simulated: this policy plays a shorter prompt"
    bound = duration(fit.bounds["lower_bound_ttft_ms"])
    return f"{duration(fit.best.ttft_ms)} (lower bound {bound}; the whole prompt in one piece)"


def _speeds(answer: PolicyResult, question: Question) -> str:
    of_one = number(answer.tokens_per_s if question.generated > 1 else None)
    if question.batch == 1 or question.generated == 1:
        return of_one
    return f"{of_one} per sequence, {number(answer.throughput_tokens_per_s)} in all"


def _steps(question: Question, fit: PolicyAnswer) -> str:
    """How many decode steps were played, and what they stand for."""
    from sim.runs.sampling import one_by_one

    played, generated = fit.steps, question.generated
    if played >= generated:
        return f"all {played}"
    first = one_by_one(played, generated)
    return f"{played} of {generated}: the first {first}, and {played - first} whose mean stands for all later ones"


def _waits(answer: PolicyResult) -> list[tuple[str, str]]:
    shares = {lane: share for lane, share in answer.stall_shares.items() if share and share >= 0.005}
    text = ", ".join(f"{percent(share)} of the time for {_LANES.get(lane, lane)}" for lane, share in shares.items())
    return [("the GPU waits", text)] if text else []


# --- what fits --------------------------------------------------------------------------------------------------------


def _memory(fit: PolicyAnswer) -> list[Part]:
    memory = fit.memory
    free = memory.gpu_bytes - memory.fixed_bytes - memory.cache_bytes
    parts = {
        "weights that every token needs": memory.every_token_bytes, "KV cache": memory.kv_bytes,
        "staging": memory.staging_bytes, "reserve": memory.reserve_bytes, "expert cache": memory.cache_bytes,
        "free": free,
    }
    host = host_text({"experts": memory.host_bytes, SYSTEM: memory.host_reserve_bytes}, memory.disk_bytes)
    rows = [
        ("GPU memory", f"{in_gb(memory.gpu_bytes)} GB = {sizes_text(parts)}"),
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


def _limits(fit: PolicyAnswer, gains: Sequence[Gain]) -> list[Part]:
    rows = [[gain.part, percent(gain.tpot), _BADLY * (gain.tpot < _WORSE)] for gain in gains]
    title = f"what a part 25% better gives with the policy {fit.best.policy}, to about 2%"
    return ["", heading(title), f"limited by: {limit_text(gains)}", table(("part", "more tokens/s", ""), rows)]


def _supports(fit: PolicyAnswer) -> list[Part]:
    rows = [(support.confidence, support.key, f"{support.value:.4g}", support.source) for support in fit.supports]
    if not rows:
        return []
    return ["", heading("the weakest numbers that it depends on most"),
            table(("confidence", "number", "value", "source"), rows, text_columns=4, wrap=True)]


def policies_section(question: Question, fit: PolicyAnswer) -> list[Part]:
    """The table, what its marks mean, and the policies that were refused."""
    if fit.memory.all_fits:
        return []
    seer = [] if fit.clairvoyant is None else [fit.clairvoyant]
    shown = [(one, _sign(fit, one)) for one in (fit.best, *fit.runners_up, *fit.compared, *seer, *fit.changing)]
    signs = {sign: text for sign, text in _MARK_LEGEND.items() if any(sign == one for _, one in shown)}
    refused = [f"not played: {name}: {why}" for name, why in fit.refused.items()]
    reads = any(one.disk_bytes_per_token is not None for one, _ in shown)
    rows = [[*_row(one, sign, question), *([mebibytes(one.disk_bytes_per_token)] if reads else [])]
            for one, sign in shown]
    return ["", heading("compared with others"), table((*_COLUMNS, *([_DISK] if reads else [])), rows),
            legend({**_LEGEND, **(_DISK_LEGEND if reads else {}), **signs}), *_slower_seer(fit), *refused]


def _slower_seer(fit: PolicyAnswer) -> list[str]:
    """Why the clairvoyant run may be slower."""
    seer, best = fit.clairvoyant, fit.best
    if seer is None or seer.tpot_ms <= best.tpot_ms:
        return []
    copied = [answer.pcie_bytes_per_token or 0 for answer in (seer, best)]
    why = f"it copies {copied[0] / 2**20:,.0f} MiB a token where {best.policy} copies {copied[1] / 2**20:,.0f}, and "
    return [f"the clairvoyant run is slower here: {why * (copied[0] > copied[1])}knowing the future, it still decides "
            f"layer by layer"]


def _row(answer: PolicyResult, sign: str, question: Question) -> list[str]:
    whole = answer.ttft_ms is not None
    return [
        f"{answer.policy} {sign}".strip(), seconds(answer.ttft_ms), token_time(answer.tpot_ms, question),
        number(answer.tokens_per_s if question.generated > 1 else None),
        number(answer.answer_ms / 1e3 if whole else None), percent(answer.hit_rate),
        mebibytes(answer.pcie_bytes_per_token), in_gb(answer.host_bytes),
    ]


def _sign(fit: PolicyAnswer, answer: PolicyResult) -> str:
    if answer in fit.compared:
        return _OTHER
    if answer.policy in fit.equal:
        return _EQUAL
    return SIGNS.get(kind_of(answer.labels), "")


def token_time(ms: float, question: Question) -> str:
    """TPOT; an answer of one token has none."""
    return number(ms if question.generated > 1 else None, 2)
