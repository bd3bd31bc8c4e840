"""Tokens and logits of a generation, by our executor or by the library itself, to compare the two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from realrun.generation.generate import Pick, generate_hosted
from realrun.generation.hosted_model import HostedModel
from realrun.generation.preparation import GenerateRequest
from realrun.machine.lanes import Machine
from traces.capture.generate import Batch, Sampler
from traces.capture.generate import generate as library_passes

GREEDY = Sampler(0, 0.0)


class ModelOutput(NamedTuple):
    """The output of a model: ``tokens`` [B, steps], chosen from ``logits`` [steps, B, V]."""

    tokens: Tensor
    logits: Tensor


def output_of_library(
    model: Any, prompts: Tensor, generated_tokens: int, implementation: str = "eager"
) -> ModelOutput:  # fmt: skip
    """The library's own greedy run over ``prompts`` [B, P], with one of its experts implementations."""
    model.set_experts_implementation(implementation)
    pick = _Listener(GREEDY)
    with torch.inference_mode():
        for _ in library_passes(model, Batch(tuple(range(len(prompts))), prompts), generated_tokens, pick):  # type: ignore[arg-type]
            pass
    return pick.output()


def output_of_executor(
    model: HostedModel, request: GenerateRequest, machine: Machine, pick: Pick = GREEDY
) -> ModelOutput:  # fmt: skip
    """Our own run, with tokens chosen by ``pick``."""
    listener = _Listener(pick)
    generate_hosted(model, request, machine, listener)
    return listener.output()


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

    def output(self) -> ModelOutput:
        return ModelOutput(torch.cat(self._tokens, 1), torch.stack(self._logits))
