"""What a command line asks about: the scenario, a file or the default with single values changed; traces by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sim.runs.scenario import Scenario
    from traces.trace import Trace

ScenarioOption = Annotated[
    str | None,
    typer.Option("--scenario", "-s", metavar="FILE", help="Scenario (YAML). Default: that of examples/reference.yaml."),
]
PolicyOption = Annotated[
    str | None,
    typer.Option("--policy", metavar="NAME", help="Policy; see [bold]trilane policies[/]. Default: the scenario's."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one key of the scenario, such as [bold]hardware=rtx4090-ddr5[/] or [bold]batch=4[/]; repeatable.",
    ),
]


class NamesError(ValueError):
    """A list of names with none in it, or one of them twice."""


def scenario_of(file: str | None, changes: Sequence[str] | None, policy: str | None = None) -> Scenario:
    """Read the scenario and apply ``KEY=VALUE`` changes, values in YAML. Raises ScenarioError.

    A ``policy`` other than the scenario's has none of its parameters: they were written for that one.
    """
    from sim.runs.scenario import Scenario

    scenario = Scenario.from_yaml(file) if file else Scenario()
    if changes:
        scenario = Scenario.from_dict({**scenario.to_dict(), **changes_of(changes)}, "--set")
    return scenario if policy in (None, scenario.policy) else scenario.with_(policy=policy, parameters={})


def changes_of(changes: Sequence[str] | None) -> dict[str, Any]:
    """Keys and values of ``--set KEY=VALUE``. Raises ScenarioError."""
    return dict(map(_change, changes or ()))


def _change(text: str) -> tuple[str, Any]:
    import yaml

    from sim.runs.scenario import ScenarioError

    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ScenarioError(f"--set: expected KEY=VALUE, got {text!r}")
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError:
        raise ScenarioError(f"--set {key}: {value!r} is not a YAML value") from None


def inputs_of(file: str | None, scenario: Scenario) -> tuple[str | None, ...]:
    """What a scenario is read from, its file and those that it names: no result may be written there."""
    return (file, scenario.trace, scenario.calibration, scenario.hardware, scenario.model)


def names_in(text: str) -> list[str]:
    """The names of ``--policies A,B``, each once. Raises NamesError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise NamesError(f"--policies: expected at least one name, or several with commas between them, got {text!r}")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise NamesError(f"--policies: expected every name once, got {', '.join(twice)} more than once")
    return names


def read_any(name: str) -> Trace:
    """A trace by its bundled name, its file, or a route_trace v1 CSV."""
    if name.lower().endswith(".csv"):
        from traces.importers.route_trace_v1 import import_route_trace

        return import_route_trace(name)
    from traces.library import load_trace

    return load_trace(name)


def short_name(trace: str) -> str:
    """A trace's name without folder and ending."""
    if trace.startswith("synthetic:"):
        return trace
    return Path(trace).name.removesuffix(".safetensors").removesuffix(".csv").removesuffix(".route")


def trace_in_words(name: str, trace: Trace) -> str:
    """A trace's name, and that it is made up where the name does not say so."""
    made_up = trace.provenance.get("synthetic") and not name.startswith("synthetic:")
    return f"{name} (synthetic)" if made_up else name


def describe(scenario: Scenario) -> str:
    """A scenario in one line."""
    from traces.library import load_trace
    from traces.noise import NoisyForecasts

    trace = load_trace(scenario.trace)
    model = scenario.model or trace.shape.name
    room = "the card's own memory"
    if scenario.cached_share is not None:
        room = f"{scenario.cached_share:.0%} of the experts cached"
    elif scenario.gpu_memory_gb is not None:
        room = f"{scenario.gpu_memory_gb:g} GB of GPU memory"
    routing = f"routing of {trace_in_words(scenario.trace, trace)}"
    told = f"{model} on {scenario.hardware}, {room}, batch {scenario.batch}, {routing}"
    if scenario.runtime != "eager":
        told += f", runtime {scenario.runtime}"
    if scenario.sampled_steps is not None:
        told += f", at most {scenario.sampled_steps} decode steps sampled"
    if scenario.noisy_forecast_recall is None:
        return told
    return f"{told}; where it lacks forecasts, {NoisyForecasts(scenario.noisy_forecast_recall)}"
