"""The estimator of the next layer's router (Speculating Experts, Est-PF): one small network for all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional


class Estimator(nn.Module):
    """z = W_in q + b + pos[l];  y = z + W2 SiLU(W1 z);  logits of layer l + 1 = W_out LayerNorm(y).

    ``layers`` are the L - 1 source layers, ``hidden`` is H, ``experts`` E; ``width`` is the latent's, ``mlp`` the
    perceptron's. The paper gives neither; its networks' sizes agree with mlp = 4 width, and are 1.3 to 1.8 times the
    parameters of all routers.
    """

    def __init__(self, layers: int, hidden: int, experts: int, width: int, mlp: int) -> None:
        super().__init__()
        self.enter = nn.Linear(hidden, width)
        self.position = nn.Parameter(torch.zeros(layers, width))
        self.up = nn.Linear(width, mlp, bias=False)
        self.down = nn.Linear(mlp, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Linear(width, experts, bias=False)

    def forward(self, quasi: Tensor, layer: int | slice) -> Tensor:
        """Logits [..., N, E] from quasi-hidden states [..., N, H] of one layer, or of a slice of them [l, N, H]."""
        place = self.position[layer]
        entered = self.enter(quasi) + (place if isinstance(layer, int) else place.unsqueeze(1))
        latent = entered + self.down(functional.silu(self.up(entered)))
        logits: Tensor = self.leave(self.norm(latent))
        return logits

    def tensors(self) -> dict[str, NDArray[Any]]:
        """The weights by name, float32, as a file of vectors keeps them."""
        return {name: value.detach().float().cpu().numpy() for name, value in self.state_dict().items()}


def estimator_from(tensors: Mapping[str, NDArray[Any]]) -> Estimator:
    """The network with the weights of ``Estimator.tensors``; its sizes are theirs."""
    width, hidden = tensors["enter.weight"].shape
    layers, experts, mlp = len(tensors["position"]), len(tensors["leave.weight"]), len(tensors["up.weight"])
    network = Estimator(layers, hidden, experts, width, mlp)
    network.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in tensors.items()})
    return network.train(False)
