"""Messages about unknown names."""

from __future__ import annotations

import pytest

from trilane.common.names import unknown


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
    assert len(message) < 650
