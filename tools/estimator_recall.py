"""How many of a token's next experts a forecast finds: recall@k by layer, of the estimator and of the router itself."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from traces.capture.estimator import Estimator
from traces.capture.layers import MoeLayer
from traces.capture.record import LayerRecord
from traces.capture.router_forecast import run_router


class Recall:
    """Sums over tokens: of the ``top_k`` experts that each is routed to in layer l + 1, how many were forecast at l."""

    def __init__(self, top_k: int) -> None:
        self._top_k, self._tokens = top_k, 0
        self._found: dict[str, list[int]] = {}

    def add(
        self, layers: list[MoeLayer], records: list[LayerRecord], guesses: Mapping[str, Tensor],
        estimator: Estimator | None,
    ) -> None:  # fmt: skip
        """Take in one pass with ``guesses`` [L-1, N, H] at the next gates' input, by forecast."""
        self._tokens += len(records[0].gate_input)
        for at, (layer, record) in enumerate(zip(layers[1:], records[1:], strict=True)):
            for kind, guess in guesses.items():
                self._note(kind, at, record, self._routed(layer, record, guess[at].to(record.gate_input)))
            if estimator:
                best = estimator(guesses["quasi_hidden@1"][at].float(), at).topk(self._top_k, -1).indices
                self._note("estimator@1", at, record, best)

    def by_layer(self) -> dict[str, list[float]]:
        """Recall in 0..1 by kind, for every source layer 0..L-2."""
        return {kind: [n / (self._tokens * self._top_k) for n in found] for kind, found in self._found.items()}

    def _routed(self, layer: MoeLayer, record: LayerRecord, hidden: Tensor) -> Tensor:
        logits, chosen = run_router(layer, record, hidden)
        return logits.topk(self._top_k, -1).indices if chosen is None else chosen

    def _note(self, kind: str, at: int, record: LayerRecord, guessed: Tensor) -> None:
        assert record.ids is not None
        found = self._found.setdefault(kind, [])
        found.extend([0] * (at + 1 - len(found)))
        found[at] += int((guessed.unsqueeze(-1) == record.ids.unsqueeze(-2)).any(-1).sum())


def table(recall: Recall) -> str:
    """One line a layer, and their mean."""
    kinds = recall.by_layer()
    rows = [(str(at), *values) for at, values in enumerate(zip(*kinds.values(), strict=True))]
    rows.append(("mean", *(sum(values) / len(values) for values in kinds.values())))
    head = "layer" + "".join(f"{kind:>16}" for kind in kinds)
    return "\n".join([head, *(f"{name:>5}" + "".join(f"{value:>16.1%}" for value in row) for name, *row in rows)])
