"""The best few of every row, against a plain sort."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from traces.synthesis.latent import best, coarse

ROWS = st.tuples(st.integers(1, 5), st.integers(2, 40))
LOGITS = st.floats(-50, 50, width=32)


@given(arrays(np.float32, ROWS, elements=LOGITS), st.data())
def test_the_best_are_the_largest_in_descending_order(values: np.ndarray, data: st.DataObject) -> None:
    rounded, count = coarse(values), data.draw(st.integers(1, values.shape[1]))
    chosen = np.take_along_axis(rounded, best(values, count).astype(np.intp), axis=1)
    assert chosen.tolist() == np.sort(rounded, axis=1)[:, ::-1][:, :count].tolist()
    assert all(len(set(row)) == count for row in best(values, count).tolist())


def test_rounding_is_fine() -> None:
    values = np.random.default_rng(0).standard_normal((100, 128)).astype(np.float32)
    np.testing.assert_allclose(coarse(values), values, rtol=2e-5)
    assert (best(values, 6) == np.argsort(-values, axis=1)[:, :6]).mean() > 0.999
