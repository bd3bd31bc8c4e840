"""The frame of a run's spans: that of pandas, made faster."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.runs.columns import columns_of, columns_of_rows
from sim.runs.spans import TEXTS, Row, Span, spans_frame
from sim.runs.vocabulary import LANES

_TIMES = st.integers(0, 3)
_ROWS = st.tuples(
    st.sampled_from(LANES), _TIMES, _TIMES, _TIMES, st.sampled_from(["expert", "demand", "wait"]),
    st.sampled_from(["prefill", "decode"]), *[st.integers(-1, 2**40)] * 6,
)


def _of_pandas(rows: list[Row]) -> pd.DataFrame:
    plain = pd.DataFrame(rows, columns=list(Span._fields)).astype(dict.fromkeys(TEXTS, "category"))
    return plain.sort_values(["start_ns", "end_ns", "lane"], kind="stable", ignore_index=True)


@given(st.lists(_ROWS, min_size=1, max_size=20))
def test_it_is_the_frame_that_pandas_makes_and_sorts(rows: list[Row]) -> None:
    pd.testing.assert_frame_equal(spans_frame(rows), _of_pandas(rows), check_exact=True)


@given(st.lists(_ROWS, max_size=20))
def test_plain_arrays_are_those_of_the_frame(rows: list[Row]) -> None:
    for of_rows, of_frame in zip(columns_of_rows(rows), columns_of(spans_frame(rows)), strict=True):
        np.testing.assert_array_equal(of_rows, of_frame, strict=True)


def test_an_unknown_kind_is_refused_by_name_without_a_frame_too() -> None:
    with pytest.raises(ValueError, match="spans: unknown kind 'nap'; known: "):
        columns_of_rows([("gpu", 0, 0, 1, "nap", "decode", 0, 0, -1, -1, 0, 0)])


@pytest.mark.parametrize("spans", [1023, 1024, 1025, 2500])
def test_it_is_so_for_more_rows_than_are_read_at_once(spans: int) -> None:
    rows: list[Row] = [
        (LANES[-(n % 3)], n, n * 7 % 900, 900 + n % 2, f"kind {n // 600}", "decode", n, -n, 0, n % 5, 0, n << 32)
        for n in range(spans)
    ]
    pd.testing.assert_frame_equal(spans_frame(rows), _of_pandas(rows), check_exact=True)


def test_no_spans_are_a_frame_with_all_columns() -> None:
    empty = spans_frame([])
    assert empty.columns.tolist() == list(Span._fields)
    assert len(empty) == 0
