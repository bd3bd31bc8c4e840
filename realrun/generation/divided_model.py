"""A model whose decoder layers are divided among GPUs: which has which module, and the modules on their devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from realrun.errors import RefusedError
from realrun.experts.checkpoint import move
from sim.runs.cards import LayerBlock
from traces.capture.layers import MoeLayer, stack_of


class Division(NamedTuple):
    """The ``decoders`` of each GPU, in order; ``after``: modules with weights that follow them, on the last GPU. All
    else is on the first."""

    decoders: list[list[nn.Module]]
    after: list[nn.Module]


def division_of(model: nn.Module, layers: Sequence[MoeLayer], blocks: Sequence[LayerBlock]) -> Division:
    """Divide a model as its MoE ``layers`` are; a layer without a mixture is on the GPU of the one before it.

    Raises RefusedError for a model whose layers are not a list of modules.
    """
    stack, places = stack_of(model, layers)
    if stack is None:
        raise RefusedError(
            f"{type(model).__name__}: expected decoder layers in a list of modules, found none; generate on one GPU"
        )
    decoders = list(model.get_submodule(stack).children())
    starts = [0, *(places[block.first] for block in blocks[1:]), len(decoders)]
    own = [decoders[first:end] for first, end in pairwise(starts)]
    return Division(own, list(_after(model, stack)))


def _after(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """The modules with weights that a model has after the one at ``path``: registered later, on any level around it."""
    owner = model
    for name in path.split("."):
        children = dict(owner.named_children())
        for later in list(children)[list(children).index(name) + 1 :]:
            if any(True for _ in children[later].parameters()):
                yield children[later]
        owner = children[name]


@contextmanager
def on_devices(division: Division, devices: Sequence[torch.device]) -> Iterator[None]:
    """Every GPU's modules on its device in the block; afterwards all are on the first one again."""
    with ExitStack() as stack:
        if len(set(devices)) > 1:
            stack.enter_context(_untied(division))
            for decoders, device in zip(division.decoders, devices, strict=True):
                _move_in(stack, decoders, device, devices[0])
            _move_in(stack, division.after, devices[-1], devices[0])
        yield


def _move_in(stack: ExitStack, modules: Sequence[nn.Module], device: torch.device, back: torch.device) -> None:
    for module in modules if device != back else ():
        stack.callback(move, module, back)
        move(module, device)


@contextmanager
def _untied(division: Division) -> Iterator[None]:
    """In the block, modules after the layers have copies of weights that they share with those before (the head's, of
    the embedding)."""
    shared = [
        (module, name, weight) for last in division.after for module in last.modules()
        for name, weight in module.named_parameters(recurse=False)
    ]
    for module, name, weight in shared:
        setattr(module, name, nn.Parameter(weight.detach().clone(), requires_grad=False))
    try:
        yield
    finally:
        for module, name, weight in shared:
            setattr(module, name, weight)
