"""What a sweep found, by the stated rules."""

from __future__ import annotations

import pandas as pd
import pytest

from policies.protocols import PolicyKind
from trilane.output.figures.winners import (
    Interval,
    best_of,
    fastest,
    gain,
    hardly_matters,
    intervals,
    settled_from,
    tally,
    times_table,
)

A, B, C = (("a", PolicyKind.KEEPS), ("b", PolicyKind.KEEPS), ("c", PolicyKind.KEEPS))


def table(axis: str, values: list[object], **times: list[float]) -> pd.DataFrame:
    columns = {(name, PolicyKind.KEEPS): mine for name, mine in times.items()}
    return pd.DataFrame(columns, index=pd.Index(values, name=axis))


def test_one_policy_of_two_kinds_is_two_columns() -> None:
    """With one value of a parameter it keeps the routing, with the other it does not."""
    rows = pd.DataFrame({
        "batch": [1, 2, 1], "policy": "mix", "kind": [PolicyKind.KEEPS, PolicyKind.KEEPS, PolicyKind.CHANGES],
        "tpot_ms": [5.0, 9.0, 4.0],
    })
    times = times_table(rows, "batch", [1, 2, 4])
    assert times.index.tolist() == [1, 2]  # nothing ran with 4
    assert best_of(times) == [("mix", PolicyKind.CHANGES), ("mix", PolicyKind.KEEPS)]
    assert fastest(times) == "mix ~ is fastest below batch 2, mix from there on"


def test_the_fastest_stays_the_fastest_within_two_percent() -> None:
    times = table("batch", [1, 2, 4], a=[10.0, 10.2, 10.3], b=[11.0, 10.0, 10.0])
    assert intervals(times) == [Interval(A, (1, 2)), Interval(B, (4,))]
    assert "a is fastest or within 2% of the fastest below batch 4, b " in fastest(times)


def test_a_policy_that_cannot_run_is_not_the_fastest() -> None:
    times = table("batch", [1, 2], a=[10.0, float("nan")], b=[20.0, 30.0])
    assert intervals(times) == [Interval(A, (1,)), Interval(B, (2,))]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"a": [10.0, 5.0, 4.0], "b": [20.0, 9.0, 8.0]}, "a is fastest throughout: 10.0 to 4.0 ms per token"),
        ({"a": [10.0, 5.0, 4.0], "b": [20.0, 4.0, 3.0]}, "a is fastest below 40% cached, b from there on"),
        ({"a": [1.0, 2.0, 3.0], "b": [3.0, 1.0, 2.0], "c": [9.0, 9.0, 1.0]},
         "a is fastest below 40% cached, b below 80% cached, c from there on"),
    ],
)
def test_fastest(times: dict[str, list[float]], expected: str) -> None:
    assert fastest(table("cached_share", [0.2, 0.4, 0.8], **times)) == expected


def test_many_intervals_and_names_are_counted() -> None:
    often = table("batch", [1, 2, 4, 8, 16], a=[1.0, 2.0, 1.0, 2.0, 1.0], b=[2.0, 1.0, 2.0, 1.0, 2.0])
    assert fastest(often) == "a is fastest in 3 of 5 settings, b in 2"
    names = table("hardware", ["x", "y", "z"], a=[1.0, 2.0, 1.0], b=[2.0, 1.0, 2.0])
    assert fastest(names) == "a is fastest in 2 of 3 settings, b in 1"
    assert fastest(names.iloc[:1]) == "a is fastest at x: 1.0 ms per token"


def test_from_where_the_policy_hardly_matters() -> None:
    """The median is 2.0, 1.1, 1.5 and 1.05 times the lowest: within 10 % at 2, but for good only from 8 on."""
    times = table("batch", [1, 2, 4, 8], a=[1.0] * 4, b=[2.0, 1.1, 1.5, 1.05], c=[9.0] * 4)
    assert settled_from(times) == 8
    assert hardly_matters(times).startswith("from batch 8 on ")
    assert hardly_matters(times.iloc[-1:]).startswith("throughout, ")
    assert settled_from(times.iloc[:3]) is None
    assert hardly_matters(times.iloc[:3]) == ""
    assert settled_from(times[[A, B]]) is None  # of two policies, half are always the fastest


@pytest.mark.parametrize(
    ("times", "facts"),
    [
        ([20.0, 10.0], ("from 8 GB/s to 64 GB/s ", "falls by 2.00x", "20.0 to 10.0 ms")),
        ([10.0, 15.0], ("rises by 1.50x", "10.0 to 15.0 ms")),
        ([10.0, 9.9], ("hardly changes", "10.0 to 9.9 ms")),
    ],
)
def test_gain(times: list[float], facts: tuple[str, ...]) -> None:
    sentence = gain(table("pcie_gbps", [8.0, 64.0], a=times, b=[2 * time for time in times]))
    assert all(fact in sentence for fact in facts)


def test_one_value_gains_nothing() -> None:
    assert gain(table("pcie_gbps", [12.0], a=[10.0], b=[20.0])) == ""


def test_tally() -> None:
    assert tally([A]) == "a is fastest in the one setting"
    assert tally([A, A], "hits most") == "a hits most in all 2 settings"
    assert tally([A, B, A]) == "a is fastest in 2 of 3 settings, b in 1"
    many = [(name, PolicyKind.CLAIRVOYANT if name == "b" else PolicyKind.KEEPS) for name in "aaabbccde"]
    assert tally(many) == "a is fastest in 3 of 9 settings, b * in 2, c in 2, others in 2"
