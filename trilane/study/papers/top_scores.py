"""Facts about SMoE's top-score experts: what is loaded, and how well they are forecast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from sim.runs.demand import StepDemand
from sim.runs.prepare import Prepared
from sim.runs.vocabulary import SpanKind

ALPHA = 0.25  # of Qwen2 (Section VI-B), whose loads Table I shows; policies with another one are asked with theirs


def top_score_facts(prepared: Prepared, spans: pd.DataFrame) -> dict[str, float | None]:
    """Shares of loads that are of low-score and of top-score experts; the share of those forecast as top-score that
    are, and that of the others which are active. In decode, for policies that read tokens and scores; else nothing."""
    if not (prepared.needs.tokens and prepared.needs.scores):
        return {}
    alpha = float(prepared.scenario.parameters.get("alpha") or ALPHA)
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
    mine = spans[(spans.kind == SpanKind.DEMAND) & (spans.phase == "decode")]
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
