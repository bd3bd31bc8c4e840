"""The frame of a run's spans: that of pandas, made faster."""

from __future__ import annotations

import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from sim.engine.spans import LANES, TEXTS, Row, Span, spans_frame

_TIMES = st.integers(0, 3)
_ROWS = st.tuples(
    st.sampled_from(LANES), _TIMES, _TIMES, _TIMES, st.sampled_from(["expert", "demand", "wait"]),
    st.sampled_from(["prefill", "decode"]), *[st.integers(-1, 2**40)] * 6,
)  # fmt: skip


@given(st.lists(_ROWS, min_size=1, max_size=20))
def test_it_is_the_frame_that_pandas_makes_and_sorts(rows: list[Row]) -> None:
    plain = pd.DataFrame(rows, columns=list(Span._fields)).astype(dict.fromkeys(TEXTS, "category"))
    plain = plain.sort_values(["start_ns", "end_ns", "lane"], kind="stable", ignore_index=True)
    pd.testing.assert_frame_equal(spans_frame(rows), plain, check_exact=True)


def test_no_spans_are_a_frame_with_all_columns() -> None:
    empty = spans_frame([])
    assert empty.columns.tolist() == list(Span._fields)
    assert len(empty) == 0
