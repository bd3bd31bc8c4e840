"""Options that several verbs have, and ``grouped``, which reads a group of options off a dataclass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from trilane.common.errors import TrilaneError
from trilane.output.pages.output import note, working

if TYPE_CHECKING:
    from sim.runs.run import Run

Verb = Callable[..., None]
MOST_DRAWS = 10_000
MOST_PROCESSES = 1024
MOST_CORES = 4096
OWN_POLICY = "FILE.py or FILE.py:NAME loads your own"


class OptionError(TrilaneError):
    """An option whose value cannot be used, or options that exclude each other."""


def grouped(verb: Verb) -> Verb:
    """A verb for typer: a parameter annotated with a dataclass becomes one option for each field of that dataclass."""
    hints = get_type_hints(verb, include_extras=True)
    parameters = signature(verb).parameters
    groups = {name: hints[name] for name in parameters if is_dataclass(hints[name])}
    options = [
        option
        for name, parameter in parameters.items()
        for option in (_options(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])])
    ]

    @wraps(verb)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        verb(**given)

    run.__annotations__ = {option.name: option.annotation for option in options}
    run.__signature__ = Signature([option.replace(kind=Parameter.KEYWORD_ONLY) for option in options])  # type: ignore[attr-defined]
    return run


def _options(group: Any) -> Iterator[Parameter]:
    """The fields of a dataclass as parameters."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = Parameter.empty if field.default is MISSING else field.default
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])


def help_of(verb: Verb) -> str:
    """The docstring of a verb without line breaks within paragraphs, which typer would keep."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (verb.__doc__ or "").split("\n\n"))


# --- a scenario, and how often it is simulated ------------------------------------------------------------------------

ScenarioOption = Annotated[
    str | None,
    typer.Option("--scenario", "-s", metavar="FILE", help="Scenario (YAML). Default: that of examples/reference.yaml."),
]
PolicyOption = Annotated[
    str | None,
    typer.Option("--policy", metavar="NAME",
                 help=f"Policy; see [bold]trilane policies[/]. {OWN_POLICY}. Default: the scenario's."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE",
                 help="Change one key of the scenario, such as [bold]hardware=rtx4090-ddr5[/] or [bold]batch=4[/]; "
                      "repeatable. Parameters are those of the policy that runs; gpu_memory_gb is in GB (10^9 bytes)."),
]
DrawsOption = Annotated[
    int,
    typer.Option(metavar="N", min=1, max=MOST_DRAWS,
                 help="How often each policy is simulated: the scenario itself, then with other seeds and, unless it "
                      "names its sequences, other sequences of the trace. 1: the scenario alone, without a spread."),
]
JobsOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, max=MOST_PROCESSES,
                 help="Processes that share the work. Default: one per core. The result does not depend on it."),
]


def processes(jobs: int | None) -> int:
    """``jobs``, or the number of cores that this process may use."""
    if jobs:
        return jobs
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class RunFiles:
    """The files that a run can be written to."""

    spans: Annotated[
        str | None, typer.Option(metavar="F.parquet", help="Write what every lane did, one row per span.")
    ] = None
    perfetto: Annotated[
        str | None, typer.Option(metavar="F.json", help="Write a timeline for ui.perfetto.dev (.json or .json.gz).")
    ] = None
    gantt: Annotated[
        str | None, typer.Option(metavar="F.png", help="Draw the decode step of median duration.")
    ] = None

    def write(self, run: Run, about: str) -> None:
        """Write the files that were named, and print their names."""
        with working("writing"):
            if self.spans:
                run.save_spans(self.spans)
                note(f"spans: {self.spans}")
            if self.perfetto:
                from trilane.output.figures import write_perfetto

                write_perfetto([run], self.perfetto)
                note(f"timeline for https://ui.perfetto.dev: {self.perfetto}")
            if self.gantt:
                from trilane.output.figures import save_gantt

                save_gantt(run, self.gantt, about=about)
                note(f"picture: {self.gantt}")
