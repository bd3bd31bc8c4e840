"""How often rounding changes the likeliest token: our run compared with the library's own, token by token."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from realrun.generation.generate import GenerateRequest, Pick, tokens_of
from realrun.generation.hosted_model import HostedModel
from realrun.machine.lanes import Machine
from realrun.smoke.generation_checks import output_of_executor, output_of_library


class Flips(NamedTuple):
    """The share of ``compared`` distributions whose likeliest token differs, and the largest difference of a logit."""

    compared: int
    flipped_share: float
    largest_difference: float


def flips(ours: Tensor, theirs: Tensor) -> Flips:
    """Compare logits [steps, B, V] after the same tokens."""
    differ = ours.argmax(-1) != theirs.argmax(-1)
    return Flips(differ.numel(), float(differ.float().mean()), float((ours.float() - theirs.float()).abs().max()))


def flips_against_library(library: Any, model: HostedModel, request: GenerateRequest, machine: Machine) -> Flips:
    """Compare with ``library``, the same model unmodified, in its eager implementation, on the tokens it generates."""
    theirs = output_of_library(library, tokens_of(request, model.loaded.tokenizer), request.generated_tokens)
    return flips(output_of_executor(model, request, machine, following(theirs.tokens)).logits, theirs.logits)


def following(tokens: Tensor) -> Pick:
    """The choice of ``tokens`` [B, steps], whatever the logits are."""
    return lambda logits, _sequences, step: tokens[:, step : step + 1].to(logits.device)
