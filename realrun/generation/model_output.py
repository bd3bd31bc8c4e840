"""Tokens and logits of a generation, by our executor or by the library itself, to compare the two."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from realrun.generation.generate import generate_hosted
from realrun.generation.hosted_model import HostedModel
from realrun.generation.preparation import GenerateRequest
from realrun.machine.lanes import Machine
from traces.capture.passes import Batch, Pick, Sampler
from traces.capture.passes import generate as library_passes

GREEDY = Sampler(0, 0.0)


class ModelOutput(NamedTuple):
    """The output of a model: ``tokens`` [B, steps], chosen from ``logits`` [steps, B, V]."""

    tokens: Tensor
    logits: Tensor


def output_of_library(model: Any, prompts: Tensor, generated_tokens: int, implementation: str = "eager") -> ModelOutput:
    """The library's own greedy run over ``prompts`` [B, P], with one of its experts implementations."""
    model.set_experts_implementation(implementation)
    pick, batch = _Listener(GREEDY), Batch(tuple(range(len(prompts))), prompts)
    with torch.inference_mode():
        deque(library_passes(model, batch, generated_tokens, pick), maxlen=0)
    return pick.output()


def output_of_executor(
    model: HostedModel, request: GenerateRequest, machine: Machine, pick: Pick = GREEDY
) -> ModelOutput:
    """Our own run, with tokens chosen by ``pick``."""
    listener = _Listener(pick)
    generate_hosted(model, request, machine, listener)
    return listener.output()


class _Listener:
    """Records the logits and choices of a ``pick``."""

    def __init__(self, pick: Pick) -> None:
        self._pick = pick
        self._said: list[tuple[Tensor, Tensor]] = []

    def __call__(self, logits: Tensor, sequences: Sequence[int], step: int) -> Tensor:
        kept, chosen = logits.detach().cpu().clone(), self._pick(logits, sequences, step)
        self._said.append((chosen.cpu(), kept))
        return chosen

    def output(self) -> ModelOutput:
        tokens, logits = zip(*self._said, strict=True)
        return ModelOutput(torch.cat(tokens, 1), torch.stack(logits))
