"""Default vectors of experts, and quasi-hidden states (Speculating Experts, Sections 3.1 and 3.2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from traces.capture.residual_stream import ResidualStream


class DefaultVectorMean:
    """The mean raw output (before its weight) of every expert over the tokens that were routed to it."""

    def __init__(self, stream: ResidualStream) -> None:
        self._stream = stream
        first = stream.parts[0].mixture
        hidden = stream.recorder.layers[0].hidden
        self._sum = torch.zeros(len(stream.parts), first.experts_count, hidden, dtype=torch.float64)
        self._tokens = torch.zeros(self._sum.shape[:2], dtype=torch.float64)

    def add(self) -> None:
        """Add the pass that just ran."""
        for number in range(len(self._stream.parts)):
            self._stream.after(number, partial(self._note, number))

    def mean(self) -> Tensor:
        """[L, E, H] float32; zero for an expert that no token was routed to."""
        return (self._sum / self._tokens.clamp_min(1).unsqueeze(-1)).float()

    def _note(self, number: int, own: Callable[..., Tensor], hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        one = torch.ones_like(weights[:, :1])
        for chosen in ids.T:  # one expert per token and call, to separate the outputs
            raw = own(hidden, chosen.unsqueeze(1), one)
            self._sum[number].index_add_(0, chosen.cpu(), raw.double().cpu())
            self._tokens[number] += torch.bincount(chosen.cpu(), minlength=self._tokens.shape[1])
        return torch.zeros_like(hidden)


def quasi_hidden(stream: ResidualStream, vectors: Tensor, number: int) -> Tensor:
    """q_l [N, H] of layer ``number``, which is not the last: norm_(l+1)(r_l + sum of g_e * vectors[l][e]).

    ``vectors`` are default vectors [L, E, H]. The paper sums routed experts alone. Where there are shared ones,
    their true output is added: they run whatever is routed, and need no copy, so it is known by then. The norm is that
    of layer l+1, as in the released code (yalis, external/model.py): it feeds the router to be imitated.
    """

    def default(_own: Callable[..., Tensor], hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        mine = vectors[number].to(hidden.device)
        return (weights.float().unsqueeze(-1) * mine[ids]).sum(1).to(hidden.dtype)

    state = stream.after(number, default)
    quasi: Tensor = stream.parts[number + 1].mixture_norm.forward(state)
    return quasi.flatten(0, -2)
