"""How often rounding changes the likeliest token: our run compared with the library's own, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from realrun.generation.generate import Pick, generate_hosted
from realrun.generation.hosted_model import HostedModel
from realrun.generation.preparation import GenerateRequest, tokens_of
from realrun.machine.lanes import Machine
from traces.capture.generate import Batch, Sampler
from traces.capture.generate import generate as library_passes


class ModelOutput(NamedTuple):
    """The output of a model: ``tokens`` [B, steps], chosen from ``logits`` [steps, B, V]."""

    tokens: Tensor
    logits: Tensor


class Flips(NamedTuple):
    """The share of ``compared`` distributions whose likeliest token differs, and the largest difference of a logit."""

    compared: int
    flipped_share: float
    largest_difference: float


def said_by_library(model: Any, prompts: Tensor, generated_tokens: int, implementation: str = "eager") -> ModelOutput:
    """The library's own greedy run over ``prompts`` [B, P], with one of its experts implementations."""
    model.set_experts_implementation(implementation)
    pick = _Listener(Sampler(0, 0.0))
    with torch.inference_mode():
        for _ in library_passes(model, Batch(tuple(range(len(prompts))), prompts), generated_tokens, pick):  # type: ignore[arg-type]
            pass
    return pick.said()


def said_by_ours(
    model: HostedModel, request: GenerateRequest, machine: Machine, teacher: Tensor | None = None
) -> ModelOutput:
    """Our own run; with a ``teacher`` [B, steps], its tokens are fed to the model instead of the likeliest ones."""
    pick = _Listener(Sampler(0, 0.0) if teacher is None else _taught(teacher))
    generate_hosted(model, request, machine, pick)
    return pick.said()


def flips(ours: Tensor, theirs: Tensor) -> Flips:
    """Compare logits [steps, B, V] after the same tokens."""
    differ = ours.argmax(-1) != theirs.argmax(-1)
    return Flips(differ.numel(), float(differ.float().mean()), float((ours.float() - theirs.float()).abs().max()))


def flips_against_library(library: Any, model: HostedModel, request: GenerateRequest, machine: Machine) -> Flips:
    """Compare with ``library``, the same model unmodified, in its eager implementation, on the tokens it generates."""
    theirs = said_by_library(library, tokens_of(request, model.loaded.tokenizer), request.generated_tokens)
    return flips(said_by_ours(model, request, machine, theirs.tokens).logits, theirs.logits)


class _Listener:
    """Records the logits and choices of a ``pick``."""

    def __init__(self, pick: Pick) -> None:
        self._pick = pick
        self._logits: list[Tensor] = []
        self._tokens: list[Tensor] = []

    def __call__(self, logits: Tensor, sequences: Sequence[int], step: int) -> Tensor:
        self._logits.append(logits.detach().cpu().clone())
        chosen = self._pick(logits, sequences, step)
        self._tokens.append(chosen.cpu())
        return chosen

    def said(self) -> ModelOutput:
        return ModelOutput(torch.cat(self._tokens, 1), torch.stack(self._logits))


def _taught(teacher: Tensor) -> Pick:
    return lambda logits, _sequences, step: teacher[:, step : step + 1].to(logits.device)
