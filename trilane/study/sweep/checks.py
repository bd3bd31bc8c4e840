"""What the axes of a grid may say, found out before anything is played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from policies.registry import policy_names, system
from sim.runs.scenario import Scenario
from trilane.study.sweep.axes import SCENARIO_KEYS, SweepError, check_axis, check_together, policy_in, vary
from trilane.study.sweep.values import distinct

MOST_COMBINATIONS = 1_000_000  # of a grid: more of them take days to play


def check_size(products: Sequence[Mapping[str, tuple[Any, ...]]], draws: int) -> None:
    """Raises SweepError for a grid that nobody could mean, before its points are made."""
    count = draws * sum(prod(map(len, axes.values())) for axes in products)
    if count > MOST_COMBINATIONS:
        what = f"combinations in {draws:,} draws" if draws > 1 else "combinations"
        raise SweepError(
            f"the axes have {count:,} {what}, expected {MOST_COMBINATIONS:,} at most; give fewer values "
            f"(LOW..HIGH/5 is five of them), or sweep one part after the other"
        )


def checked(axes: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """The axes of one product, each value once. Raises SweepError naming the axis."""
    for name in axes:
        check_axis(name)
    check_together(axes)
    kept = {}
    for name, values in axes.items():
        values = distinct(_every_policy(values) if name == "policy" else values)
        if not values:
            raise SweepError(f"{name}: expected one value or more, got none")
        for value in values:
            check_value(name, value)
        kept[name] = values
    return kept


def _every_policy(values: tuple[Any, ...]) -> Iterator[Any]:
    """``all`` spelled out."""
    for value in values:
        yield from policy_names() if value == "all" else (value,)


def check_value(name: str, value: Any) -> None:
    """Refuse what no scenario of any sweep could be given. Raises SweepError."""
    try:
        if name == "policy":
            policy, parameters = policy_in(value)
            system(policy).parse(parameters)
        elif name in SCENARIO_KEYS:
            vary(Scenario(), name, value)
    except ValueError as error:
        raise SweepError(f"{name}: {str(error).removeprefix('scenario: ').removeprefix(f'{name}: ')}") from None
