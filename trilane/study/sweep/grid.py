"""A grid: a scenario, and what of it is varied; its points are the scenarios that a sweep plays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from policies.registry import policy_names, system
from policies.system import ChoiceError
from policies.user_files import names_file, names_of_loaded
from sim.runs.scenario import Scenario
from trilane.common.errors import TrilaneError
from trilane.common.hints import between
from trilane.common.schema import check, from_dict
from trilane.common.yaml_files import read_yaml
from trilane.study import CLAIRVOYANT_POLICY
from trilane.study.draws import draws_of
from trilane.study.sweep.axes import (
    PARAMETER,
    SCENARIO_KEYS,
    MachineOf,
    SweepError,
    check_axis,
    check_together,
    distinct,
    machine_of,
    policy_in,
    takers,
    values_of,
    varied,
    vary,
    with_floats,
)

T = TypeVar("T")
MOST_COMBINATIONS = 1_000_000  # of a grid: more of them take days to play


@dataclass(frozen=True)
class Point:
    """One scenario of a sweep, in one draw, and its place in the grid: its value on every axis, as written.

    ``scenario`` is None where the values do not make one of ``base``; ``problem`` then says why.
    """

    scenario: Scenario | None
    axes: Mapping[str, Any]
    draw: int = 0
    problem: str = ""
    base: Scenario | None = None

    @cached_property
    def setting(self) -> str:
        """A text that is equal for points that differ in policy and parameters alone; empty without a scenario."""
        return "" if self.scenario is None else setting_key(self.scenario)


@dataclass(frozen=True)
class Grid:
    """The points of a sweep: every combination of values of its axes, of each product in ``axes`` one after the other.

    Axes are named as in ``sweep.axes.vary``; the policy ``all`` means every one. ``parameters.X`` applies to
    those policies that have X; the others appear once. ``clairvoyant`` adds the policy ``oracle`` to every setting.
    Every point is played in ``draws`` draws. Raises SweepError for what no point could be made of.
    """

    scenario: Scenario = field(default_factory=Scenario)
    axes: tuple[Mapping[str, tuple[Any, ...]], ...] = ({},)
    draws: Annotated[int, between(1, 10_000)] = 1
    clairvoyant: bool = True

    def __post_init__(self) -> None:
        check(self, SweepError)
        [*named] = _every_policy((self.scenario.policy,))
        object.__setattr__(self, "scenario", with_floats(self.scenario.with_(policy=named[0])))
        object.__setattr__(self, "axes", tuple(_checked(each) for each in self.axes))
        if any("policy" not in each for each in self.axes):
            _check_value("policy", {self.scenario.policy: self.scenario.parameters})
        count = self.draws * sum(prod(map(len, each.values())) for each in self.axes)
        if count > MOST_COMBINATIONS:
            what = f"combinations in {self.draws:,} draws" if self.draws > 1 else "combinations"
            raise SweepError(
                f"the axes have {count:,} {what}, expected {MOST_COMBINATIONS:,} at most; give fewer values "
                f"(LOW..HIGH/5 is five of them), or sweep one part after the other"
            )
        seeds = [self.scenario.seed, *(seed for each in self.axes for seed in each.get("seed", ()))]
        if max(seeds) + self.draws > 2**63:
            raise SweepError(f"seed: expected room for the {self.draws:,} draws below 2^63, got {max(seeds)}")

    @property
    def names(self) -> list[str]:
        """All axes, in the order written."""
        return list(dict.fromkeys(name for each in self.axes for name in each))

    @classmethod
    def from_yaml(cls, path: str | Path) -> Grid:
        """Read a sweep file. Raises SweepError with the file's name, and the key's where one is at fault."""
        return cls.from_dict(read_yaml(path, SweepError), str(path))

    @classmethod
    def from_dict(cls, document: Any, where: str = "sweep") -> Grid:
        """Build from a mapping with the keys of a sweep file. Raises SweepError, which begins with ``where``."""
        file = from_dict(_SweepFile, document, where, SweepError)
        products = file.grid if isinstance(file.grid, tuple) else (file.grid or {},)
        try:
            axes = tuple({name: values_of(name, given) for name, given in each.items()} for each in products)
        except SweepError as error:
            raise SweepError(f"{where}: grid: {error}") from None
        try:
            return cls(file.scenario or Scenario(), axes, file.draws, file.clairvoyant)
        except SweepError as error:
            raise SweepError(f"{where}: {error}") from None


class _SweepFile(NamedTuple):
    """The keys of a sweep file."""

    scenario: Scenario | None = None
    grid: Mapping[str, Any] | tuple[Mapping[str, Any], ...] | None = None
    draws: Annotated[int, between(1, 10_000)] = 1
    clairvoyant: bool = True


def _checked(axes: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """The axes of one product, each value once. Raises SweepError naming the axis."""
    for name in axes:
        check_axis(name)
    check_together(axes)
    kept = {name: distinct(_every_policy(values) if name == "policy" else values) for name, values in axes.items()}
    for name, values in kept.items():
        if not values:
            raise SweepError(f"{name}: expected one value or more, got none")
        for value in values:
            _check_value(name, value)
    return kept


def _every_policy(values: tuple[Any, ...]) -> Iterator[Any]:
    """``all`` spelled out, and files of policies, which have been loaded, as their names. Raises SweepError."""
    for value in values:
        policy, parameters = policy_in(value)
        if value == "all":
            yield from policy_names()
        elif names_file(policy):
            try:
                yield from ({name: parameters} if parameters else name for name in names_of_loaded(policy))
            except ChoiceError as error:
                raise SweepError(f"policy: {error}") from None
        else:
            yield value


def _check_value(name: str, value: Any) -> None:
    """Refuse what no scenario of any sweep could be given. Raises SweepError."""
    try:
        if name == "policy":
            policy, parameters = policy_in(value)
            system(policy).parse(parameters)
        elif name in SCENARIO_KEYS:
            vary(Scenario(), name, value)
    except TrilaneError as error:
        raise SweepError(f"{name}: {str(error).removeprefix(f'{name}: ')}") from None


# --- points -----------------------------------------------------------------------------------------------------------


def points(grid: Grid) -> list[Point]:
    """Every point once, in the order written, the first axis slowest; the draws of a point follow each other."""
    machines = _remembered(machine_of, lambda scenario: canonical([scenario.hardware, scenario.hardware_overrides]))
    draws = _remembered(partial(_draws, count=grid.draws), setting_key)
    found: dict[str, Point] = {}
    for axes in grid.axes:
        for values in _combinations(axes, grid):
            point = _point(grid.scenario, values, machines)
            for drawn in _drawn(point, draws) if grid.draws > 1 else (point,):
                found.setdefault(_identity(drawn), drawn)
    return list(found.values())


def _combinations(axes: Mapping[str, tuple[Any, ...]], grid: Grid) -> Iterator[dict[str, Any]]:
    """The values of one product's points.

    A parameter that the policy of a point lacks is left out, and so is every parameter of a clairvoyant run that was
    added: what others are compared with stays the same.
    """
    named = axes.get("policy", (grid.scenario.policy,))
    added = {CLAIRVOYANT_POLICY} - {policy_in(value)[0] for value in named} if grid.clairvoyant else set()
    axes = {**axes, "policy": (*named, *added)} if added else axes
    having = {name: set(takers(name)) - added for name in axes if name.startswith(PARAMETER)}
    having["parameters"] = set(policy_names()) - added
    for combination in product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        policy, _ = policy_in(values.get("policy", grid.scenario.policy))
        yield {name: value for name, value in values.items() if policy in having.get(name, (policy,))}


def _point(base: Scenario, values: Mapping[str, Any], machines: MachineOf) -> Point:
    try:
        return Point(varied(base, values, machines), values)
    except ValueError as error:
        return Point(None, values, problem=f"{type(error).__name__}: {error}", base=base)


def _drawn(point: Point, draws: Callable[[Scenario], list[Scenario]]) -> Iterator[Point]:
    """A point in every draw; in one alone, if its scenario is at fault: playing it will say why."""
    if point.scenario is None:
        yield point
        return
    for place, draw in enumerate(draws(point.scenario)):
        yield replace(point, scenario=point.scenario.with_(seed=draw.seed, sequences=draw.sequences), draw=place)


def _draws(scenario: Scenario, count: int) -> list[Scenario]:
    try:
        return draws_of(scenario, count)
    except (ValueError, OSError):
        return [scenario]


def _remembered(make: Callable[[Scenario], T], key: Callable[[Scenario], str]) -> Callable[[Scenario], T]:
    """``make``, called once for all scenarios that have one key."""
    known: dict[str, T] = {}

    def remembered(scenario: Scenario) -> T:
        if (name := key(scenario)) not in known:
            known[name] = make(scenario)
        return known[name]

    return remembered


# --- keys -------------------------------------------------------------------------------------------------------------


def _identity(point: Point) -> str:
    """A text that is equal for equal points."""
    if point.scenario is None:
        return canonical([point.axes, point.problem])
    return canonical([point.scenario.to_dict(), point.draw])


def setting_key(scenario: Scenario) -> str:
    """A text that is equal for scenarios that differ in policy and parameters alone."""
    return canonical(scenario.with_(policy="", parameters={}).to_dict())


def canonical(value: object) -> str:
    """The one JSON text of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)
