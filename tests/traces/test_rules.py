"""Which numbers are no probabilities: of every half-precision number there is."""

from __future__ import annotations

import numpy as np

from traces.rules import SCORE_SLACK, no_probability


def test_the_bits_of_a_score_tell_what_comparing_tells() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(-1, 4, 8)
    compared = ~((every >= 0) & (every <= 1 + SCORE_SLACK))
    assert no_probability(every).tolist() == compared.tolist()
    assert no_probability(every[:, ::2, 1:]).tolist() == compared[:, ::2, 1:].tolist()  # a view of a larger array
