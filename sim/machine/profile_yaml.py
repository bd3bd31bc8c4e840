"""The section ``measured`` of a hardware file: read strictly, written readably."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import yaml

from sim.machine.interpolation import Grid, Measured, Rows, Table
from sim.machine.plan_costs import PlanCost
from sim.machine.plausibility import HardwareError
from sim.machine.profile import Kind, MeasuredModel, Profile, Share, Sizes
from sim.machine.sourced_yaml import only, typed
from trilane.common.files import atomic_path

if TYPE_CHECKING:
    from sim.machine.hardware import Hardware

MAX_NS = 10**15  # eleven days: a longer "time" is a slip
_SECOND_AXIS = {"attention_decode": "context", "attention_prefill": "tokens"}
_SCALARS: Mapping[str, Any] = {name: hint for name, hint in get_type_hints(MeasuredModel).items() if name != "sizes"}
# All or none: earlier profiles have none.
_LATER = ("launch_lead", "launch_tail", "gpu_with_cpu_permille", "cpu_with_gpu_permille")
_ONLY_WITH = {"shared": "shared_width", "dense_ffn": "dense_width", "dense_launch": "dense_width"}


def read_profile(document: object, where: str) -> Profile:
    """The profile that the section ``measured`` of the hardware file ``where`` holds. Raises HardwareError."""
    where = f"{where}, measured"
    names = [f.name for f in fields(Profile)]
    sections = {name: _mapping(part, f"{where}, {name}") for name, part in _mapping(document, where).items()}
    only(sections, names, where, complete=True)
    return Profile(
        machine=_machine(sections["machine"], f"{where}, machine"),
        plan=_decisions(sections["plan"], f"{where}, plan"),
        foresee=_decisions(sections["foresee"], f"{where}, foresee"),
        rates={key: _rate(key, value, f"{where}, rates") for key, value in sections["rates"].items()},
        models={name: _model(part, f"{where}, models, {name}") for name, part in sections["models"].items()},
    )


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise HardwareError(f"{where}: expected a mapping with text for keys, got {value!r:.80}")
    return value


def _machine(facts: Mapping[str, Any], where: str) -> dict[str, str | int | float]:
    for key, value in facts.items():
        if not isinstance(value, str) and (isinstance(value, bool) or not _finite(value)):
            raise HardwareError(f"{where}: {key} must be text or a finite number (quote dates), got {value!r}")
    typed("kind", facts.get("kind"), Kind, where)
    return dict(facts)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _decisions(rows: Mapping[str, Any], where: str) -> dict[str, PlanCost]:
    costs = {}
    for policy, row in rows.items():
        here = f"{where}, {policy}"
        only(_mapping(row, here), PlanCost._fields, here, complete=True)
        costs[policy] = PlanCost(**{key: _rate(key, value, here) for key, value in row.items()})
    return costs


def _rate(key: str, value: object, where: str) -> float:
    number: float = typed(key, value, float, where)
    if not (_finite(number) and number >= 0):
        raise HardwareError(f"{where}: {key} must be a finite number >= 0, got {value!r}")
    return number


# --- one model --------------------------------------------------------------------------------------------------------


def _model(document: object, where: str) -> MeasuredModel:
    """Sizes, and all tables that a model of these sizes has."""
    parts = _mapping(document, where)
    sizes = _sizes(parts.get("sizes"), f"{where}, sizes")
    absent = [name for name, width in _ONLY_WITH.items() if not getattr(sizes, width)]
    absent += [] if any(name in parts for name in _LATER) else _LATER
    only(parts, ["sizes", *(name for name in _SCALARS if name not in absent)], where, complete=True)
    values = {name: _reader(name)(parts[name], f"{where}, {name}") for name in _SCALARS if name in parts}
    return MeasuredModel(sizes=sizes, **values)


def _sizes(document: object, where: str) -> Sizes:
    parts, hints = _mapping(document, where), get_type_hints(Sizes)
    only(parts, hints, where, complete=True)
    values = {name: typed(name, parts[name], hint, where) for name, hint in hints.items()}
    return Sizes(**values)


def _reader(name: str) -> Callable[[object, str], Any]:
    """What reads the field ``name`` of a model."""
    hint = _SCALARS[name]
    if name in _SECOND_AXIS:
        return lambda document, where: _grid(document, _SECOND_AXIS[name], where)
    if hint in (Share, Share | None):
        return _share
    return _measured if hint in (Measured, Measured | None) else _table


def _measured(document: object, where: str) -> Measured:
    parts = _mapping(document, where)
    only(parts, Measured._fields, where, complete=True)
    found = Measured(**{name: _time(name, value, where) for name, value in parts.items()})
    _check_spread([found.ns], [found.low], [found.high], where)
    return found


def _share(document: object, where: str) -> Share:
    parts = _mapping(document, where)
    only(parts, Share._fields, where, complete=True)
    found = Share(**{name: typed(name, value, int, where) for name, value in parts.items()})
    if not all(1 <= value <= 1000 for value in found):
        raise HardwareError(f"{where}: expected 1..1000 permille (running together never helps), got {tuple(found)}")
    _check_spread([found.permille], [found.low], [found.high], where)
    return found


def _table(document: object, where: str) -> Table:
    parts = _mapping(document, where)
    only(parts, [f.name for f in fields(Table)], where, complete=True)
    at = _axis("at", parts["at"], where)
    ns, low, high = (_times(name, parts[name], len(at), where) for name in ("ns", "low", "high"))
    _check_spread(ns, low, high, where)
    return Table(at, ns, low, high)


def _grid(document: object, second: str, where: str) -> Grid:
    parts = _mapping(document, where)
    only(parts, ("batch", second, "ns", "low", "high"), where, complete=True)
    batch, length = _axis("batch", parts["batch"], where), _axis(second, parts[second], where)
    ns, low, high = (_rows(name, parts[name], (len(batch), len(length)), where) for name in ("ns", "low", "high"))
    for row in zip(ns, low, high, strict=True):
        _check_spread(*row, where)
    return Grid(batch, length, ns, low, high)


def _axis(key: str, given: object, where: str) -> tuple[int, ...]:
    """Points of a table: whole numbers >= 1, ascending."""
    numbers = tuple(typed(key, value, int, where) for value in _list(key, given, None, where))
    if not numbers or numbers[0] < 1 or any(a >= b for a, b in pairwise(numbers)):
        raise HardwareError(f"{where}: {key} must be ascending whole numbers >= 1, got {given!r}")
    return numbers


def _times(key: str, given: object, length: int, where: str) -> tuple[int, ...]:
    return tuple(_time(key, value, where) for value in _list(key, given, length, where))


def _rows(key: str, given: object, size: tuple[int, int], where: str) -> Rows:
    rows = _list(key, given, size[0], where)
    return tuple(_times(f"{key}[{i}]", row, size[1], where) for i, row in enumerate(rows))


def _list(key: str, given: object, length: int | None, where: str) -> list[Any]:
    if not isinstance(given, list) or length not in (None, len(given)):
        entries = "" if length is None else f" of {length} (one for each point)"
        came = f"{len(given)}" if isinstance(given, list) else repr(given)
        raise HardwareError(f"{where}: {key} must be a list{entries}, got {came}")
    return given


def _time(key: str, value: object, where: str) -> int:
    ns: int = typed(key, value, int, where)
    if not 0 <= ns <= MAX_NS:
        raise HardwareError(f"{where}: {key} must be 0..{MAX_NS:g} ns, got {value!r}")
    return ns


def _check_spread(middle: Sequence[int], low: Sequence[int], high: Sequence[int], where: str) -> None:
    """A median lies between its quartiles. Raises HardwareError."""
    for m, a, b in zip(middle, low, high, strict=True):
        if not a <= m <= b:
            raise HardwareError(f"{where}: expected low <= median <= high, got {a}, {m}, {b}")


# --- writing ----------------------------------------------------------------------------------------------------------


def profile_document(profile: Profile) -> dict[str, Any]:
    """The section ``measured``, of plain values; ``read_profile`` is its inverse."""
    return {
        "machine": dict(profile.machine),
        "plan": {policy: cost._asdict() for policy, cost in profile.plan.items()},
        "foresee": {policy: cost._asdict() for policy, cost in profile.foresee.items()},
        "rates": dict(profile.rates),
        "models": {name: _model_document(model) for name, model in profile.models.items()},
    }


def _model_document(model: MeasuredModel) -> dict[str, Any]:
    parts = {name: getattr(model, name) for name in _SCALARS}
    tables = {name: _plain(part, name) for name, part in parts.items() if part is not None}
    return {"sizes": dict(vars(model.sizes)), **tables}


def _plain(part: Table | Grid | Measured | Share, name: str) -> dict[str, Any]:
    """One table or number of a model, in lists and mappings."""
    if isinstance(part, Measured | Share):
        return part._asdict()
    keys = {"length": _SECOND_AXIS.get(name, "")}
    return {keys.get(key, key): _lists(value) for key, value in vars(part).items()}


def _lists(value: Any) -> Any:
    return [_lists(each) for each in value] if isinstance(value, tuple) else value


class _Lines(dict[str, Any]):
    """A mapping with a line for every key."""


class _Dumper(yaml.SafeDumper):
    """Lists of numbers, and innermost mappings that are no ``_Lines``, on one line each."""


_Dumper.add_representer(
    _Lines, lambda dumper, lines: dumper.represent_mapping("tag:yaml.org,2002:map", lines, flow_style=False)
)


def write_profile(hardware: Hardware, path: str | Path) -> None:
    """Write a machine and its profile as YAML, aside first and then renamed; ``load_hardware`` reads it back.

    Raises OSError where no file can be put.
    """
    document = hardware.document()
    measured = document["measured"]
    document["measured"] = {**measured, **{name: _Lines(measured[name]) for name in ("machine", "rates")}}
    text = yaml.dump(document, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120)
    with atomic_path(path) as aside:
        aside.write_text(text, encoding="utf-8")
