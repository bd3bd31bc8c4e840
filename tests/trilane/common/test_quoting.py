"""Text that was given, in messages: short and printable."""

from __future__ import annotations

import tracemalloc
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trilane.common.names import hints, unknown
from trilane.common.quoting import printable, quoted
from trilane.common.schema import SchemaError, from_dict

_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


@given(_ANY)
def test_a_quoted_value_is_short(value: object) -> None:
    assert len(quoted(value)) <= 80


@given(st.integers(-(2**64), 2**64) | st.floats() | st.text(max_size=10) | st.lists(st.integers(0, 9), max_size=20))
def test_a_short_value_is_its_repr(value: object) -> None:
    assert quoted(value) == repr(value)


@pytest.mark.parametrize("value", [
    "x" * 10**7, list(range(10**6)), 10**20_000, [["x" * 10**7] * 9] * 9,
], ids=["text", "list", "number", "nested"])
def test_what_is_cut_is_never_built(value: object) -> None:
    tracemalloc.start()
    text = quoted(value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(text) <= 80
    assert peak < 10**5


def test_control_characters_and_lone_surrogates_are_escaped() -> None:
    assert quoted("\x1b[31m\ud800") == r"'\x1b[31m\ud800'"


@pytest.mark.parametrize(("hint", "value"), [(int, "x" * 10**6), (dict[str, int], 0), (bool, {"k" * 10**6: 1})])
def test_messages_of_the_schema_are_short(hint: type, value: object) -> None:
    with pytest.raises(SchemaError) as raised:
        from_dict(hint, value)
    assert len(str(raised.value)) < 300


def test_the_message_about_an_unknown_name_is_short() -> None:
    assert len(unknown("policy", "x" * 10**6, ["dali"])) < 200


# --- printable --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("text", "shown"), [
    ("Qwen3 → 30 B, größer", "Qwen3 → 30 B, größer"),
    ("two\nlines", "two\nlines"),
    ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
    ("\x9b31m", "\\x9b31m"),
    ("gnp.\u202egpj", "gnp.\\u202egpj"),
    ("over\rwritten", "over\\rwritten"),
    ("\ud800", "\\ud800"),
    ("line\u2028break", "line\\u2028break"),
])
def test_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(codec=None)))
def test_nothing_is_left_that_a_terminal_obeys(text: str) -> None:
    shown = printable(text)
    assert not {unicodedata.category(c) for c in shown if c != "\n"} & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert shown.encode().decode() == shown


# --- Messages about unknown names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "meant"), [
    ("dahli", "dali"), ("On_Demand", "on-demand"), ("cache-shar", "cache_share"), ("dali:LRU", "DALI:lru"),
])
def test_the_closest_name_is_suggested_whatever_its_case_and_hyphens(name: str, meant: str) -> None:
    known = ["dali", "on-demand", "cache_share", "DALI:lru"]
    assert unknown("policy", name, known) == (
        f"there is no policy {name!r}; did you mean {meant!r}? Choose from dali, on-demand, cache_share, DALI:lru"
    )


def test_a_name_that_begins_with_what_was_given_comes_first() -> None:
    known = ["ddr5-6400", "ddr4-3200"]
    assert "did you mean 'ddr4-3200'?" in unknown("memory", "ddr4", known)
    assert "did you mean 'ddr5-6400'?" in unknown("memory", "ddr5-640x", known)


def test_where_no_name_is_close_all_are_listed() -> None:
    assert unknown("policy", "xyz", ["dali", "on-demand"]) == "there is no policy 'xyz'; choose from dali, on-demand"


def test_a_long_list_is_left_to_a_command() -> None:
    assert unknown("GPU", "rtx-408", ["rtx-4080"], "trilane hardware --parts") == (
        "there is no GPU 'rtx-408'; did you mean 'rtx-4080'? `trilane hardware --parts` lists them all"
    )


@pytest.mark.parametrize(("name", "expected"), [
    ("rtx-1080", []), ("rtx-308", ["rtx-3080"]), ("ryzen-5-560x", ["ryzen-5-5600x"]), ("qwen3-40b", []),
    ("qwen3-30b", ["qwen3-30b-a3b", "qwen3-30b-a3b-instruct", "qwen3-30b-a3b-thinking"]), ("xyz", []),
])
def test_a_hint_has_no_other_number_and_there_are_three_at_most(name: str, expected: list[str]) -> None:
    known = ["rtx-5080", "rtx-3080", "ryzen-5-5600x", "qwen3-30b-a3b", "qwen3-next-80b-a3b"]
    more = ["qwen3-30b-a3b-instruct", "qwen3-30b-a3b-thinking", "qwen3-30b-a3b-instruct-2507"]
    assert set(hints(name, [*known, *more])) <= {*expected}
    assert bool(hints(name, [*known, *more])) == bool(expected)


def test_hints_are_told_with_or_before_the_last() -> None:
    assert "; did you mean 'lru-3' or 'lru-2'? `list`" in unknown("cache", "lru-", ["lru-2", "lru-3", "fifo"], "list")


def test_without_any_names() -> None:
    assert unknown("trace", "x", []) == "there is no trace 'x'; choose from none"


def test_a_list_that_is_cut_begins_with_the_names_that_are_most_alike() -> None:
    known = [*(f"deepseek-{number}" for number in range(100)), "qwen3-30b-a3b", "qwen3-next-80b-a3b"]
    assert unknown("model", "qwen3", known).startswith(
        "there is no model 'qwen3'; did you mean 'qwen3-30b-a3b'? Choose from qwen3-30b-a3b, qwen3-next-80b-a3b, "
        "deepseek-"
    )


def test_of_an_endless_name_the_beginning_is_compared() -> None:
    """A file may have one of a hundred thousand characters: all of them would be compared for many seconds."""
    known = ["deepseek-v2", *(f"qwen3-{number}" for number in range(100))]
    message = unknown("model", "qwen" + 196 * "x" + 1000 * "deepseek-v2", known)
    assert "; choose from qwen3-0, qwen3-1, " in message


def test_a_list_of_names_ends() -> None:
    message = unknown("axis", "xyz", [f"name-{number}" for number in range(1000)])
    assert message.startswith("there is no axis 'xyz'; choose from name-0, name-1, ")
    assert message.endswith(", ...")
    assert len(message) < 450
