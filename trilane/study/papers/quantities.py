"""The quantities that papers print, each made from the facts of one play and, where it compares, of a baseline's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

Facts: TypeAlias = Mapping[str, float]  # of one play, by ``observe.FACTS``


class PaperQuantity(NamedTuple):
    """``of``: from the facts of the method and of the baseline; the latter are empty where nothing is compared.

    ``unit`` as papers print it. ``even``: the value at which neither is better, where there is one.
    """

    meaning: str
    unit: str
    of: Callable[[Facts, Facts], float]
    compares: bool = False
    even: float | None = None


def _fact(name: str, factor: float = 1.0) -> Callable[[Facts, Facts], float]:
    return lambda mine, base: factor * mine[name]


def _times(name: str) -> Callable[[Facts, Facts], float]:
    """How many times less the method has of it."""
    return lambda mine, base: base[name] / mine[name]


def _less(name: str) -> Callable[[Facts, Facts], float]:
    return lambda mine, base: 100 * (1 - mine[name] / base[name])


def _more(name: str) -> Callable[[Facts, Facts], float]:
    return lambda mine, base: 100 * (mine[name] / base[name] - 1)


def _points(name: str) -> Callable[[Facts, Facts], float]:
    return lambda mine, base: 100 * (mine[name] - base[name])


def _change_s(name: str) -> Callable[[Facts, Facts], float]:
    """Of the whole answer."""
    return lambda mine, base: (mine[name] - base[name]) * mine["generated_tokens"] / 1e3


def _answer_tokens_per_s(mine: Facts, base: Facts) -> float:
    return 1e3 * mine["generated_tokens"] / (mine["ttft_ms"] + mine["generated_tokens"] * mine["tpot_ms"])


def _answer_j(mine: Facts) -> float:
    """Of a token of the answer, its share of the prompt included."""
    return mine["energy_j_per_token"] + mine["prompt_j"] / mine["generated_tokens"]


def _cache_ratio(mine: Facts) -> float:
    """Both are the same where nothing is prefetched."""
    return mine.get("served_hit_rate", mine["decode_resident_hit_rate"])


def _loading(name: str) -> Callable[[Facts, Facts], float]:
    """The share of the time in which the GPU waits for copies, as far as it is for these loads."""
    return lambda mine, base: 100 * mine["stall_h2d_share"] * mine[name]


QUANTITIES: Mapping[str, PaperQuantity] = {
    "speedup": PaperQuantity("TPOT of the baseline / TPOT", "x", _times("tpot_ms"), True, 1.0),
    "prefill_speedup": PaperQuantity("TTFT of the baseline / TTFT", "x", _times("ttft_ms"), True, 1.0),
    "answer_speedup": PaperQuantity(
        "tokens/s of prompt and answer together, over the baseline's", "x",
        lambda mine, base: _answer_tokens_per_s(mine, mine) / _answer_tokens_per_s(base, base), True, 1.0,
    ),
    "gain": PaperQuantity("TPOT of the baseline / TPOT - 1", "%", lambda mine, base: _more("tpot_ms")(base, mine), True,
                          0.0),
    "reduction": PaperQuantity("1 - TPOT / TPOT of the baseline", "%", _less("tpot_ms"), True, 0.0),
    "prefill_reduction": PaperQuantity("1 - TTFT / TTFT of the baseline", "%", _less("ttft_ms"), True, 0.0),
    "steps_per_s": PaperQuantity("1 / TPOT", "tokens/s", lambda mine, base: 1e3 / mine["tpot_ms"]),
    "answer_tokens_per_s": PaperQuantity("tokens / (TTFT + tokens x TPOT)", "tokens/s", _answer_tokens_per_s),
    "step_s": PaperQuantity("TPOT", "s", _fact("tpot_ms", 1e-3)),
    "prefill_s": PaperQuantity("TTFT", "s", _fact("ttft_ms", 1e-3)),
    "expert_s": PaperQuantity("time of the experts' part of all layers, whole answer", "s",
                              lambda mine, base: mine["expert_ms"] * mine["generated_tokens"] / 1e3),
    "expert_loss": PaperQuantity("1 - experts' time of the baseline / experts' time", "%",
                                 lambda mine, base: _less("expert_ms")(base, mine), True, 0.0),
    "expert_fraction": PaperQuantity("experts' time of the baseline / experts' time", "%",
                                     lambda mine, base: 100 * base["expert_ms"] / mine["expert_ms"], True),
    "expert_cpu_change_s": PaperQuantity("CPU time of experts less the baseline's, whole answer", "s",
                                         _change_s("expert_cpu_ms"), True, 0.0),
    "expert_gpu_change_s": PaperQuantity("time of loads and GPU experts less the baseline's, whole answer", "s",
                                         _change_s("expert_gpu_ms"), True, 0.0),
    "hit_rate": PaperQuantity("active experts that were on the GPU when routed, decode", "%",
                              _fact("decode_resident_hit_rate", 100)),
    "hit_gain": PaperQuantity("hit rate less the baseline's", "points", _points("decode_resident_hit_rate"), True, 0.0),
    "last_hits_max": PaperQuantity("hit rate of the layer with most hits, last 8 steps of the answer", "%",
                                   _fact("last_hits_max", 100)),
    "cache_ratio": PaperQuantity("active experts on the GPU, or on their way to it, when routed, decode", "%",
                                 lambda mine, base: 100 * _cache_ratio(mine)),
    "cache_ratio_improvement": PaperQuantity("that / the baseline's - 1", "%",
                                             lambda mine, base: 100 * (_cache_ratio(mine) / _cache_ratio(base) - 1),
                                             True, 0.0),
    "copy_share": PaperQuantity("time in which experts are copied / TPOT", "%", _fact("h2d_busy_share", 100)),
    "compute_share": PaperQuantity("time in which the GPU computes / TPOT", "%", _fact("gpu_busy_share", 100)),
    "plan_share": PaperQuantity("time of decisions / TPOT", "%", _fact("plan_overhead_share", 100)),
    "no_load_share": PaperQuantity("time in which the GPU does not wait for copies / TPOT", "%",
                                   lambda mine, base: 100 * (1 - mine["stall_h2d_share"])),
    "low_score_share": PaperQuantity("time of waiting for low-score experts / TPOT", "%", _loading("low_score_loads")),
    "top_score_share": PaperQuantity("time of waiting for other experts / TPOT", "%", _loading("top_score_loads")),
    "tokens_per_kj": PaperQuantity("tokens / energy of prompt and answer", "tokens/kJ",
                                   lambda mine, base: 1e3 / _answer_j(mine)),
    "energy_gain": PaperQuantity("energy of the baseline / energy, prompt and answer", "x",
                                 lambda mine, base: _answer_j(base) / _answer_j(mine), True, 1.0),
    "top1_accuracy": PaperQuantity("the forecast's busiest expert is the busiest", "%", _fact("top1_accuracy", 100)),
    "top2_accuracy": PaperQuantity("share of the two busiest among the forecast's two", "%",
                                   _fact("top2_accuracy", 100)),
    "recall": PaperQuantity("share of a token's experts that its forecast names", "%", _fact("recall", 100)),
    "recall_gain": PaperQuantity("recall less the baseline's", "points", _points("recall"), True, 0.0),
    "top_score_accuracy": PaperQuantity("share of the experts forecast as top-score that are", "%",
                                        _fact("top_score_accuracy", 100)),
    "top_score_active": PaperQuantity("share of those that are not which are active", "%",
                                      _fact("top_score_active", 100)),
    "phase_likeness": PaperQuantity("cosine of the activations of prompt and answer", "%",
                                    _fact("phase_likeness", 100)),
    "layer_ms": PaperQuantity("a layer of a decode step", "ms", _fact("layer_ms")),
    "copy_ms": PaperQuantity("copy of one expert", "ms", _fact("copy_ms")),
    "exchange_ms": PaperQuantity("activations to the CPU and the result back", "ms", _fact("exchange_ms")),
    "routed_gib": PaperQuantity("weights of the routed experts, in GiB", "GB", _fact("routed_gib")),
    "other_gib": PaperQuantity("weights but those of routed and shared experts, in GiB", "GB", _fact("other_gib")),
    "model_gib": PaperQuantity("all weights, in GiB", "GB",
                               lambda mine, base: mine["routed_gib"] + mine["shared_gib"] + mine["other_gib"]),
    "copy_over_layer": PaperQuantity("copy of one expert / a layer of a decode step", "x",
                                     lambda mine, base: mine["copy_ms"] / mine["layer_ms"]),
    "cpu_over_copy": PaperQuantity("one expert on the CPU / its copy", "x",
                                   lambda mine, base: mine["cpu_expert_ms"] / mine["copy_ms"]),
}
