"""Router outputs as probabilities; the function of a family's gate is determined from a pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from traces.capture.record import LayerRecord

# How logits [N, E] become what the chosen weights are proportional to.
RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
}
TOLERANCE = 0.02  # bfloat16 weights are within 0.4 %; the wrong function is off by much more


def scoring_rule(records: list[LayerRecord]) -> tuple[str, bool]:
    """(name in RULES, certain): the function under which the weights of the first layer are proportional to scores.

    Where none fits (sparse mixers, capped or custom gates) it is softmax, and not certain.
    """
    record = records[0]
    assert record.ids is not None
    assert record.weights is not None
    kept = record.weights.sum(-1) != 0  # without tokens that skip the mixture
    logits, ids, weights = record.logits[kept].float(), record.ids[kept], record.weights[kept].float()
    misfits = {name: _misfit(name, logits, ids, weights) for name in RULES}
    best = min(misfits, key=lambda name: misfits[name])
    return (best, True) if misfits[best] <= TOLERANCE else ("softmax", False)


def probabilities(logits: Tensor, rule: str) -> Tensor:
    """Router probabilities [N, E] in float32."""
    return RULES[rule](logits.float())


def _misfit(rule: str, logits: Tensor, ids: Tensor, weights: Tensor) -> float:
    """Largest relative deviation of weight / score within a token (or, with one expert a token, between tokens)."""
    if rule == "identity" and not bool(((logits >= 0) & (logits <= 1)).all()):
        return float("inf")
    ratio = weights / RULES[rule](logits).gather(1, ids).clamp_min(1e-30)
    mean = ratio.mean(1, keepdim=True) if ids.shape[1] > 1 else ratio.mean()
    return float((ratio / mean - 1).abs().max().nan_to_num(torch.inf))
