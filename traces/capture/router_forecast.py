"""Forecasts of later layers' routing: a later layer's router applied to a guess of its input.

``gate@d``: the gate input of layer l as it is, for layer l+d (HybriMoE, DAOP). ``residual@1``: with the mean change to
layer l+1 added (DALI, eq. 10-11). ``quasi_hidden@1``: see ``forecasts``. ``partial@1``: see ``residual_stream``.
``estimator@1``: the quasi-hidden state again, ranked not by the router but by one small network for all layers
(Speculating Experts, Est-PF).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from traces.capture.layers import MoeLayer
from traces.capture.record import LayerRecord, find_ids, find_logits, probabilities
from traces.capture.settings import CaptureError
from traces.layout import ForecastKey
from trilane.common.quoting import quoted

KINDS = ("gate", "residual", "quasi_hidden", "partial", "estimator")
# (records of the pass that just ran, layer l) -> a guess [N, H] at the gate input of a later layer
Guess: TypeAlias = Callable[[list[LayerRecord], int], Tensor]
GATE_INPUT: Mapping[str, Guess] = {"gate": lambda records, layer: records[layer].gate_input}


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


@dataclass(frozen=True)
class RouterForecaster:
    """Makes forecasts of ``count`` (m) experts a token, by ``guesses`` of every kind that is in ``keys``."""

    layers: list[MoeLayer]
    keys: tuple[ForecastKey, ...]
    count: int
    rule: str
    guesses: Mapping[str, Guess]
    estimator: Estimator | None = None

    def rows(self, records: list[LayerRecord]) -> dict[str, NDArray[Any]]:
        """The forecast tensors of one pass, by name: ids, and scores where they are kept, [N, L, m]."""
        tensors = {}
        for key in self.keys:
            ids, scores = self._forecast(key, records)
            tensors[key.ids_name] = ids
            if has_scores(key):
                tensors[key.scores_name] = scores
        return tensors

    def _forecast(self, key: ForecastKey, records: list[LayerRecord]) -> tuple[NDArray[Any], NDArray[Any]]:
        shape = (len(records[0].gate_input), len(records), self.count)
        ids, scores = np.full(shape, -1, np.int16), np.zeros(shape, np.float16)
        for at in range(len(records) - key.lookahead):
            guess = self.guesses[key.kind](records, at)
            target = at + key.lookahead
            if key.kind == "estimator":
                assert self.estimator is not None
                values, best = self.estimator(guess.float(), at).softmax(-1).topk(self.count, dim=-1)
            else:
                best, values = self.rank(self.layers[target], records[target], guess)
            ids[:, at], scores[:, at] = best.cpu().numpy(), values.cpu().numpy()
        return ids, scores

    def rank(self, layer: MoeLayer, record: LayerRecord, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The ``count`` best experts [N, m]: those that the router chooses, then the most probable others."""
        logits, chosen = run_router(layer, record, hidden)
        scores = probabilities(logits, self.rule)
        order = scores.double()
        if chosen is not None:
            order = order.scatter_add(1, chosen, torch.full_like(order, 2.0)[:, : chosen.shape[1]])
        best = order.topk(self.count, dim=-1).indices
        # A correction bias may choose an expert less probable than another: scores never rise along the ranking.
        return best, scores.gather(1, best).cummin(-1).values


def run_router(layer: MoeLayer, record: LayerRecord, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits [N, E] and choices [N, k] of the layer's router on ``hidden`` [N, H], with the other arguments that it was
    called with. ``forward`` itself, so that hooks do not see the call.
    """
    output = layer.router.forward(
        hidden.unsqueeze(0) if record.batched else hidden, *record.extra_args, **record.extra_kwargs
    )
    return find_logits(output, layer.experts_count, layer.path), find_ids(output)


def check_forecastable(layers: list[MoeLayer], records: list[LayerRecord], prompt: list[int]) -> None:
    """Raise CaptureError if a router needs more than is available layers ahead: gate input, parameters, and the tokens
    that are read, here ``prompt``.
    """
    for layer, record in zip(layers, records, strict=True):
        own = {t.data_ptr() for t in (*layer.block.parameters(), *layer.block.buffers())}
        for value in (*record.extra_args, *record.extra_kwargs.values()):
            if isinstance(value, Tensor) and value.data_ptr() not in own and value.flatten().tolist() != prompt:
                raise CaptureError(
                    f"{layer.path}: its router needs {tuple(value.shape)} of the running pass besides its gate input, "
                    "which is not known a layer ahead; capture without forecasts (forecasts=())"
                )


def has_scores(key: ForecastKey) -> bool:
    """True if the scores of this forecast are recorded: for ``partial`` only, since SMoE compares them; scores of all
    kinds would double the file."""
    return key.kind == "partial"


def parse_forecasts(names: Sequence[str]) -> tuple[ForecastKey, ...]:
    """Keys of names such as ``gate@1``. Raises CaptureError on a kind or a lookahead that capture cannot make."""
    keys = []
    for name in names:
        kind, _, ahead = name.partition("@")
        if kind not in KINDS or not ahead.isdigit() or int(ahead) < 1 or (kind != "gate" and ahead != "1"):
            others = ", ".join(f"{kind}@1" for kind in KINDS[1:])
            raise CaptureError(f"forecast {quoted(name)}: expected gate@1, gate@2, ... or one of {others}")
        keys.append(ForecastKey(kind, int(ahead)))
    return tuple(dict.fromkeys(keys))
