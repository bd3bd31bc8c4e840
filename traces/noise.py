"""Forecasts for traces that hold none: the true routing of a later layer, with errors of a stated rate.

No model made them. They show how a policy performs *if* forecasts are that good; results call them noisy forecasts and
state their recall.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.trace import Trace


class NoisyForecasts(NamedTuple):
    """``recalls[d - 1]`` is the recall@k of forecasts of the d-th layer ahead, 0 to 1; all of it follows from ``seed``.

    All kinds of one look-ahead have the same errors, so that policies that need different kinds can be compared.
    """

    recalls: tuple[float, ...]
    seed: int = 0

    def __str__(self) -> str:
        return f"noisy forecasts (recall {', '.join(f'{recall:g}' for recall in self.recalls)})"

    def reach(self, lookahead: int) -> bool:
        """Whether a recall is given for this look-ahead."""
        return lookahead <= len(self.recalls)

    def ids(self, trace: Trace, rows: NDArray[np.intp], lookahead: int) -> NDArray[np.int16]:
        """The forecast of some rows; see ``noisy_ids``."""
        return noisy_ids(trace, rows, lookahead, self.recalls[lookahead - 1], self.seed)


def noisy_ids(
    trace: Trace, rows: NDArray[np.intp], lookahead: int, recall: float, seed: int
) -> NDArray[np.int16]:
    """[rows, L, m], m = min(2k, E): made at layer l for layer l + lookahead, -1 past the last layer.

    Each true expert keeps its place among the first k with probability ``recall``; otherwise a random other expert
    takes it. The places after k go to further random experts, and to missed true experts only when no other is left
    (so the first k cannot miss all of them where E < 2k). The forecast of a row does not depend on the other ``rows``.
    """
    shape = trace.shape
    made = max(shape.moe_layers - lookahead, 0)
    k, experts = shape.top_k, shape.experts
    ids = np.full((len(rows), shape.moe_layers, min(2 * k, experts)), -1, np.int16)
    if not made or not len(rows):
        return ids
    draws = np.stack([_draws(seed, lookahead, int(row), (made, experts + k)) for row in rows])
    hit = draws[..., experts:] < recall
    true = np.asarray(trace.topk_ids[rows, lookahead:], np.intp)
    # Free places are filled by other experts in random order, then by missed true experts; hits keep their places.
    order = draws[..., :experts].copy()
    np.put_along_axis(order, true, np.where(hit, 2 * k, 1) + np.arange(k), axis=-1)
    taken = np.zeros(order.shape, np.bool_)
    taken[..., :k] = hit
    ranked = np.empty(order.shape, np.int16)
    np.put_along_axis(ranked, np.argsort(taken, axis=-1, kind="stable"), np.argsort(order, axis=-1), axis=-1)
    ids[:, :made] = ranked[..., : ids.shape[-1]]
    return ids


def _draws(seed: int, lookahead: int, row: int, size: tuple[int, int]) -> NDArray[np.float64]:
    """Numbers of one row: [layers, experts] for the order of the others, then [layers, k] for hit or miss."""
    return np.random.default_rng((seed % 2**32, lookahead, row)).random(size)
