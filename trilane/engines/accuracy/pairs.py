"""A/B pairs: measured rows of one machine that differ in one setting, and how far predictions follow the change.

Whoever chooses between two settings asks which is faster, and by how much; an error that both share does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

from trilane.engines.accuracy.errors import QUANTITIES, Predictions, Quantity, Speeds, measured
from trilane.engines.accuracy.measured_rows import MeasuredRow

MOVED = 0.03  # a smaller change of a measured speed may be noise
_BOTH = ("engine", "weights", "cpu_layers", "gpu_experts", "threads", "repacked", "kv_bits", "copies", "numa", "sm")
SETTINGS: Mapping[Quantity, tuple[str, ...]] = {  # columns that matter to a speed
    "decode": (*_BOTH, "depth_tokens", "generated_tokens"),
    "prompts": (*_BOTH, "piece_tokens", "prompt_tokens", "prompt_depth_tokens"),
}
_LENGTHS = ("generated_tokens", "prompt_tokens")  # of other work: a pair in which they differ compares no settings


class Pair(NamedTuple):
    """Two rows, the slower one first, by the columns' one difference. Gains: speed over speed, less 1."""

    quantity: Quantity
    setting: str
    slower: MeasuredRow
    faster: MeasuredRow
    measured_gain: float
    predicted_gain: float

    @property
    def right(self) -> bool:
        """True if the faster one is predicted to be that."""
        return self.predicted_gain > 0

    @property
    def followed(self) -> float:
        """Predicted ratio of the speeds over the measured one; below 1 where the gain is understated."""
        return (1 + self.predicted_gain) / (1 + self.measured_gain)


class SettingScore(NamedTuple):
    """Pairs by what sets them apart. ``right``: those of the right direction; ``followed``: median of the pairs."""

    quantity: Quantity
    setting: str
    pairs: int
    machines: int
    right: int
    followed: float


def setting_scores(rows: Sequence[MeasuredRow], predictions: Predictions) -> list[SettingScore]:
    """Scores of each setting, in the order of the columns."""
    groups: dict[tuple[Quantity, str], list[Pair]] = {(of, name): [] for of in QUANTITIES for name in SETTINGS[of]}
    for pair in pairs_of(rows, predictions):
        groups[pair.quantity, pair.setting].append(pair)
    return [
        SettingScore(
            quantity, name, len(pairs), len({pair.faster.machine for pair in pairs}),
            sum(pair.right for pair in pairs), median(pair.followed for pair in pairs),
        )
        for (quantity, name), pairs in groups.items() if pairs
    ]


def pairs_of(rows: Sequence[MeasuredRow], predictions: Predictions) -> Iterator[Pair]:
    """Yield pairs of one machine, model and source with one difference, whose measured speeds differ enough."""
    alike: dict[tuple[str, str, str], list[MeasuredRow]] = {}
    for row in rows:
        alike.setdefault((row.machine, row.model, row.source), []).append(row)
    for members in alike.values():
        for one, other in combinations(members, 2):
            for quantity in QUANTITIES:
                if (pair := _pair(quantity, one, other, predictions)) is not None:
                    yield pair


def _pair(quantity: Quantity, one: MeasuredRow, other: MeasuredRow, predictions: Predictions) -> Pair | None:
    """The pair; None if the rows differ in more or nothing, have no such speeds, or none that differ enough,
    or one is put in."""
    speeds = [measured(row).of(quantity) for row in (one, other)]
    predicted = [predictions.get(row.id, Speeds()).of(quantity) for row in (one, other)]
    differences = [name for name in SETTINGS[quantity] if getattr(one, name) != getattr(other, name)]
    if len(differences) != 1 or differences[0] in _LENGTHS or one.sets(quantity) or other.sets(quantity):
        return None
    match speeds, predicted:
        case [float(a), float(b)], [float(p), float(q)] if max(a, b) > (1 + MOVED) * min(a, b):
            slower, faster = (one, other) if a < b else (other, one)
            gains = (b / a, q / p) if a < b else (a / b, p / q)
            return Pair(quantity, differences[0], slower, faster, gains[0] - 1, gains[1] - 1)
    return None
