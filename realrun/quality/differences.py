"""How what a model says under a policy differs from what it says with its own routing, token by token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realrun.quality.played_model import GivenText, Said


class Differences(NamedTuple):
    """Differences on one text, whose n tokens are given one by one: [1 + n], the first after the prompt.

    ``kl``: divergence of the next token's distribution under the policy from the exact one, in nats. ``agrees``: the
    likeliest token is the same. ``nats`` and ``exact_nats`` [n]: -log probability of the token that follows in the
    text. ``drift`` [1 + n, L]: share of a router's own choices that are other experts than in the exact run.
    """

    kl: NDArray[np.float64]
    agrees: NDArray[np.bool_]
    nats: NDArray[np.float64]
    exact_nats: NDArray[np.float64]
    drift: NDArray[np.float64]


def differences(exact: Said, said: Said, text: GivenText) -> Differences:
    """The differences of ``said`` from ``exact``, of one text."""
    true, other = (run.logits.double().log_softmax(-1) for run in (exact, said))
    following = torch.tensor(text.tokens[text.prompt_tokens :], dtype=torch.int64)
    same = (exact.ids.unsqueeze(-1) == said.ids.unsqueeze(-2)).any(-1).double().mean(-1)
    return Differences(
        (true.exp() * (true - other)).sum(-1).clamp_min(0).numpy(),
        (true.argmax(-1) == other.argmax(-1)).numpy(),
        _nats(other, following), _nats(true, following), (1 - same).numpy(),
    )


def _nats(log_shares: Tensor, following: Tensor) -> NDArray[np.float64]:
    chosen: NDArray[np.float64] = log_shares[:-1].gather(1, following.unsqueeze(1)).squeeze(1).neg().numpy()
    return chosen
