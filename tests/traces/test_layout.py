"""Which numbers are no probabilities: of every half-precision number there is."""

from __future__ import annotations

import numpy as np
import pytest

from traces import layout
from traces.layout import SCORE_SLACK, TraceError, no_probability
from trilane.testing.worlds import toy_shape


@pytest.mark.parametrize("row", [0, 1, 2, 5, 6])
def test_a_broken_row_is_named_whichever_block_it_is_in(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """Blocks of three tokens; the writer has written 40 before."""
    monkeypatch.setattr(layout, "BLOCK_TOKENS", 3)
    phase = np.zeros(7, np.uint8)
    phase[row] = 2
    layout.check_rows("t", toy_shape(1, 4, 1), {"phase": np.minimum(phase, 1)}, 40)
    with pytest.raises(TraceError, match=rf"t: phase row {40 + row}: expected 0 \(prefill\) or 1 \(decode\), got 2"):
        layout.check_rows("t", toy_shape(1, 4, 1), {"phase": phase}, 40)


def test_order_is_that_within_a_sequence() -> None:
    tensors = {"sequence": np.array([3, 1, 3, 1]), "position": np.array([5, 0, 4, 1]), "phase": np.array([0, 1, 0, 1])}
    layout.check_order("t", {**tensors, "position": np.array([4, 0, 5, 1])})
    message = r"t: position row 2: expected an increase within sequence 3, got 4 after 5 \(row 0\); put the rows"
    with pytest.raises(TraceError, match=message):
        layout.check_order("t", tensors)


def test_the_bits_of_a_score_tell_what_comparing_tells() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(-1, 4, 8)
    compared = ~((every >= 0) & (every <= 1 + SCORE_SLACK))
    assert no_probability(every).tolist() == compared.tolist()
    assert no_probability(every[:, ::2, 1:]).tolist() == compared[:, ::2, 1:].tolist()  # a view of a larger array
