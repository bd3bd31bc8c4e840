"""How far TPOT is off where few decode steps stand for a long answer (``sim.runs.sampling``), as measured.

The error of TPOT, against all N steps, was measured with mixtral-offloading@impl, dali, best-exact, fiddler,
ktransformers and the clairvoyant run (mini-deepseek, mini-moe, N = 64; synthetic Qwen3-30B-A3B and Mixtral-8x7B,
N = 256; 24 runs each): ``MEASURED_ERRORS``. Of answers of 64 tokens, 32 steps gave a mean of 0.7 % and at most 1.8 %
(batch 1), and 0.5 % and 1.3 % (batch 4). Hit rates were off by 0.005 in the mean (56 steps, batch 1).
"""

from __future__ import annotations

from typing import NamedTuple


class MeasuredDeviation(NamedTuple):
    """Absolute error of TPOT from ``steps`` decode steps, as a share of TPOT from all steps."""

    batch: int
    steps: int
    mean: float
    largest: float


MEASURED_RUNS = 24  # of each setting
MEASURED_ERRORS = (
    MeasuredDeviation(1, 24, 0.038, 0.174),
    MeasuredDeviation(1, 32, 0.019, 0.108),
    MeasuredDeviation(1, 56, 0.011, 0.041),
    MeasuredDeviation(4, 24, 0.020, 0.094),
    MeasuredDeviation(4, 32, 0.008, 0.025),
    MeasuredDeviation(4, 56, 0.006, 0.028),
)


def measured_error(steps: int, batch: int) -> MeasuredDeviation:
    """The measured setting that is nearest from below; for fewer steps than were measured, that of the fewest."""
    fewest = min(error.steps for error in MEASURED_ERRORS)
    return max(e for e in MEASURED_ERRORS if e.batch <= batch and e.steps <= max(steps, fewest))
