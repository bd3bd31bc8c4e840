"""Traces to measure with: the bundled one, and two made from it by rearranging what was recorded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.runs.scenario import Scenario
from traces.file import write_trace
from traces.layout import DECODE, PREFILL, forecast_keys
from traces.library import load_trace
from traces.models.catalogue import load_model
from traces.trace import Trace

BUNDLED = "mini-deepseek"
SEED = 20_250
SETTING = "DeepSeek-V2-Lite (26 layers, 64 experts, top-6) on rtx3090-ddr4, cached share 0.3, 64 prompt + 64 generated"
BOOTSTRAP = (
    f"batches above 1: sequences made from {BUNDLED} by bootstrapping; each is the prompt and the decode rows of a "
    "sequence drawn from the trace, each rotated by a random number of tokens, whole rows at a time, so that routing, "
    "forecasts and the way from token to token stay as recorded"
)


def base_scenario(folder: Path, batch: int) -> Scenario:
    """The benchmark's question at ``batch``; a trace that has to be made is written to ``folder``."""
    scenario = Scenario(hardware="rtx3090-ddr4", cached_share=0.3, batch=batch)
    if batch == 1:
        return scenario
    path = folder / f"bootstrapped-{batch}.safetensors"
    if not path.exists():
        write_trace(bootstrapped(load_trace(BUNDLED), batch), path)
    return scenario.with_(trace=str(path), calibration=f"{BUNDLED}-calibration")


def wide_scenario(folder: Path) -> Scenario:
    """Nearly the same at batch 1 with 128 experts, top-8, a quarter of them cached: whole layers want room, too."""
    path, calibration = folder / "wide.safetensors", folder / "wide-calibration.safetensors"
    if not path.exists():
        write_trace(side_by_side(load_trace(BUNDLED), top_k=8), path)
        write_trace(side_by_side(load_trace(f"{BUNDLED}-calibration"), top_k=8), calibration)
    return Scenario(
        trace=str(path), model=None, hardware="rtx3090-ddr4", cached_share=0.25, calibration=str(calibration)
    )


def bootstrapped(trace: Trace, sequences: int) -> Trace:
    """``sequences`` sequences of the same statistics as the trace's (see ``BOOTSTRAP``)."""
    draw = np.random.default_rng(SEED)
    numbers = np.unique(trace.sequence)
    chosen = np.concatenate([draw.permutation(numbers) for _ in range(-(-sequences // len(numbers)))])[:sequences]
    rows = [
        np.roll(np.flatnonzero((trace.sequence == number) & (trace.phase == phase)), draw.integers(1 << 20))
        for number in chosen
        for phase in (PREFILL, DECODE)
    ]
    lengths = [len(prompt) + len(decode) for prompt, decode in zip(rows[::2], rows[1::2], strict=True)]
    tensors = {name: np.asarray(tensor)[np.concatenate(rows)] for name, tensor in trace.tensors().items()}
    tensors["sequence"] = np.repeat(np.arange(sequences, dtype=np.int32), lengths)
    tensors["position"] = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    return Trace.from_tensors(trace.shape, tensors, {"model": trace.shape.name, "synthetic": "bootstrapped"})


def side_by_side(trace: Trace, top_k: int, layers: int | None = None) -> Trace:
    """Twice the experts: each token is routed like two recorded ones, whose experts are numbered one after the other.

    Half of the ``top_k`` come from each. With more ``layers`` than recorded they begin again, and forecasts go.
    """
    experts, native = trace.shape.experts, trace.shape.moe_layers
    numbers = np.unique(trace.sequence)
    first = [np.flatnonzero(trace.sequence == number) for number in numbers]
    second = first[1:] + first[:1]
    length = min(map(len, first))  # pairs of equal length
    a, b = (np.concatenate([rows[:length] for rows in side]) for side in (first, second))
    where = np.arange(layers or native) % native
    tensors: dict[str, NDArray[Any]] = {name: getattr(trace, name)[a] for name in ("sequence", "position", "phase")}
    half = top_k // 2
    tensors["topk_ids"] = _interleave(trace.topk_ids[a][:, where, :half], trace.topk_ids[b][:, where, :half], experts)
    weights = np.concatenate([trace.topk_weights[rows][:, where, :half] / 2 for rows in (a, b)], axis=-1)
    tensors["topk_weights"] = -np.sort(-weights, axis=-1)
    if layers is None:
        for key in forecast_keys(trace.tensors()):
            ids, scores = trace.forecasts[key].ids, trace.forecasts[key].scores
            tensors[key.ids_name] = _interleave(ids[a], ids[b], experts)
            if scores is not None:
                best = np.concatenate([scores[a], scores[b]], axis=-1) / 2
                order = np.argsort(-best, axis=-1, kind="stable")
                both = np.concatenate([ids[a], np.where(ids[b] >= 0, ids[b] + experts, ids[b])], axis=-1)
                tensors[key.ids_name] = np.take_along_axis(both, order, axis=-1).astype(np.int16)
                tensors[key.scores_name] = np.take_along_axis(best, order, axis=-1)
        if trace.scores is not None:
            tensors["scores"] = np.concatenate([trace.scores[rows] / 2 for rows in (a, b)], axis=-1)
    model = load_model("deepseek-v2-lite")
    shape = replace(model, name="deepseek-v2-lite-wide", moe_layers=len(where), experts=2 * experts, top_k=top_k)
    return Trace.from_tensors(shape, tensors, {"model": shape.name, "synthetic": "side by side"})


def _interleave(first: NDArray[Any], second: NDArray[Any], experts: int) -> NDArray[Any]:
    """Expert ids of two tokens by rank; the second's are moved up by ``experts``, -1 stays."""
    moved = np.where(second >= 0, second + experts, second)
    return np.stack([first, moved], axis=-1).reshape(*first.shape[:-1], -1).astype(np.int16)
