"""A grid: a scenario, and what of it is varied; its points are the scenarios that a sweep plays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from policies.registry import policy_names
from sim.machine.hardware import Hardware, load_hardware
from sim.runs.scenario import Scenario
from trilane.common.names import unknown
from trilane.common.yaml_files import YamlError, read_yaml
from trilane.study.draws import draws_of
from trilane.study.sweep.axes import PARAMETER, MachineOf, SweepError, policy_in, takers, varied, with_floats
from trilane.study.sweep.checks import check_size, check_value, checked
from trilane.study.sweep.values import values_of

CLAIRVOYANT_POLICY = "oracle"
KEYS = ("scenario", "grid", "draws", "clairvoyant")


@dataclass(frozen=True)
class Point:
    """One scenario of a sweep, in one draw, and where it stands: its value on every axis, as asked.

    ``scenario`` is None where the values do not make one of ``base``; ``problem`` then says why.
    """

    scenario: Scenario | None
    axes: Mapping[str, Any]
    draw: int = 0
    problem: str = ""
    base: Scenario | None = None


@dataclass(frozen=True)
class Grid:
    """What a sweep plays: every combination of the values of its axes, of each product in ``axes`` one after the other.

    Axes are named as in ``sweep.axes.vary``; the policy ``all`` stands for every one. ``parameters.X`` applies to
    those policies that have X; the others appear once. ``clairvoyant`` adds the policy ``oracle`` beside every setting.
    Every point is played in ``draws`` draws. Raises SweepError for what no point could be made of.
    """

    scenario: Scenario = field(default_factory=Scenario)
    axes: tuple[Mapping[str, tuple[Any, ...]], ...] = ({},)
    draws: int = 1
    clairvoyant: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "scenario", with_floats(self.scenario))
        object.__setattr__(self, "axes", tuple(checked(each) for each in self.axes))
        if any("policy" not in each for each in self.axes):
            check_value("policy", {self.scenario.policy: self.scenario.parameters})
        if not isinstance(self.draws, int) or isinstance(self.draws, bool) or self.draws < 1:
            raise SweepError(f"draws: expected a whole number >= 1, got {self.draws!r}")
        if not isinstance(self.clairvoyant, bool):
            raise SweepError(f"clairvoyant: expected true or false, got {self.clairvoyant!r}")
        check_size(self.axes, self.draws)

    @property
    def names(self) -> list[str]:
        """All axes, in the order written."""
        return list(dict.fromkeys(name for each in self.axes for name in each))

    @classmethod
    def from_yaml(cls, path: str | Path) -> Grid:
        """Read a sweep file. Raises SweepError with the file's name, and the key's where one is at fault."""
        try:
            document = read_yaml(path)
        except OSError as error:
            raise SweepError(f"{path}: {error.strerror}") from None
        except YamlError as error:
            raise SweepError(str(error)) from None
        return cls.from_dict(document, str(path))

    @classmethod
    def from_dict(cls, document: Any, where: str = "sweep") -> Grid:
        """Build from a mapping with the keys of a sweep file. Raises SweepError, which begins with ``where``."""
        try:
            return cls(**_read(document))
        except ValueError as error:  # ours, whichever part has found it
            raise SweepError(f"{where}: {error}") from None


def _read(document: Any) -> dict[str, Any]:
    """The fields of a Grid that a document names."""
    if not isinstance(document, Mapping):
        raise SweepError(f"expected lines of `key: value`, got {document!r:.60}")
    for key in document:
        if key not in KEYS:
            raise SweepError(unknown("key", str(key), KEYS))
    given = dict(document)
    base = given.get("scenario") or {}
    if not isinstance(base, Mapping):
        raise SweepError(f"scenario: expected lines of `key: value`, got {base!r:.60}")
    given["scenario"] = Scenario.from_dict(base, "scenario")
    products = given.pop("grid", None) or {}
    listed = products if isinstance(products, list) else [products]
    return {**given, "axes": tuple(_axes(each) for each in listed)}


def _axes(document: Any) -> dict[str, tuple[Any, ...]]:
    if not isinstance(document, Mapping):
        raise SweepError(f"grid: expected lines of `axis: values`, or a list of such, got {document!r:.60}")
    try:
        return {name: values_of(name, given) for name, given in document.items()}
    except ValueError as error:
        raise SweepError(f"grid: {error}") from None


# --- points -----------------------------------------------------------------------------------------------------------


def points(grid: Grid) -> list[Point]:
    """Every point once, in the order written, the first axis slowest; the draws of a point follow each other."""
    machine_of = _remembered_machines()
    draws_like = _remembered_draws(grid.draws)
    found: dict[str, Point] = {}
    for axes in grid.axes:
        for values in _combinations(axes, grid):
            for point in _drawn(_point(grid.scenario, values, machine_of), draws_like):
                found.setdefault(_identity(point), point)
    return list(found.values())


def _combinations(axes: Mapping[str, tuple[Any, ...]], grid: Grid) -> Iterator[dict[str, Any]]:
    """The values of one product's points; a parameter that the policy of a point lacks is left out, and so is every
    parameter of a clairvoyant run that nobody asked for: a yardstick does not change with what it measures.
    """
    asked = axes.get("policy", (grid.scenario.policy,))
    added = {CLAIRVOYANT_POLICY} - {policy_in(value)[0] for value in asked} if grid.clairvoyant else set()
    axes = {**axes, "policy": (*asked, *added)} if added else axes
    having = {name: set(takers(name)) - added for name in axes if name.startswith(PARAMETER)}
    having["parameters"] = set(policy_names()) - added
    for combination in product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        policy, _ = policy_in(values.get("policy", grid.scenario.policy))
        yield {name: value for name, value in values.items() if policy in having.get(name, (policy,))}


def _point(base: Scenario, values: Mapping[str, Any], machine_of: MachineOf) -> Point:
    try:
        return Point(varied(base, values, machine_of), values)
    except ValueError as error:
        return Point(None, values, problem=f"{type(error).__name__}: {error}", base=base)


def _drawn(point: Point, draws_like: Callable[[Scenario], list[Scenario]]) -> Iterator[Point]:
    """A point in every draw; in one alone, if its scenario is at fault: playing it will say why."""
    if point.scenario is None:
        yield point
        return
    for draw, scenario in enumerate(draws_like(point.scenario)):
        yield replace(point, scenario=scenario, draw=draw)


def _identity(point: Point) -> str:
    """The same for points that are one."""
    if point.scenario is None:
        return canonical([point.axes, point.problem])
    return canonical([point.scenario.to_dict(), point.draw])


def canonical(value: object) -> str:
    """The one JSON text of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, default=str)


def setting_key(scenario: Scenario) -> str:
    """The same for scenarios that differ in policy and parameters alone."""
    return canonical(scenario.with_(policy="", parameters={}).to_dict())


def _remembered_machines() -> MachineOf:
    """Reads every machine once."""
    known: dict[str, Hardware] = {}

    def machine_of(scenario: Scenario) -> Hardware:
        key = canonical([scenario.hardware, scenario.hardware_overrides])
        if key not in known:
            known[key] = load_hardware(scenario.hardware, scenario.hardware_overrides)
        return known[key]

    return machine_of


def _remembered_draws(count: int) -> Callable[[Scenario], list[Scenario]]:
    """Draws every setting once, the same for all its policies."""
    known: dict[str, list[Scenario]] = {}

    def draws_like(scenario: Scenario) -> list[Scenario]:
        if count == 1:
            return [scenario]
        key = setting_key(scenario)
        if key not in known:
            known[key] = _draws(scenario, count)
        return [scenario.with_(seed=draw.seed, sequences=draw.sequences) for draw in known[key]]

    return draws_like


def _draws(scenario: Scenario, count: int) -> list[Scenario]:
    try:
        return draws_of(scenario, count)
    except (ValueError, OSError):
        return [scenario]
