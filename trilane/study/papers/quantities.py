"""The facts of one play, and the quantities that figures ask of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from policies.mechanism.views import Forecast, Routing
from policies.papers.edgemoe import ActivationProfile, ProfilePrefetcher
from sim.runs.demand import StepDemand
from sim.runs.hits import layer_frame
from sim.runs.prepare import Prepared
from sim.runs.run import Run, watts
from sim.runs.vocabulary import Device
from sim.simulate import play

Facts: TypeAlias = Mapping[str, float]  # of one play, by the names in ``FACTS``


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
    """Seconds of the whole answer."""
    return lambda mine, base: (mine[name] - base[name]) * mine["generated_tokens"] / 1e3


def _answer_tokens_per_s(mine: Facts, base: Facts) -> float:
    return 1e3 * mine["generated_tokens"] / (mine["ttft_ms"] + mine["generated_tokens"] * mine["tpot_ms"])


def _answer_j(mine: Facts) -> float:
    """Joules of a token of the answer, its share of the prompt included."""
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
    "decode_tokens_per_s": PaperQuantity("tokens/s of an engine's answers, all sequences", "tokens/s",
                                         _fact("decode_tokens_per_s")),
    "prompt_tokens_per_s": PaperQuantity("tokens/s of an engine's prompts", "tokens/s", _fact("prompt_tokens_per_s")),
    "first_token_s": PaperQuantity("time of an engine's prompts", "s", _fact("first_token_s")),
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

Subject: TypeAlias = Literal["times", "ratios", "hits", "forecasts", "shares of the time", "sizes"]
TIMED: tuple[Subject, ...] = ("times", "ratios")
_SUBJECTS: Mapping[Subject, tuple[str, ...]] = {
    "hits": ("hit_rate", "hit_gain", "last_hits_max", "cache_ratio", "cache_ratio_improvement"),
    "forecasts": ("top1_accuracy", "top2_accuracy", "recall", "recall_gain", "top_score_accuracy", "top_score_active",
                  "phase_likeness"),
    "shares of the time": ("copy_share", "compute_share", "plan_share", "no_load_share", "low_score_share",
                           "top_score_share"),
    "sizes": ("routed_gib", "other_gib", "model_gib"),
}


def subject_of(name: str) -> Subject:
    """The kind of a quantity: of all others, those that compare are ratios (or differences) of times."""
    named = next((subject for subject, names in _SUBJECTS.items() if name in names), None)
    return named or ("ratios" if QUANTITIES[name].compares else "times")


_OF_RUNS = (
    "tpot_ms", "ttft_ms", "decode_resident_hit_rate", "h2d_busy_share", "gpu_busy_share", "cpu_busy_share",
    "plan_overhead_share", "energy_j_per_token",
)
FACTS = (
    *_OF_RUNS, "generated_tokens", "layer_ms", "expert_ms", "expert_cpu_ms", "expert_gpu_ms", "copy_ms",
    "cpu_expert_ms", "exchange_ms", "top1_accuracy", "top2_accuracy", "recall", "phase_likeness", "low_score_loads",
    "top_score_loads", "top_score_accuracy", "top_score_active", "stall_h2d_share", "prompt_j",
    "served_hit_rate", "last_hits_max", "decode_tokens_per_s", "prompt_tokens_per_s", "first_token_s", "speed_band",
    "prompt_band",
)
LAST = 8  # tokens that DALI's Fig. 18d takes together
_ALPHA = 0.25  # of Qwen2 (Section VI-B), whose loads SMoE's Table I shows, unless a policy has another one


def observed(prepared: Prepared) -> Facts:
    """Play it. Facts that it does not have are left out. Raises what ``sim.simulate.play`` raises."""
    run = play(prepared)
    row = run.to_dict()
    facts = {name: row.get(name) for name in _OF_RUNS}
    facts |= {"generated_tokens": prepared.answer_tokens, "layer_ms": run.metrics.tpot_ms}
    facts |= {**_expert_times(run), **_costs(prepared), **_forecasts(prepared)}
    if tops := _top_scores(prepared, run.spans):
        facts |= {**tops, "stall_h2d_share": row["stall_h2d_share"], "served_hit_rate": row["decode_served_hit_rate"]}
    facts |= {"phase_likeness": _phase_likeness(prepared), "prompt_j": _prompt_j(run)}
    facts |= {"last_hits_max": _last_hits_max(prepared, run.spans)}
    if run.metrics.tpot_ms is not None:
        facts["layer_ms"] = run.metrics.tpot_ms / prepared.shape.moe_layers
    return {name: float(value) for name, value in facts.items() if value is not None and np.isfinite(value)}


# --- times ------------------------------------------------------------------------------------------------------------


def _expert_times(run: Run) -> Facts:
    """Times of a decode step in ms: the experts' part of all layers, as long as anything of it lasts; CPU experts, one
    after the other; and loads and GPU experts, from the first to the last of a layer."""
    spans = run.spans[(run.spans.phase == "decode") & (run.spans.layer >= 0)]
    experts = spans[spans.kind.isin(["expert", "demand"])]
    steps = run.metrics.decode_steps or 1
    on_gpu, on_cpu = experts[experts.lane != "cpu"], experts[experts.lane == "cpu"]
    return {
        "expert_ms": _stretches_ns(experts) / steps / 1e6,
        "expert_cpu_ms": float((on_cpu.end_ns - on_cpu.start_ns).sum()) / steps / 1e6,
        "expert_gpu_ms": _stretches_ns(on_gpu) / steps / 1e6,
    }


def _stretches_ns(spans: pd.DataFrame) -> float:
    """From the first start to the last end in each layer of each step."""
    by_layer = spans.groupby(["step", "layer"])
    return float((by_layer.end_ns.max() - by_layer.start_ns.min()).sum())


def _costs(prepared: Prepared) -> Facts:
    """Times of one expert and one token in ms."""
    expert, step = prepared.costs.experts[0], prepared.costs.step(1, (1,))
    return {
        "copy_ms": expert.copy_ns / 1e6,
        "cpu_expert_ms": expert.cpu_ns[1] / 1e6,
        "exchange_ms": (step.activations_ns + step.result_ns) / 1e6,
    }


def _prompt_j(run: Run) -> float | None:
    """Joules of the prompt, of the whole platform; None where its watts are not known."""
    ttft_ms, power = run.metrics.ttft_ms, run.power
    if power is None or power.platform_w is None or not ttft_ms:
        return None
    spans = run.spans[run.spans.phase == "prefill"]
    works = [spans[spans.lane == device] for device in (Device.GPU, Device.CPU)]
    gpu_share, cpu_share = (float((each.end_ns - each.start_ns).sum()) / 1e6 / ttft_ms for each in works)
    return watts(power, gpu_share, cpu_share) * ttft_ms / 1e3


def _last_hits_max(prepared: Prepared, spans: pd.DataFrame) -> float | None:
    """Hit rate of the layer with most hits in the last ``LAST`` steps; None where the answer was not played whole."""
    steps = [step.index for step in prepared.demand if step.phase == "decode"]
    if len(steps) < max(LAST, prepared.answer_tokens):
        return None
    layers = layer_frame(spans)
    sums = layers[layers.step.isin(steps[-LAST:])].groupby("layer")[["hits", "active"]].sum()
    return float((sums.hits / sums.active).max())


# --- forecasts --------------------------------------------------------------------------------------------------------


def _forecasts(prepared: Prepared) -> dict[str, float | None]:
    """How often the experts with most forecast tokens are those with most tokens, in decode, and the mean recall of a
    token's experts."""
    hits: dict[int, list[float]] = {1: [], 2: []}
    prefetcher = prepared.composition.prefetcher
    profile = prefetcher.profile if isinstance(prefetcher, ProfilePrefetcher) else None
    for step in (step for step in prepared.demand if step.phase == "decode"):
        for layer in range(1, len(step.routings)):
            guess = _guess(step, layer, profile)
            if guess is not None:
                for top, found in hits.items():
                    found.append(len(set(guess[:top]) & set(_busiest(step.routings[layer])[:top])) / top)
    return {f"top{top}_accuracy": fmean(found) if found else None for top, found in hits.items()} | {
        "recall": _recall(prepared.demand)
    }


def _guess(step: StepDemand, layer: int, profile: ActivationProfile | None) -> Sequence[int] | None:
    """Experts of a layer by descending forecast, or the two that a profile expects to be busiest."""
    if profile is not None:
        earlier = step.routings[layer - 2].token_ids if layer > 1 else None
        expected = profile.workloads(layer, step.routings[layer - 1].token_ids, earlier)
        return [int(expert) for expert in np.argsort(-expected, kind="stable")[:2]]
    made = _next_layers(step.forecasts[layer - 1], layer) if any(step.forecasts) else None
    return made and made.active


def _next_layers(forecasts: Iterable[Forecast], layer: int) -> Forecast | None:
    return next((forecast for forecast in forecasts if forecast.layer == layer), None)


def _busiest(routing: Routing) -> list[int]:
    return [expert for _, expert in sorted(zip((-n for n in routing.tokens), routing.active, strict=True))]


def _recall(demand: Sequence[StepDemand]) -> float | None:
    """Share of tokens that are forecast where they go, by expert."""
    found = total = 0
    for step in demand:
        for layer, routing in enumerate(step.routings):
            made = _next_layers(step.forecasts[layer - 1], layer) if layer and step.phase == "decode" else None
            if made is not None:
                forecast = dict(zip(made.active, made.tokens, strict=True))
                found += sum(min(n, forecast.get(e, 0)) for e, n in zip(routing.active, routing.tokens, strict=True))
                total += sum(routing.tokens)
    return found / total if total else None


def _phase_likeness(prepared: Prepared) -> float | None:
    """Cosine of the experts' tokens in prompt and answer, mean over layers."""
    counts = {phase: np.zeros((prepared.shape.moe_layers, prepared.shape.experts)) for phase in ("prefill", "decode")}
    for step in prepared.demand:
        for layer, routing in enumerate(step.routings):
            counts[step.phase][layer, list(routing.active)] += routing.tokens
    prompt, answer = counts["prefill"], counts["decode"]
    norms = np.linalg.norm(prompt, axis=1) * np.linalg.norm(answer, axis=1)
    return float(np.mean((prompt * answer).sum(axis=1) / norms)) if norms.all() else None


# --- SMoE's top-score experts: what is loaded, and how well they are forecast -----------------------------------------


def _top_scores(prepared: Prepared, spans: pd.DataFrame) -> dict[str, float | None]:
    """Shares of loads that are of low-score and of top-score experts; the share of those forecast as top-score that
    are, and that of the others which are active. In decode, for policies that read tokens and scores; else nothing."""
    if not (prepared.needs.tokens and prepared.needs.scores):
        return {}
    alpha = float(prepared.scenario.parameters.get("alpha") or _ALPHA)
    steps = [step for step in prepared.demand if step.phase == "decode"]
    tops = {(s.index, layer): _tops(s, layer, alpha) for s in steps for layer in range(len(s.routings))}
    return {**_loads(spans, tops), **_accuracy(steps, tops, alpha)}


def _tops(step: StepDemand, layer: int, alpha: float) -> set[int]:
    """Selected experts with a score above (1 + alpha) times the highest not selected, of any token."""
    assert step.scores is not None
    found: set[int] = set()
    for ids, own in zip(step.routings[layer].token_ids, step.scores[:, layer], strict=True):
        bound = (1 + alpha) * np.delete(own, list(ids)).max()
        found.update(expert for expert in ids if own[expert] > bound)
    return found


def _loads(spans: pd.DataFrame, tops: dict[tuple[int, int], set[int]]) -> dict[str, float | None]:
    mine = spans[(spans.kind == "demand") & (spans.phase == "decode")]
    loads = zip(mine.step, mine.layer, mine.expert, strict=True)
    is_top = [expert in tops[step, layer] for step, layer, expert in loads]
    share = float(np.mean(is_top)) if is_top else None
    return {"top_score_loads": share, "low_score_loads": None if share is None else 1 - share}


def _accuracy(steps: Sequence[StepDemand], tops: dict[tuple[int, int], set[int]], alpha: float) -> dict[str, Any]:
    right: list[bool] = []
    others_active: list[bool] = []
    for step in steps:
        for forecast in (one for made in step.forecasts for one in made if one.kind == "partial"):
            active = set(step.routings[forecast.layer].active)
            for expert in _forecast_tops(forecast.token_ids, forecast.token_scores, step, alpha):
                right.append(expert in tops[step.index, forecast.layer])
                if not right[-1]:
                    others_active.append(expert in active)
    return {"top_score_accuracy": _mean(right), "top_score_active": _mean(others_active)}


def _forecast_tops(
    ids: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], step: StepDemand, alpha: float
) -> set[int]:
    """The forecast's top-score experts of any token."""
    k = len(step.routings[0].token_ids[0])
    return {
        expert
        for some, own in zip(ids, scores, strict=True)
        for expert, score in zip(some[:k], own, strict=False)
        if score > (1 + alpha) * own[k]
    }


def _mean(values: Sequence[bool]) -> float | None:
    return float(np.mean(values)) if values else None
