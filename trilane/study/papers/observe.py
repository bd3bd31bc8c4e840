"""One play, and the facts of it that papers' quantities are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
import pandas as pd

from policies.mechanism.views import Forecast, Routing
from policies.papers.edgemoe import ActivationProfile, ProfilePrefetcher
from sim.runs.demand import StepDemand
from sim.runs.hits import layer_frame
from sim.runs.prepare import Prepared
from sim.runs.run import Run, watts
from sim.runs.vocabulary import Device, SpanKind
from sim.simulate import play
from trilane.study.papers.quantities import Facts
from trilane.study.papers.top_scores import top_score_facts

_OF_RUNS = (
    "tpot_ms", "ttft_ms", "decode_resident_hit_rate", "h2d_busy_share", "gpu_busy_share", "cpu_busy_share",
    "plan_overhead_share", "prefetch_accuracy", "energy_j_per_token",
)  # fmt: skip
FACTS = (
    *_OF_RUNS, "generated_tokens", "layer_ms", "expert_ms", "expert_cpu_ms", "expert_gpu_ms", "copy_ms",
    "cpu_expert_ms", "exchange_ms", "top1_accuracy", "top2_accuracy", "recall", "phase_likeness", "low_score_loads",
    "top_score_loads", "top_score_accuracy", "top_score_active", "stall_h2d_share", "prompt_j",
    "served_hit_rate", "last_hits_max",
)  # fmt: skip
LAST = 8  # tokens that DALI's Fig. 18d takes together


def observed(prepared: Prepared) -> Facts:
    """Play it. Facts that it does not have are left out. Raises what ``sim.simulate.play`` raises."""
    run = play(prepared)
    row = run.to_dict()
    facts = {name: row.get(name) for name in _OF_RUNS}
    facts |= {"generated_tokens": prepared.answer_tokens, "layer_ms": run.metrics.tpot_ms}
    facts |= {**_expert_times(run), **_costs(prepared), **_forecasts(prepared)}
    if tops := top_score_facts(prepared, run.spans):
        facts |= {**tops, "stall_h2d_share": row["stall_h2d_share"], "served_hit_rate": row["decode_served_hit_rate"]}
    facts |= {"phase_likeness": _phase_likeness(prepared), "prompt_j": _prompt_j(run)}
    facts |= {"last_hits_max": _last_hits_max(prepared, run.spans)}
    if run.metrics.tpot_ms is not None:
        facts["layer_ms"] = run.metrics.tpot_ms / prepared.shape.moe_layers
    return {name: float(value) for name, value in facts.items() if value is not None and np.isfinite(value)}


# --- times ------------------------------------------------------------------------------------------------------------


def _expert_times(run: Run) -> Facts:
    """Of a decode step, ms: the experts' part of all layers, as long as anything of it lasts; CPU experts, one after
    the other; and loads and GPU experts, from the first to the last of a layer."""
    spans = run.spans[(run.spans.phase == "decode") & (run.spans.layer >= 0)]
    experts = spans[spans.kind.isin([SpanKind.EXPERT, SpanKind.DEMAND])]
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
    """Of one expert and one token, ms."""
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
    """Of forecasts and routings by expert: tokens that are forecast where they go, of all."""
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
