"""The same model under Hugging Face accelerate: whole modules come to the GPU when they are called, and leave again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from realrun.machine.host_lanes import HostLanes
from traces.capture.layers import find_moe_layers

Place = str | int
Arena = dict[tuple[str, torch.Size], Tensor]  # of the one layer that has come: a weight's name and shape


class Split(NamedTuple):
    """Where each module is; how many layers' experts stay here, of how many; and what every pass brings, in bytes."""

    places: Mapping[str, Place]
    layers_here: int
    layers: int
    moved_bytes: int


def split(folder: Path, limit_bytes: int, here: Place, away: Place) -> Split:
    """Put ``here`` all but experts, and the experts of as many layers as the limit holds.

    Room is kept for one more layer's experts, as accelerate's own ``infer_auto_device_map`` does: those that are away
    come here, all of a layer's at once. Raises ValueError for a limit that does not hold even that.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    experts = {layer.experts for layer in find_moe_layers(model)}
    sizes = {name: bytes_of(module) for name, module in model.named_modules() if module in experts}
    room = limit_bytes - (bytes_of(model) - sum(sizes.values())) - max(sizes.values())
    if room < 0:
        raise ValueError(f"accelerate: the limit of {limit_bytes:,} bytes is {-room:,} too small for this model")
    fit = min(room // max(sizes.values()), len(sizes))
    places: dict[str, Place] = {name: here for name, module in model.named_modules() if _own(module)}
    places |= dict.fromkeys(list(sizes)[fit:], away)
    return Split(places, fit, len(sizes), sum(list(sizes.values())[fit:]))


def load(folder: Path, places: Mapping[str, Place], offload_folder: Path) -> Any:
    """The model with accelerate's hooks on it."""
    return AutoModelForCausalLM.from_pretrained(
        folder, device_map=dict(places), offload_folder=str(offload_folder), dtype=torch.bfloat16
    ).eval()


def bytes_of(module: nn.Module) -> int:
    """Of all its weights."""
    return sum(value.numel() * value.element_size() for value in module.parameters())


def send_over_link(model: Any, machine: HostLanes) -> None:
    """From now on, what accelerate fetches is in the host's memory and comes over the link of ``machine``.

    Without a GPU, accelerate offloads to disk alone, and computes in place in the file that it maps: nothing moves.
    Its hooks stay as they are; only the mapping that they read weights from is another.
    """
    arrived: Arena = {}
    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            if getattr(each, "offload", False) and each.weights_map is not None and _own(module):
                names = [name for name, _ in module.named_parameters(recurse=False)]
                each.weights_map = _OverLink({name: each.weights_map[name] for name in names}, machine, arrived)


class _OverLink(Mapping[str, Tensor]):
    """Weights that are copied, at the link's pace, whenever they are looked up: to memory that all layers share."""

    def __init__(self, weights: Mapping[str, Tensor], machine: HostLanes, arrived: Arena) -> None:
        self._weights = {name: weight.clone() for name, weight in weights.items()}
        self._machine, self._arrived = machine, arrived

    def __getitem__(self, name: str) -> Tensor:
        weight = self._weights[name]
        key = (name, weight.shape)
        if key not in self._arrived:
            self._arrived[key] = torch.zeros_like(weight)
        target = self._arrived[key]
        self._machine.paced_copy(_bytes(target), _bytes(weight))
        return target

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _bytes(weight: Tensor) -> Tensor:
    return weight.view(-1).view(torch.uint8)


def _own(module: nn.Module) -> bool:
    """Whether a module has weights of its own, not only in its parts."""
    return any(True for _ in [*module.parameters(recurse=False), *module.buffers(recurse=False)])
