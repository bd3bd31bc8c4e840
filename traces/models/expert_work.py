"""What the experts of a layer do in a step, if all of them are equally popular."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from traces.models.shape import ModelShape


@dataclass(frozen=True)
class ExpertWork:
    """What the experts of a layer do in a step, in the mean: how many are ``active``, with how many ``rows`` each."""

    active: float
    rows: float

    @classmethod
    def of(cls, shape: ModelShape, tokens: int) -> ExpertWork:
        """Of ``tokens`` that choose independently, if all experts are equally popular."""
        active = shape.experts * (1 - (1 - shape.top_k / shape.experts) ** tokens)
        return cls(active, max(tokens * shape.top_k / active, 1.0))

    @property
    def most_rows(self) -> int:
        """The next whole number of rows."""
        return math.ceil(self.rows)

    def ns(self, table: Sequence[int]) -> float:
        """Time of all active experts, by the time of one with each number of rows."""
        fewer = math.floor(self.rows)
        more_share = self.rows - fewer
        return self.active * ((1 - more_share) * table[fewer] + more_share * table[self.most_rows])
