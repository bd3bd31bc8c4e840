"""The axes of a sweep: keys of a scenario, dials and single numbers of its machine, parameters of its policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any

from policies.registry import SYSTEMS, ChoiceError, system
from sim.machine.dials import DIALS, LINK, PCIE, turned
from sim.machine.hardware import Hardware, hardware_keys, load_hardware
from sim.runs.scenario import Scenario, ScenarioError
from trilane.common.errors import TrilaneError
from trilane.common.hints import hints_of, plain_types
from trilane.common.names import unknown
from trilane.common.quoting import quoted
from trilane.common.schema import from_dict

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
    "draft_tokens": "drafts a step (tokens)",
    "draft_acceptance": "acceptance of drafts",
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
    return load_hardware(scenario.hardware, scenario.hardware_overrides)


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
    """The same scenario; 0 and 0.0 are one value, and are written as one."""
    return scenario.with_(**{name: key_value(name, getattr(scenario, name)) for name in NUMBERS})


def key_value(name: str, value: Any) -> Any:
    """A value as its key's type hint says; one number where a list is expected is a list of one."""
    if name in _LISTS and isinstance(value, int | float):
        value = [value]
    return from_dict(_HINTS[name], value, name, ScenarioError)


def policy_in(value: object) -> tuple[str, dict[str, Any]]:
    """A policy and its parameters from a name, or from ``{name: {parameter: value}}``. Raises SweepError."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, Mapping) and len(value) == 1:
        [(name, parameters)] = value.items()
        if isinstance(parameters, Mapping):
            return str(name), dict(parameters)
    raise SweepError(f"policy: expected a name, or `name: {{parameter: value}}`, got {quoted(value)}")


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
