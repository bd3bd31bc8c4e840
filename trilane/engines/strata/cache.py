"""Hit rates of Strata's cache of experts: ranked by a profile over all layers, then changed by swaps within layers.

They are those of synthetic routing, whose profile is counted on other texts than those that are answered, in windows of
several rows. Rejected rows have the experts of the tokens that follow. A request's text is neither that of the last
one, for which the cache was swapped, nor any other: half of each is taken, which was chosen after the open requests had
been seen. ``python -m tools.strata_hit_rates`` writes the rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from traces.layout import DECODE
from traces.library import load_trace
from traces.trace import Trace
from trilane.common.csv_files import read_csv
from trilane.common.errors import TrilaneError

RATES = Path(__file__).with_name("hit_rates.csv")
EVERY, SWAPS, DECAY = 4, 96, 0.7  # --adapt-every, -swaps, -decay
LEAST_USES, MARGIN = 2.0, 1.5  # of an expert that comes in; by which they exceed those of the one that leaves
SHARES = (0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9)  # of all experts
ROWS = (1, 2, 3, 4)
_MODEL = "qwen3.8-flash-next"
_ACCEPTED = 0.7  # of drafts, by which a window moves on
_TEXTS, _CALIBRATION = "3x8+300", "24x8+64"
_ANSWER = 200  # tokens that count
_Ids = npt.NDArray[np.int16]
_Ranking = npt.NDArray[np.intp]


class SwapTierRates(NamedTuple):
    """Shares of the entries of windows of so many rows that hit in a cache of ``share`` of all experts, which was
    swapped for another text, or for the first part of the same."""

    rows: int
    share: float
    other_text: float
    same_text: float
    swaps: float  # experts that change places every ``EVERY`` windows, in the mean over both

    @property
    def usual(self) -> float:
        """Half of each."""
        return (self.other_text + self.same_text) / 2


def hit_rate(share: float, rows: float, *, same_text: bool = False) -> float:
    """The rate with room for a share of all experts, with straight lines between shares and between rows.

    ``same_text``: the cache was swapped for it, as by a measurement that asks the same again.
    """
    return _between(share, rows, (lambda one: one.same_text) if same_text else (lambda one: one.usual), 1.0)


def swapped(share: float, rows: float) -> float:
    """Experts that change places every ``EVERY`` windows."""
    return _between(share, rows, lambda one: one.swaps, 0.0)


def _between(share: float, rows: float, of: Callable[[SwapTierRates], float], full: float) -> float:
    """A quantity that is 0 without room, and ``full`` with room for all."""
    by_rows = [[one for one in _rates() if one.rows == number] for number in ROWS]
    values = [
        float(np.interp(share, (0.0, *(one.share for one in known), 1.0), (0.0, *map(of, known), full)))
        for known in by_rows
    ]
    return float(np.interp(rows, ROWS, values))


@cache
def _rates() -> list[SwapTierRates]:
    return read_csv(SwapTierRates, RATES, "rates of hits", TrilaneError)


def simulated(shares: Iterable[float] = SHARES, rows: Iterable[int] = ROWS) -> Iterator[SwapTierRates]:
    """Yield the rates anew."""
    texts = load_trace(f"synthetic:{_MODEL}/{_TEXTS}")
    calibration = load_trace(f"synthetic:{_MODEL}-calibration/{_CALIBRATION}")
    ranking, answers = profile(calibration), _answers(texts)
    others = [text[:_ANSWER] for text in answers]
    same = [answers[0][:-_ANSWER], answers[0][-_ANSWER:]]
    experts, shares = texts.shape.experts, tuple(shares)
    for number in rows:
        for share in shares:
            asked = ranking, round(share * ranking.size), experts, number
            other, known = answered(others, *asked), answered(same, *asked)
            swaps = round(fmean((other.swaps, known.swaps)), 1)
            yield SwapTierRates(number, share, round(other.hits, 4), round(known.hits, 4), swaps)


def profile(trace: Trace) -> _Ranking:
    """All pairs of a layer and an expert, as layer x experts + expert, most used first."""
    layers, experts = trace.shape.moe_layers, trace.shape.experts
    pairs = trace.topk_ids.astype(np.intp) + (np.arange(layers) * experts)[:, None]
    return np.argsort(-np.bincount(pairs.ravel(), minlength=layers * experts), kind="stable")


def _answers(trace: Trace) -> list[_Ids]:
    """Expert ids of the decoded tokens of each text: tokens x layers x top-k."""
    return [
        trace.topk_ids[(trace.sequence == number) & (trace.phase == DECODE)] for number in np.unique(trace.sequence)
    ]


class Answered(NamedTuple):
    """``hits``: share of the entries of all answers but the first. ``swaps``: of all, every ``EVERY`` windows."""

    hits: float
    swaps: float


def answered(answers: Sequence[_Ids], ranking: _Ranking, slots: int, experts: int, rows: int) -> Answered:
    """A cache that the first answer fills."""
    layers = answers[0].shape[1]
    tier = ReplayedTier(ranking, slots, layers, experts)
    hits = total = 0
    for number, answer in enumerate(answers):
        step = round(1 + _ACCEPTED * (rows - 1))
        for first in range(0, len(answer), step):
            window = answer[first : first + rows]
            found = tier.window(window)
            hits, total = hits + found * (number > 0), total + window.size * (number > 0)
    return Answered(hits / total, tier.swaps * EVERY / tier.windows)


class ReplayedTier:
    """A cache whose slots were given to layers by a profile, and whose experts are swapped for others of their layer.

    Every ``EVERY`` windows a layer's unused experts may take the place of its least used ones; of all layers' swaps the
    ``SWAPS`` with the largest gain in uses are made, and all uses then count ``DECAY`` times as much.
    """

    def __init__(self, ranking: _Ranking, slots: int, layers: int, experts: int) -> None:
        self.resident = np.zeros((layers, experts), bool)
        self.resident.ravel()[ranking[:slots]] = True
        self.uses = np.zeros((layers, experts))
        self.windows = self.swaps = 0

    def window(self, ids: _Ids) -> int:
        """Look up a window's entries, rows x layers x top-k; return how many hit, and swap when it is time."""
        layers = np.broadcast_to(np.arange(ids.shape[1])[None, :, None], ids.shape)
        hits = int(self.resident[layers, ids].sum())
        np.add.at(self.uses, (layers, ids), 1.0)
        self.windows += 1
        if self.windows % EVERY == 0:
            self._swap()
            self.uses *= DECAY
        return hits

    def _swap(self) -> None:
        swaps = [swap for layer in range(len(self.uses)) for swap in self._swaps_of(layer)]
        for _, layer, comes, goes in sorted(swaps, key=lambda swap: -swap[0])[:SWAPS]:
            self.resident[layer, comes], self.resident[layer, goes] = True, False
            self.swaps += 1

    def _swaps_of(self, layer: int) -> list[tuple[float, int, int, int]]:
        """Swaps of a layer: gain, layer, the expert that comes, the one that goes."""
        uses, resident = self.uses[layer], self.resident[layer]
        come = np.flatnonzero(~resident & (uses >= LEAST_USES))
        come = come[np.argsort(-uses[come], kind="stable")]
        stay = np.flatnonzero(resident)
        go = stay[np.argsort(uses[stay], kind="stable")][: len(come)]
        pairs = zip(come[: len(go)].tolist(), go.tolist(), strict=True)
        gains = [(float(uses[one] - uses[other]), layer, one, other) for one, other in pairs]
        return [swap for swap in gains if swap[0] >= MARGIN]
