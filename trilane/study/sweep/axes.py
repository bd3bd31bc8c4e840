"""Axes of a sweep and their values: keys of a scenario, dials and numbers of its machine, parameters of its policy.

Values are written as on a command line or in a sweep file: a list, one value, or a range such as 8..64.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from policies.registry import SYSTEMS, ChoiceError, system
from sim.machine.cards import load_machine
from sim.machine.dials import DIALS, LINK, PCIE, link_bytes_per_s, turned
from sim.machine.hardware import Hardware, hardware_keys
from sim.runs.scenario import Scenario, ScenarioError
from trilane.common.errors import TrilaneError
from trilane.common.hints import hints_of, plain_types
from trilane.common.names import unknown
from trilane.common.quoting import quoted
from trilane.common.schema import from_dict
from trilane.common.yaml_files import parse_yaml
from trilane.study import policy_choice

PARAMETER = "parameters."
_HINTS = hints_of(Scenario)
SCENARIO_KEYS = tuple(_HINTS)
NUMBERS: Mapping[str, type] = {  # keys that hold a number, or a list of numbers
    name: float if float in kinds else int
    for name, kinds in ((name, plain_types(hint)) for name, hint in _HINTS.items())
    if kinds & {int, float}
}
_LISTS = ("sequences", "noisy_forecast_recall")  # keys that hold a list of numbers
MachineOf = Callable[[Scenario], Hardware]


class SweepError(TrilaneError):
    """A sweep that cannot be understood or kept; the message says where, what was expected and what to do."""


_SETS: Mapping[str, tuple[str, ...]] = {
    **{name: dial.keys for name, dial in DIALS.items()}, PCIE: LINK, "gpu_memory_gb": ("gpu.memory_bytes",),
}  # fmt: skip  # the numbers of the machine that an axis sets, the one it is named after first
_LABELS: Mapping[str, str] = {
    **{name: dial.label for name, dial in DIALS.items()},
    PCIE: "PCIe generation x lanes",
    "gpu_memory_gb": "GPU memory (GB)",
    "cached_share": "share of experts cached",
    "batch": "batch (sequences)",
    "prompt_tokens": "prompt (tokens)",
    "generated_tokens": "generated (tokens)",
    "prefill_chunk_tokens": "prefill chunk (tokens)",
    "sampled_steps": "sampled decode steps",
    "sampled_prompt_tokens": "sampled prompt (tokens)",
    "noisy_forecast_recall": "recall of synthetic forecasts",
    "threads": "threads of the CPU",
    "draft_tokens": "drafts a step (tokens)",
    "draft_acceptance": "acceptance of drafts",
    "draft_offered": "steps with a further draft",
    "draft_layers": "layers that draft",
    "draft_again": "tokens computed again",
    "draft_ns": "a draft (ns)",
}
_UNITS = {"_bytes_per_s": "bytes/s", "_flops_per_s": "FLOP/s", "_bytes": "bytes", "_ns": "ns", "_permille": "permille",
          "_w": "W", "_tokens": "tokens"}


def axis_label(name: str) -> str:
    """The name of an axis as tables and pictures write it, with its unit. Raises SweepError for no axis."""
    check_axis(name)
    if name in _LABELS:
        return _LABELS[name]
    plain = name.removeprefix(PARAMETER)
    ending = next((end for end in _UNITS if plain.endswith(end)), "")
    words = plain.removesuffix(ending).replace("_", " ").replace(".", " ") if ending else plain.replace("_", " ")
    return f"{words} ({_UNITS[ending]})" if ending else words


def check_axis(name: str) -> None:
    """Raises SweepError, naming the valid ones, for what cannot be varied."""
    if not isinstance(name, str):
        raise SweepError(f"expected the name of an axis, got {quoted(name)}")
    if name.startswith(PARAMETER):
        takers(name)
    elif name not in (known := (*SCENARIO_KEYS, *DIALS, PCIE, *hardware_keys())):
        raise SweepError(f"{unknown('axis', name, known)}, and parameters.NAME for those of policies")


def check_together(names: Iterable[str]) -> None:
    """Raises SweepError for two axes that set the same number: one of them would have no effect.

    A dial goes together with a number that it only scales, such as ``pcie_gbps`` with ``link.d2h_bytes_per_s``.
    """
    for one, other in combinations(names, 2):
        first, second = _SETS.get(one, ()), _SETS.get(other, ())
        if set(first) & set(second) or one in second[:1] or other in first[:1]:
            raise SweepError(f"{one} and {other} set the same number of the machine; vary one of them")


def takers(name: str) -> list[str]:
    """The policies that have the parameter of ``parameters.X``. Raises SweepError if none has."""
    parameter = name.removeprefix(PARAMETER)
    having = [policy for policy, entry in SYSTEMS.items() if parameter in (row[0] for row in entry.parameter_table())]
    if not having:
        every = dict.fromkeys(row[0] for entry in SYSTEMS.values() for row in entry.parameter_table())
        raise SweepError(unknown("policy with the parameter", parameter, every))
    return having


def vary(scenario: Scenario, name: str, value: object) -> Scenario:
    """The scenario with one axis at ``value``.

    ``name`` is a key of a scenario, a dotted key of its hardware, ``parameters.NAME`` or a dial. Another ``policy``
    starts from its own defaults, since ``parameters`` belong to the scenario's. Raises SweepError for an unknown name,
    and what the value cannot be.
    """
    return varied(scenario, {name: value}, machine_of)


def machine_of(scenario: Scenario) -> Hardware:
    """The machine that a scenario names, with its overrides."""
    return load_machine(scenario.hardware, scenario.hardware_overrides, scenario.disk)


def varied(scenario: Scenario, values: Mapping[str, Any], machine_of: MachineOf) -> Scenario:
    """The scenario with several axes at their values, in any order: a machine or a policy is set before its numbers."""
    for name in values:
        check_axis(name)
    keys = scenario_keys(scenario, {name: value for name, value in values.items() if name in SCENARIO_KEYS})
    scenario = scenario.with_(**{name: key_value(name, value) for name, value in keys.items()})
    for name, value in values.items():
        if name in DIALS or name == PCIE:
            scenario = _override(scenario, turned(machine_of(scenario), name, value))
    scenario = _override(scenario, {name: value for name, value in values.items() if name in hardware_keys()})
    given = {name.removeprefix(PARAMETER): value for name, value in values.items() if name.startswith(PARAMETER)}
    return _with_parameters(scenario, given) if given else scenario


def scenario_keys(scenario: Scenario, values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that these values change; ``policy`` may have parameters, as ``{dali: {window: 8}}``."""
    if "policy" not in values:
        return dict(values)
    policy, parameters = policy_in(values["policy"])
    own = scenario.parameters if policy == scenario.policy and not isinstance(values["policy"], Mapping) else {}
    return {"parameters": parameters or own, **values, "policy": policy}


def with_floats(scenario: Scenario) -> Scenario:
    """The scenario with whole numbers as floats where its keys hold floats: 0 and 0.0 are one value."""
    return scenario.with_(**{name: key_value(name, getattr(scenario, name)) for name in NUMBERS})


def key_value(name: str, value: Any) -> Any:
    """A value as its key's type hint says; one number where a list is expected is a list of one."""
    if name in _LISTS and isinstance(value, int | float):
        value = [value]
    return from_dict(_HINTS[name], value, name, ScenarioError)


def policy_in(value: object) -> tuple[str, dict[str, Any]]:
    """A policy and its parameters (``policy_choice.policy_in``). Raises SweepError."""
    return policy_choice.policy_in(value, SweepError)


def _override(scenario: Scenario, changes: Mapping[str, Any]) -> Scenario:
    return scenario.with_(hardware_overrides={**scenario.hardware_overrides, **changes}) if changes else scenario


def _with_parameters(scenario: Scenario, given: Mapping[str, Any]) -> Scenario:
    """The scenario with some parameters of its policy. Raises SweepError for a parameter that the policy lacks."""
    try:
        has = [row[0] for row in system(scenario.policy).parameter_table()]
    except ChoiceError as error:
        raise SweepError(str(error)) from None
    for name in given:
        if name not in has:
            raise SweepError(unknown(f"parameter of {scenario.policy!r}", name, has))
    return scenario.with_(parameters={**scenario.parameters, **given})


POINTS = 8  # of a range that does not say how many
MOST_POINTS = 10_000
_NUMBER = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*(?:/\s*(\d+)\s*)?")
_EVEN = ("_share", "_fraction", "_permille", "_recall", "_acceptance")  # names of what is spread evenly, not by ratio


def values_in(name: str, text: str) -> tuple[Any, ...]:
    """The values that a text names for an axis, each once.

    ``1,4,16``: these. ``8..64``: eight points at even ratios, in three digits; powers of two between the ends
    where both are whole and the axis counts something (``batch=1..16``); even steps for shares and for parameters that
    are no whole numbers. ``8..64/5``: five points. Raises SweepError, and HardwareError for a PCIe slot that is none.
    """
    check_axis(name)
    if match := _RANGE.fullmatch(text):
        return _range(name, text, match)
    return distinct(_scalar(name, part) for part in text.split(","))


def values_of(name: str, given: object) -> tuple[Any, ...]:
    """The values of an axis in a sweep file: a list, one value, or text as on the command line. Raises SweepError."""
    check_axis(name)
    if isinstance(given, str):
        return values_in(name, given)
    values = distinct(given if isinstance(given, list) else [given])
    if not values:
        raise SweepError(f"{name}: expected one value or more, got an empty list")
    return tuple(number_in(value) if isinstance(value, str) and is_number(name) else value for value in values)


def distinct(values: Iterable[Any]) -> tuple[Any, ...]:
    """Each once, in order; 1 and 1.0 are one, 1 and true are not."""
    kept: dict[Any, Any] = {}
    for value in values:
        kept.setdefault(_identity(value), value)
    return tuple(kept.values())


def _identity(value: Any) -> Any:
    """A key that is equal for values that are one."""
    if isinstance(value, Mapping):
        return frozenset((name, _identity(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_identity, value))
    return isinstance(value, bool), value


def _scalar(name: str, text: str) -> Any:
    """One value of a list, read as YAML reads it; ``25e9`` is a number here too."""
    if not text.strip():
        raise SweepError(f"{name}: expected a value between commas, got none")
    value = parse_yaml(text, name, SweepError)
    if name == PCIE:
        link_bytes_per_s(value)  # raises for what no link has: a slip, where other numbers may be out of reach of some
    return number_in(value) if isinstance(value, str) and is_number(name) else value


def number_in(text: str) -> Any:
    """A number that YAML 1.1 takes for text, such as 25e9; other text as it is."""
    return float(text) if re.fullmatch(_NUMBER, text.strip()) else text


def is_number(name: str) -> bool:
    """True if the values of an axis are numbers (of some, text or null as well)."""
    if name.startswith(PARAMETER):
        return bool(_kinds(name) & {int, float})
    return name in DIALS or "." in name or name in NUMBERS


def _counts(name: str) -> bool:
    """True if an axis counts something: batches, tokens, a policy's window."""
    return float not in _kinds(name) if name.startswith(PARAMETER) else NUMBERS.get(name) is int


def _kinds(name: str) -> frozenset[type]:
    """Types of ``parameters.X`` in the policies that have it."""
    hints = (hints_of(SYSTEMS[policy].parameters)[name.removeprefix(PARAMETER)] for policy in takers(name))
    return frozenset[type]().union(*map(plain_types, hints))


# --- ranges -----------------------------------------------------------------------------------------------------------


def _range(name: str, text: str, match: re.Match[str]) -> tuple[Any, ...]:
    """The points of LOW..HIGH or LOW..HIGH/COUNT."""
    low, high = float(match[1]), float(match[2])
    if not is_number(name) or not -math.inf < low < high < math.inf:
        raise SweepError(f"{name}: expected a range LOW..HIGH of numbers, such as 8..64, got {quoted(text)}")
    if match[3] is not None and not 2 <= float(match[3]) <= MOST_POINTS:
        raise SweepError(f"{name}: expected 2 to {MOST_POINTS:,} points in a range, got {quoted(text)}")
    count = None if match[3] is None else int(match[3])
    whole = _counts(name) and low.is_integer() and high.is_integer()
    if whole and count is None and low >= 1:
        return _doublings(int(low), int(high))
    spread = np.linspace if low <= 0 or _is_even(name) else np.geomspace
    inner = spread(low, high, count or POINTS)[1:-1].tolist()
    ends = (int(low), int(high)) if low.is_integer() and high.is_integer() else (low, high)
    return distinct([ends[0], *(map(round, inner) if whole else _rounded(inner)), ends[1]])


def _is_even(name: str) -> bool:
    """True if a range goes in even steps: shares do, and weights of policies, which are mostly 0 to 1."""
    return name.endswith(_EVEN) or (name.startswith(PARAMETER) and not _counts(name))


def _doublings(low: int, high: int) -> tuple[int, ...]:
    """Both ends, and the powers of two between them."""
    powers = (1 << bit for bit in range(high.bit_length()))
    return (low, *(power for power in powers if low < power < high), high)


def _rounded(values: Sequence[float]) -> list[float]:
    """Three digits that count; more where values would fall together."""
    rounded: list[float] = []
    for digits in range(3, 18):
        rounded = [float(f"{value:.{digits}g}") for value in values]
        if len(set(rounded)) == len(values):
            break
    return rounded
