"""Findings, by their stated rules."""

from __future__ import annotations

import pandas as pd
import pytest

from trilane.figures.winners import (
    Stretch,
    along,
    among,
    gain,
    gains_most,
    overall,
    settled_from,
    stretches,
    until_the_end,
    who,
)


def table(axis: str, values: list[object], **times: list[float]) -> pd.DataFrame:
    return pd.DataFrame(times, index=pd.Index(values, name=axis))


def test_who_leads_stays_the_leader_within_two_percent() -> None:
    times = table("batch", [1, 2, 4], a=[10.0, 10.2, 10.3], b=[11.0, 10.0, 10.0])
    assert stretches(times) == [Stretch("a", (1, 2)), Stretch("b", (4,))]


def test_a_policy_that_cannot_run_leads_no_longer() -> None:
    times = table("batch", [1, 2], a=[10.0, float("nan")], b=[20.0, 30.0])
    assert stretches(times) == [Stretch("a", (1,)), Stretch("b", (2,))]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"a": [10.0, 5.0, 4.0], "b": [20.0, 9.0, 8.0]}, "a is fastest throughout: 10.0 to 4.0 ms per token"),
        ({"a": [10.0, 5.0, 4.0], "b": [20.0, 4.0, 3.0]}, "a is fastest below 40% cached, b from there on"),
        ({"a": [1.0, 2.0, 3.0], "b": [3.0, 1.0, 2.0], "c": [9.0, 9.0, 1.0]},
         "a is fastest below 40% cached, b below 80% cached, c from there on"),
        ({"a": [10.0, 5.0, 4.0]}, "a: 10.0 to 4.0 ms per token"),
    ],
)  # fmt: skip
def test_who(times: dict[str, list[float]], expected: str) -> None:
    assert who(table("cached_share", [0.2, 0.4, 0.8], **times), "cached_share") == expected


def test_who_changes_too_often_to_name_all() -> None:
    times = table("batch", [1, 2, 4, 8, 16], a=[1.0, 2.0, 1.0, 2.0, 1.0], b=[2.0, 1.0, 2.0, 1.0, 2.0])
    assert who(times, "batch") == "the fastest policy changes 4 times; most often, at 3 of 5 values, a is fastest"


def test_who_of_names() -> None:
    times = table("hardware", ["x", "y", "z"], a=[1.0, 2.0, 1.0], b=[2.0, 1.0, 2.0])
    assert who(times, "hardware") == "a is fastest at x, b at y, a at z"
    assert who(times[["a"]].assign(b=9.0), "hardware") == "a is fastest on each of them"
    assert who(times.iloc[:1], "hardware") == "a is fastest at x: 1.0 ms per token"


def test_from_where_the_policy_hardly_matters() -> None:
    """The median is 2.0, 1.1, 1.5 and 1.05 times the best: within 10 % at 2, but for good only from 8 on."""
    times = table("batch", [1, 2, 4, 8], a=[1.0] * 4, b=[2.0, 1.1, 1.5, 1.05], c=[9.0] * 4)
    assert settled_from(times) == 8
    assert until_the_end(times, "batch") == (
        "from batch 8 on the policy hardly matters: half of them are within 10%"
    )
    assert along(times, "batch").endswith("; from batch 8 on the policy hardly matters")
    assert along(times.iloc[-1:], "batch").endswith(", but the policy hardly matters")
    assert settled_from(times.iloc[:3]) is None
    assert until_the_end(times.iloc[:3], "batch") == (
        "the policy matters up to batch 4: half of the policies take at least 50% longer than the fastest"
    )
    assert settled_from(times[["a", "b"]]) is None


def test_throughout_says_whether_the_leader_is_the_very_fastest() -> None:
    times = table("batch", [1, 2], a=[10.0, 10.1], b=[11.0, 10.0])
    assert who(times, "batch") == "a is fastest or within 2% of the fastest throughout: 10.0 to 10.1 ms per token"


def test_so_do_several_stretches() -> None:
    """b is 2 % faster than a at 2, where a is said to lead."""
    times = table("batch", [1, 2, 3, 4], a=[10.0, 10.2, 12.0, 12.0], b=[11.0, 10.0, 10.0, 10.0])
    assert who(times, "batch") == "a is fastest or within 2% of the fastest below batch 3, b from there on"
    names = times.set_axis(["w", "x", "y", "z"])
    assert who(names, "hardware") == "a is fastest or within 2% of the fastest at w and x, b at y and z"
    often = table("batch", [1, 2, 3, 4, 5], a=[1.0, 2.0, 1.0, 2.0, 1.0], b=[9.0, 1.0, 9.0, 1.0, 1.0])
    assert who(often.assign(b=[9.0, 1.0, 9.0, 1.0, 0.99]), "batch").endswith("b is fastest")


def test_of_one_policy_alone_there_is_no_fastest() -> None:
    rows = pd.DataFrame({"policy": ["a", "b"], "tpot_ms": [10.0, 20.0]})
    assert overall(rows, ["a", "a"]) == "a is fastest in all 2 settings"
    assert overall(rows.assign(policy="a"), ["a", "a ~"]) == "a: 10.0 to 20.0 ms per token over 2 settings"


def test_who_gains_most() -> None:
    times = table("pcie_gbps", [8.0, 64.0], a=[10.0, 8.0], b=[20.0, 10.0])
    assert gains_most(times, "pcie_gbps") == "b gains most: 20.0 to 10.0 ms per token"
    assert gains_most(times[["a"]], "pcie_gbps") == ""
    assert gains_most(times.iloc[::-1], "pcie_gbps") == ""
    assert gains_most(times, "hardware") == ""


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([20.0, 10.0], "from 8 GB/s to 64 GB/s the fastest goes from 20.0 to 10.0 ms per token, 2.00x faster"),
        ([10.0, 15.0], "from 8 GB/s to 64 GB/s the fastest goes from 10.0 to 15.0 ms per token, 1.50x slower"),
        ([10.0, 9.9], "from 8 GB/s to 64 GB/s the fastest hardly changes, from 10.0 to 9.9 ms per token"),
    ],
)
def test_gain(times: list[float], expected: str) -> None:
    slower = [2 * time for time in times]
    assert gain(table("pcie_gbps", [8.0, 64.0], a=times, b=slower), "pcie_gbps") == expected


def test_gain_of_things_to_choose_from_is_a_ranking() -> None:
    times = table("hardware", ["old", "new", "odd"], a=[20.0, 10.0, 40.0], b=[30.0, 30.0, 15.0])
    assert gain(times, "hardware") == (
        "new is best: 10.0 ms per token, 1.50x faster than odd (15.0), 2.00x faster than old (20.0)"
    )


def test_one_value_gains_nothing_but_is_told() -> None:
    assert gain(table("pcie_gbps", [12.0], a=[10.0], b=[20.0]), "pcie_gbps") == (
        "a is fastest at 12 GB/s: 10.0 ms per token"
    )


def test_the_cards_own_memory_is_no_step_of_a_scale() -> None:
    times = table("gpu_memory_gb", [12.0, 16.0, "the card's own"], a=[30.0, 20.0, 20.2], b=[50.0] * 3, c=[50.0] * 3)
    assert gain(times, "gpu_memory_gb") == (
        "16 GB is best: 20.0 ms per token, as fast as the card's own memory (20.2), 1.50x faster than 12 GB (30.0)"
    )
    assert who(times, "gpu_memory_gb") == "a is fastest on each of them"
    assert gains_most(times, "gpu_memory_gb") == until_the_end(times, "gpu_memory_gb") == ""


def test_one_setting_is_no_plural() -> None:
    assert among(["a"]) == "a is fastest in the one setting"
    assert overall(pd.DataFrame({"policy": ["a"], "tpot_ms": [10.0]}), ["a"]) == "a: 10.0 ms per token"


def test_among() -> None:
    assert among(["a", "a"]) == "a is fastest in all 2 settings"
    assert among(["a", "b", "a"]) == "a is fastest in 2 of 3 settings, b in 1"
    assert among(list("aaabbccde")) == "a is fastest in 3 of 9 settings, b in 2, c in 2, others in 2"
