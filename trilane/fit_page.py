"""The page of ``trilane fit``: the answer first, then what it takes, what else there is, and what it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from trilane.output import heading, legend, number, pairs, percent, table

if TYPE_CHECKING:
    from sim.fit.fit import Fit
    from sim.fit.fits import Memory
    from sim.fit.played import Answer

GB = 1e9
_LANES = {"h2d": "copies", "cpu": "the CPU's experts", "host": "the host program"}
_MARKS = {"clairvoyant": " *", "changes routing": " ~"}
_RUNTIMES = {
    "graphs": "recorded graphs, kernels that experts share, as in llama.cpp (--runtime eager: as plain PyTorch)",
    "measured": "the one that was profiled",
    "eager": "every kernel started by itself, as plain PyTorch does (--runtime graphs: as llama.cpp)",
}
_COLUMNS = ("policy", "TTFT s", "TPOT ms", "tokens/s", "answer s", "hit rate", "PCIe MiB/tok", "host GB")
_LEGEND = {
    "answer": "until the last of the generated tokens is there; the order of the table",
    "hit rate": "active experts that were on the GPU when their layer was routed, in decode steps",
    "host GB": "expert weights that the host's memory must hold (10^9 bytes)",
}
_MARK_LEGEND = {
    "*": "knows the future: a yardstick of what is left to gain, and no bound",
    "~": "executes other experts than the router chose in places; its prompt was not played (no TTFT)",
}


def fit_page(fit: Fit) -> list[Text | Table | str]:
    """Everything that is printed."""
    return [
        *_answer(fit), *_memory(fit), *_others(fit), *_limits(fit), *_supports(fit), *_traps(fit),
    ]  # fmt: skip


# --- the answer -------------------------------------------------------------------------------------------------------


def _answer(fit: Fit) -> list[Text | Table | str]:
    best, asked = fit.best, fit.question
    batch = "" if asked.batch == 1 else f", batch {asked.batch}"
    about = f"a prompt of {asked.context:,} tokens and {asked.generated:,} generated{batch}"
    facts = [
        ("best policy", _best(fit)),
        ("time per output token", f"{number(best.tpot_ms, 2)} ms ({', '.join(_beside(fit))})"),
        ("tokens/s", _speeds(best, asked.batch)),
        ("time to first token", _first(fit)),
        ("limited by", fit.limited_by),
        *_waits(best),
        *_llama_cpp(fit),
        ("routing", fit.routing),
        ("runtime", _RUNTIMES[fit.runtime]),
    ]
    return [heading(f"{fit.model} on {fit.machine}: {about}"), *([fit.about] if fit.about else []), pairs(facts)]


def _best(fit: Fit) -> str:
    from policies.registry import system

    if not fit.offloads:
        return "none needed: every expert is on the GPU, nothing is offloaded"
    return f"{fit.best.policy}: {system(fit.best.policy).summary}"


def _beside(fit: Fit) -> list[str]:
    """What stands beside every time."""
    seer = [] if fit.clairvoyant is None else [f"clairvoyant run {number(fit.clairvoyant.tpot_ms, 2)}"]
    bound, null = fit.bounds["lower_bound_tpot_ms"], fit.bounds["null_model_tpot_ms"]
    return [f"no policy below {number(bound, 2)}", *seer, f"null model {number(null, 2)}"]


def _first(fit: Fit) -> str:
    return f"{_seconds(fit.best.ttft_ms)} s (no policy below {_seconds(fit.bounds['lower_bound_ttft_ms'])})"


def _speeds(answer: Answer, batch: int) -> str:
    each = number(answer.tokens_per_s)
    return each if batch == 1 else f"{each} per sequence, {number(answer.throughput_tokens_per_s)} in all"


def _waits(answer: Answer) -> list[tuple[str, str]]:
    shares = {lane: share for lane, share in answer.stall_shares.items() if share and share >= 0.005}
    told = ", ".join(f"{percent(share)} of the time for {_LANES[lane]}" for lane, share in shares.items())
    return [("the GPU waits", told)] if told else []


def _llama_cpp(fit: Fit) -> list[tuple[str, str]]:
    """What can be run today, and what to expect of it."""
    setting = fit.llama_cpp
    if setting is None:
        return [("with llama.cpp", f"not: {fit.refused.get('llama.cpp@impl', 'it was not asked')}")]
    layers = f"experts of {setting.cpu_layers} of {setting.layers} layers on the CPU"
    where = layers if setting.cpu_layers else "all on the GPU"
    times = f"{number(setting.tpot_ms, 2)} ms a token, first after {_seconds(setting.ttft_ms)} s"
    return [("with llama.cpp", f"{setting.arguments}  ({where}): {times}")]


# --- what fits --------------------------------------------------------------------------------------------------------


def _memory(fit: Fit) -> list[Text | Table | str]:
    memory = fit.memory
    free = memory.gpu_bytes - memory.fixed_bytes - memory.cache_bytes
    parts = {
        "weights that every token needs": memory.every_token_bytes, "KV cache": memory.kv_bytes,
        "staging": memory.staging_bytes, "reserve": memory.reserve_bytes, "expert cache": memory.cache_bytes,
        "free": free,
    }  # fmt: skip
    divided = " + ".join(f"{name} {_gb(size)}" for name, size in parts.items() if size)
    rows = [
        ("GPU memory", f"{_gb(memory.gpu_bytes)} GB = {divided}"),
        ("experts on the GPU", _cached(memory)),
        ("host memory", _host(memory)),
    ]
    return ["", heading("what fits"), pairs(rows)]


def _cached(memory: Memory) -> str:
    per_layer = memory.experts // memory.layers
    return (
        f"{memory.cached_experts:,} of {memory.experts:,}, {memory.cached_experts / memory.layers:.1f} of {per_layer} "
        f"a layer ({percent(memory.cached_experts / memory.experts)})"
    )


def _host(memory: Memory) -> str:
    if memory.all_fits:
        return "none for experts, once the model is loaded"
    experts, reserve = memory.host_bytes, memory.host_reserve_bytes
    return f"{_gb(experts + reserve)} GB: experts {_gb(experts)}, the system and the program {_gb(reserve)}"


# --- the others -------------------------------------------------------------------------------------------------------


def _others(fit: Fit) -> list[Text | Table | str]:
    if not fit.offloads:
        return []
    seer = [] if fit.clairvoyant is None else [fit.clairvoyant]
    shown = [fit.best, *fit.runners_up, *seer, *fit.changing]
    marks = {mark: text for mark, text in _MARK_LEGEND.items() if any(_name(a).endswith(mark) for a in shown)}
    refused = [f"not played: {name}: {why}" for name, why in fit.refused.items()]
    return ["", heading("beside the others"), table(_COLUMNS, [_row(answer) for answer in shown]),
            legend({**_LEGEND, **marks}), *refused]  # fmt: skip


def _row(answer: Answer) -> list[str]:
    pcie = None if answer.pcie_bytes_per_token is None else answer.pcie_bytes_per_token / 2**20
    whole = answer.ttft_ms is not None
    return [
        _name(answer), _seconds(answer.ttft_ms), number(answer.tpot_ms, 2), number(answer.tokens_per_s),
        number(answer.answer_ms / 1e3 if whole else None), percent(answer.hit_rate), number(pcie),
        _gb(answer.host_bytes),
    ]  # fmt: skip


def _name(answer: Answer) -> str:
    return answer.policy + "".join(mark for label, mark in _MARKS.items() if label in answer.labels)


# --- what it rests on -------------------------------------------------------------------------------------------------


def _limits(fit: Fit) -> list[Text | Table | str]:
    rows = [[gain.part, percent(gain.tpot, 1)] for gain in fit.gains]
    title = f"what a part 25% better gives, with {fit.best.policy}"
    return ["", heading(title), table(("part", "more tokens/s"), rows)]


def _supports(fit: Fit) -> list[Text | Table | str]:
    rows = [(support.confidence, support.key, f"{support.value:.4g}", support.source) for support in fit.supports]
    if not rows:
        return []
    return ["", heading("the weakest numbers that it depends on most"),
            table(("confidence", "number", "value", "source"), rows, text_columns=4, wrap=True)]  # fmt: skip


def _traps(fit: Fit) -> list[Text | Table | str]:
    return ["", heading("mind"), *_bullets(fit.traps)] if fit.traps else []


def _bullets(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _gb(size: int) -> str:
    return f"{size / GB:.1f}"


def _seconds(ms: float | None) -> str:
    return number(None if ms is None else ms / 1e3, 2)
