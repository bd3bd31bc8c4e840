"""A cache by profile that follows the text: every few steps the most useful absent experts change places with the least
useful residents of their layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from heapq import nsmallest

from policies.mechanism.views import ExpertId, LayerView, Swap
from policies.parts.caches import StaticCache
from policies.protocols import When


class AdaptiveTier(StaticCache):
    """Swaps within layers, the best of all layers first; loads pass through staging.

    The use of an expert is the number of its tokens in decode steps, times ``decay`` after every round. After every
    ``every`` decode steps each layer pairs its absent experts of a use of ``least`` or more, the most used first, with
    its residents, the least used first, as long as the one exceeds the other by ``margin``; the ``most`` pairs of all
    layers with the largest differences are swapped (ties: the lower layer, then the more used expert, then the lower
    number). What a layer's last round has left in the queue is replaced.
    """

    def __init__(self, every: int, most: int, decay: float, least: float, margin: float) -> None:
        self._every, self._most, self._decay, self._least, self._margin = every, most, decay, least, margin
        self._use: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))  # by layer
        self._steps = 0

    def observe(self, view: LayerView) -> None:
        """Count the tokens of every active expert."""
        if view.phase == "decode":
            use = self._use[view.layer]
            for expert, tokens in zip(view.routing.active, view.routing.tokens, strict=True):
                use[expert] += tokens

    def swaps(self, view: LayerView, when: When) -> Sequence[Swap]:
        """A round, at the end of the last of some decode steps."""
        if when != "step_end" or view.phase != "decode":
            return ()
        self._steps += 1
        if self._steps % self._every:
            return ()
        resident = view.residency.resident
        pairs = [pair for layer in sorted(self._use) for pair in self._pairs(layer, resident[layer])]
        best = sorted(pairs, key=lambda pair: -pair[0])[: self._most]
        for use in self._use.values():
            for expert in use:
                use[expert] *= self._decay
        return [swap for _, swap in best]

    def _pairs(self, layer: int, resident: Collection[int]) -> list[tuple[float, Swap]]:
        """A layer's swaps that are worth it, with the differences in use."""
        use = self._use[layer]
        wanted = [expert for expert, count in use.items() if count >= self._least and expert not in resident]
        count = min(len(wanted), len(resident), self._most)
        incoming = nsmallest(count, wanted, key=lambda expert: (-use[expert], expert))
        outgoing = nsmallest(count, resident, key=lambda expert: (use.get(expert, 0.0), expert))
        gains = [(use[new] - use.get(old, 0.0), new, old) for new, old in zip(incoming, outgoing, strict=True)]
        return [
            (gain, Swap(ExpertId(layer, new), ExpertId(layer, old))) for gain, new, old in gains if gain >= self._margin
        ]
