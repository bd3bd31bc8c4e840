"""The steps of a run as it was played, and its answer: the windows of which metrics are taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from sim.runs.columns import Bools, Columns, Ints, columns_of
from sim.runs.hits import share
from sim.runs.sampling import Weights
from sim.runs.stalls import STALL_LANES, Gaps
from sim.runs.vocabulary import LANES

if TYPE_CHECKING:
    import pandas as pd

ByLane: TypeAlias = Mapping[str, float | None]


class Stretch(NamedTuple):
    """A part of a run, in ns, and how often it counts."""

    begin: int
    end: int
    weight: float


class PlayedSteps(NamedTuple):
    """The steps of a run in order. A step starts where the one before ended, the first at 0; times in ns."""

    step: Ints
    decode: Bools
    start: Ints
    end: Ints
    generated: Ints  # tokens of each sequence

    def windows(self, weights: Weights) -> list[Stretch]:
        """The decode steps that stand for themselves, and those that stand for more; either may be missing."""
        alone = self.step < weights.late_step
        parts = ((self.decode & alone, 1), (self.decode & ~alone, weights.later))
        return [
            Stretch(int(self.start[part][0]), int(self.end[part][-1]), weight) for part, weight in parts if part.any()
        ]


def played_steps(c: Columns) -> PlayedSteps:
    """Steps by their last wait."""
    waits = c.where(c.of("wait") & (c.layer == -1))
    start = np.concatenate([[0], waits.end[:-1]]).astype(np.int64)[: len(waits.end)]
    idle = c.step[c.of("routing") & (c.layer == -1) & (c.tokens == 0)]  # steps that choose no token
    return PlayedSteps(waits.step, waits.decode, start, waits.end, 1 + waits.tokens - np.isin(waits.step, idle))


def step_times(spans: pd.DataFrame) -> pd.DataFrame:
    """One row a step: step, phase, start_ms, end_ms. A step starts where the one before ended, the first at 0."""
    import pandas as pd

    steps = played_steps(columns_of(spans))
    phase = np.where(steps.decode, "decode", "prefill")
    return pd.DataFrame({"step": steps.step, "phase": phase, "start_ms": steps.start / 1e6, "end_ms": steps.end / 1e6})


class Answer(NamedTuple):
    """The windows of a run that make up its answer."""

    windows: list[Stretch]
    tokens: int

    @property
    def duration_ns(self) -> float:
        """Of the whole answer."""
        return sum((end - begin) * weight for begin, end, weight in self.windows)

    def share_of(self, c: Columns) -> float | None:
        """Time that these spans take, which do not overlap, over the duration."""
        ns = sum(int(c.within(begin, end).sum()) * weight for begin, end, weight in self.windows)
        return share(ns, self.duration_ns)

    def busy(self, c: Columns) -> ByLane:
        """The same by lane."""
        ns = dict.fromkeys(LANES, 0.0)
        for begin, end, weight in self.windows:
            within = c.within(begin, end)
            for lane in LANES:
                ns[lane] += int(within[c.on(lane)].sum()) * weight
        return {lane: share(busy_ns, self.duration_ns) for lane, busy_ns in ns.items()}

    def stalls(self, gaps: Gaps) -> dict[str, ByLane]:
        """Idle time of the GPU, a token of the answer and as a share of the duration."""
        found = [(gaps.within(begin, end), weight) for begin, end, weight in self.windows]
        ns = {lane: sum(stalls[i] * weight for stalls, weight in found) for i, lane in enumerate(STALL_LANES)}
        return {
            "stall_ms": {lane: share(of / 1e6, self.tokens) for lane, of in ns.items()},
            "stall_share": {lane: share(of, self.duration_ns) for lane, of in ns.items()},
        }
