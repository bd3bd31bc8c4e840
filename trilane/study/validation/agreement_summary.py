"""What the agreement of many scenarios is summed up in: errors, verdicts on the aims, and errors by lane."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

MEDIAN_AIM, WORST_AIM, TAU_AIM = 0.05, 0.15, 0.9


class Verdict(NamedTuple):
    """One aim: whether it was reached (None: there is nothing to judge by), and the result in words."""

    held: bool | None
    text: str

    def __str__(self) -> str:
        return f"{'not judged' if self.held is None else 'held' if self.held else 'not held'}: {self.text}"


@dataclass(frozen=True)
class Summary:
    """Errors are absolute, as fractions of the measured values; None if no scenario has the number."""

    scenarios: int
    repeats: int  # the least number for any scenario
    median_error: float  # of TPOT, like all errors except that of TTFT
    p90_error: float
    worst_error: float
    within: Mapping[str, int]  # number of scenarios by limit of the error
    median_null_error: float | None
    median_ttft_error: float | None
    median_spread: float | None  # of repeated runs: the noise floor
    tau: float | None  # mean over the groups that have one
    null_tau: float | None
    tau_beyond_spread: float | None
    pairs: int
    discordant_pairs: int
    tied_pairs: int


class LaneAccuracy(NamedTuple):
    """Absolute errors of a lane's busy time over all scenarios."""

    median_of_tpot: float  # as a fraction of the measured TPOT
    worst_of_tpot: float
    worst_place: int  # place of that comparison
    median_of_lane: float | None  # as a fraction of the lane's own busy time; None if it was never used
