"""SMoE's cache (Section IV-B, Eq. 3): who had the lowest mean score lately leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

from policies.mechanism.views import ExpertId, LayerView
from policies.parts.caches import DemandCache


class ScoreWindowCache(DemandCache):
    """Evicts the member whose mean score over the layer's last ``window`` steps is lowest; ties to the lower id.

    Every expert's score counts, active or not. A step of several tokens counts their mean score (ours). Eq. 3 adds up
    n + 1 steps where the text says n: here n, which is not published (16, ours). The paper's *shield*, which keeps
    whoever the layer at work uses, is the session's pin: it holds from the moment the routing is known until the layer
    ends. Needs scores.
    """

    def __init__(self, layers: int, experts: int, window: int = 16) -> None:
        self._recent = [deque([[0.0] * experts] * window, maxlen=window) for _ in range(layers)]
        self._sums = [[0.0] * experts for _ in range(layers)]
        self._steps = [0] * layers  # in the window
        self._groups: dict[int, set[ExpertId]] = {}

    def observe(self, view: LayerView) -> None:
        """Move the layer's window on by one step."""
        assert view.scores is not None
        layer, tokens = view.layer, len(view.scores)
        new = view.scores[0] if tokens == 1 else [sum(column) / tokens for column in zip(*view.scores, strict=True)]
        recent = self._recent[layer]
        self._sums[layer] = [
            total + score - past for total, score, past in zip(self._sums[layer], new, recent[0], strict=True)
        ]
        recent.append(list(new))
        self._steps[layer] = min(self._steps[layer] + 1, len(recent))

    def admitted(self, id: ExpertId, group: int) -> None:
        """A new member."""
        self._groups.setdefault(group, set()).add(id)

    def evicted(self, id: ExpertId, group: int) -> None:
        """Gone; its scores go on being counted."""
        self._groups[group].remove(id)

    def victim(self, incoming: ExpertId, group: int, blocked: Container[ExpertId]) -> ExpertId | None:
        """The member of lowest mean score that is not blocked."""
        sums, steps = self._sums, self._steps
        free = [
            (sums[id.layer][id.expert] / (steps[id.layer] or 1), id)
            for id in self._groups.get(group, ())
            if id not in blocked
        ]
        return min(free)[1] if free else None
