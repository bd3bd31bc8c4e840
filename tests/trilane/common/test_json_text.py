"""Strict JSON, of plain values, within limits."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilane.common.json_text import MOST_DEPTH, JsonError, parse_json

_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(_PLAIN, st.booleans())
def test_what_is_written_is_read_back(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert parse_json(text, "here") == value
    assert parse_json(text.encode(), "here") == value


@pytest.mark.parametrize(("text", "problem"), [
    ("", "Expecting value"),
    ("{'a': 1}", "Expecting property name"),
    ('{"a": 1, "a": 2}', "duplicate key 'a'"),
    ('["\\ud800"]', "surrogates not allowed"),
    ('{"\\udfff": 1}', "surrogates not allowed"),
    ("1" * 5000, "is beyond 64 bits"),
    (str(2**63), "the whole number '9223372036854775808' is beyond 64 bits"),
    ("[" * 100_000, f"more than {MOST_DEPTH} deep"),
    ('{"a":' * 100_000, f"more than {MOST_DEPTH} deep"),
    ("[" * (MOST_DEPTH + 1) + "]" * (MOST_DEPTH + 1), f"more than {MOST_DEPTH} deep"),
    (b'"\xff"', "can't decode"),
    (b'"\xed\xa0\x80"', "can't decode"),
], ids=lambda it: ascii(it)[:20])
def test_what_is_no_plain_value_is_refused_in_one_sentence(text: str | bytes, problem: str) -> None:
    with pytest.raises(JsonError) as raised:
        parse_json(text, "prompts.jsonl line 3")
    message = str(raised.value)
    assert message.startswith("prompts.jsonl line 3: not plain JSON: ")
    assert problem in message
    assert len(message) < 250


def test_a_reader_may_take_larger_whole_numbers() -> None:
    assert parse_json(str(2**64 - 1), "here", below=2**64) == 2**64 - 1
    with pytest.raises(JsonError, match="is beyond 64 bits"):
        parse_json(str(2**64), "here", below=2**64)


def test_the_greatest_depth_is_read() -> None:
    assert parse_json("[" * MOST_DEPTH + "]" * MOST_DEPTH, "here") is not None
