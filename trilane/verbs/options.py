"""Options that several verbs have, and ``grouped``, which reads a group of options off a dataclass."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

from realrun.machine import ResultPathName
from trilane.common.computer import System
from trilane.common.errors import TrilaneError
from trilane.common.quoting import quoted
from trilane.output.pages.output import named_as, note, working
from trilane.verbs import completion

if TYPE_CHECKING:
    from realrun.machine.machines import LaneOptions, RealMachine
    from sim.runs.run import Run
    from trilane.engines.question import Question


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
    typer.Option("--policy", metavar="NAME", autocompletion=completion.policies,
                 help=f"Policy; see [bold]trilane policies[/]. {OWN_POLICY}. Default: the scenario's."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE",
                 help="Change one key of the scenario, such as [bold]hardware=rtx4090-ddr5[/], [bold]batch=4[/] or "
                      "[bold]gpus=2[/]; repeatable. examples/reference.yaml has all keys. parameters.NAME is of the "
                      "policy that runs; gpu_memory_gb is in GB (10^9 bytes)."),
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
        str | None,
        typer.Option(metavar="F.parquet", callback=named_as(".parquet", ".csv"),
                     help="Write what every lane did, one row per span (.parquet or .csv)."),
    ] = None
    perfetto: Annotated[
        str | None,
        typer.Option(metavar="F.json", callback=named_as(".json", ".json.gz"),
                     help="Write a timeline for ui.perfetto.dev (.json or .json.gz)."),
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


# --- real lanes, for verbs that run on this machine -------------------------------------------------------------------

HostMemoryOption = Annotated[
    float | None,
    typer.Option("--host-memory-gb", metavar="X",
                 help="Host memory that experts may take, in GB (10^9 bytes), whatever the system reports as free: for "
                      "machines whose memory grows as it is used. Default: TRILANE_HOST_MEMORY_GB of the environment, "
                      "else what is free, once memory that grows has been touched."),
]


@dataclass(frozen=True)
class LaneChoice:
    """Chosen settings of real lanes, None for the machine's own. Raises OptionError for a negative chunk size."""

    cpu_threads: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_CORES, metavar="N",
                     help="cuda: threads that compute experts. Default: [bold]trilane profile[/] measures up to the "
                          "number of physical cores minus two (those of the host thread and of the copies) and takes "
                          "the fastest; the other verbs use all of these."),
    ] = None
    device: Annotated[
        int | None, typer.Option(min=0, max=1023, metavar="N", help="cuda: which GPU. Default: 0.")
    ] = None
    result_path: Annotated[
        ResultPathName | None,
        typer.Option(help="cuda: how results of CPU experts reach the GPU. direct: the GPU reads them in place. h2d: "
                          "they queue behind copies of experts. Default: direct where the GPU can, else h2d."),
    ] = None
    chunk_mb: Annotated[
        float | None,
        typer.Option(metavar="X",
                     help="MB (10^6 bytes) that are copied to the GPU in one piece, between which smaller copies pass; "
                          "0 (cuda): whole experts. Default: 4.2, on host lanes 1.05."),
    ] = None

    def __post_init__(self) -> None:
        if self.chunk_mb is not None and not 0 <= self.chunk_mb < 1e6:
            raise OptionError(f"--chunk-mb: expected a number of MB (10^6 bytes) from 0 on, got {self.chunk_mb:g}")

    def options(self, **others: Any) -> LaneOptions:
        """These and ``others`` as options of a machine; imports torch."""
        from realrun.machine.machines import LaneOptions

        chunk_bytes = None if self.chunk_mb is None else round(self.chunk_mb * 1e6)
        return LaneOptions(
            cpu_threads=self.cpu_threads, device_index=self.device, result_path=self.result_path,
            chunk_bytes=chunk_bytes, **others,
        )


def print_remarks(machine: RealMachine) -> None:
    """Print what a user should know about a machine once it has allocated its memory."""
    for remark in machine.remarks():
        note(f"{machine.kind}: {remark}")


# --- a question: a machine by its parts, and a model with its weights and lengths -------------------------------------


class AllCards(TyperCommand):
    """A command that takes every ``--gpu`` for a further card, where the parser would keep the last one alone."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words, several cards as one value."""
        several = any(one.name == "gpu" and not getattr(one, "is_flag", False) for one in self.params)
        return super().parse_args(ctx, _joined(args) if several else args)


def _joined(words: list[str]) -> list[str]:
    """The words of a command with all values of --gpu in the first of them."""
    places = [place for place, word in enumerate(words) if re.match("--gpu(=|$)", word)]
    if len(places) < 2:
        return words
    spans = [(place, place + 1 + (words[place] == "--gpu")) for place in places]
    values = [words[end - 1].removeprefix("--gpu=") for _, end in spans]
    kept = [word for place, word in enumerate(words) if not any(first <= place < end for first, end in spans)]
    return [*kept[:places[0]], f"--gpu={'+'.join(values)}", *kept[places[0]:]]


@dataclass(frozen=True)
class MachineParts:
    """Parts that were named, None where none was; by the names of ``trilane.engines.question.Question``."""

    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", autocompletion=completion.gpus,
            help="GPU, such as rtx-4080, or none; several as 2x-rtx-3090 or rtx-3090+rtx-3060; "
                 "[bold]trilane hardware --parts[/] lists all parts.",
        ),
    ] = None
    ram: Annotated[
        str | None,
        typer.Option(metavar="NAME", autocompletion=completion.memories, help="Memory of the CPU, such as ddr5-5600."),
    ] = None
    cpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", autocompletion=completion.cpus,
                     help="CPU, such as ryzen-9-7950x. Default: a generic one."),
    ] = None
    cores: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Cores that compute experts. Default: the CPU's.")
    ] = None
    channels: Annotated[int | None, typer.Option(min=1, metavar="N", help="Memory channels. Default: the CPU's.")] = (
        None
    )
    sockets: Annotated[
        int | None, typer.Option(min=1, metavar="2", help="Sockets of a server's CPU. Default: one.")
    ] = None
    pcie: Annotated[
        str | None,
        typer.Option(metavar="4x16", help="PCIe slot, or one for each GPU: 4x16,4x4. Default: the best of the parts."),
    ] = None
    ram_gb: Annotated[
        int | None,
        typer.Option("--ram-gb", min=1, metavar="N", help="Memory of the host, in GiB (2^30 bytes). Default: enough."),
    ] = None
    disk: Annotated[
        str | None,
        typer.Option(metavar="NAME|GB/s",
                     help="Disk from which experts are read that the host's memory has no room for: sata-ssd, usb-ssd, "
                          "nvme-3x4, nvme-4x4, nvme-5x4, a stripe (2x-nvme-4x4), or its GB/s. Default: they must "
                          "have room."),
    ] = None
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="A preset or a profile, in place of gpu, ram and cpu.")
    ] = None
    system: Annotated[
        System | None,
        typer.Option("--os", metavar="NAME", case_sensitive=False,
                     help="Operating system: linux, windows or macos, which may limit what can be pinned and what the "
                          "GPU takes of a unified memory. Default: of this machine its own, of named parts none."),
    ] = None


def model_named(text: str) -> str:
    """A model's name as it is taken, with a remark where that is not as it was given. Raises ShapeError."""
    from traces.models import catalogue

    taken = catalogue.model_named(text)
    if taken.remark:
        note(f"model {taken.remark}")
    return str(taken.name)


def weights_named(text: str | None) -> str | None:
    """A format of weights as it is taken, with a remark where that is another word. Raises ShapeError."""
    from traces.models.quantisation import format_named

    name = None if text is None else format_named(text)
    if text is not None and name != text.lower():
        note(f"weights {quoted(text)} taken as {name}")
    return name


UpgradeOption = Annotated[
    bool,
    typer.Option("--upgrade", help="Show real parts that this machine takes in place of its own, and what each gives."),
]


@dataclass(frozen=True)
class ModelArgument:
    """A model, by its place on the command line or by an option."""

    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", autocompletion=completion.models,
                       help="A model (see [bold]trilane models[/]), a GGUF file, or a config.json."),
    ] = None
    model_option: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", autocompletion=completion.models,
                     help="The model, in place of the argument."),
    ] = None

    @property
    def text(self) -> str:
        """The name as it was given. Raises OptionError unless there is one."""
        given = [name for name in (self.model, self.model_option) if name is not None]
        if len(given) != 1:
            got = f"both {quoted(given[0])} and --model {quoted(given[1])}" if given else "none"
            raise OptionError(f"expected a model, such as qwen3-30b-a3b (`trilane models` lists them), got {got}")
        return given[0]


@dataclass(frozen=True)
class Workload:
    """Weights and lengths. Raises OptionError for a prompt that is neither a number of tokens nor "max"."""

    weights: Annotated[
        str | None,
        typer.Option(metavar="NAME", autocompletion=completion.formats,
                     help="Format of weights, such as bf16, q8_0, q4_k_m. Default: q4_k_m, or as published if that has "
                          "fewer than 16 bits."),
    ] = None
    prompt: Annotated[
        str, typer.Option(metavar="N|max", help="Tokens of the prompt; max: the most that the memory takes.")
    ] = "4096"
    generated: Annotated[int, typer.Option(metavar="N", help="Tokens of the answer.")] = 256
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences that run together.")] = 1

    def __post_init__(self) -> None:
        if not self._longest and not re.fullmatch("[1-9][0-9]{0,17}", self.prompt):
            raise OptionError(f"--prompt: expected a number of tokens, or max, got {quoted(self.prompt)}")

    @property
    def _longest(self) -> bool:
        return self.prompt.lower() == "max"

    def question(self, model: str, **others: Any) -> Question:
        """A model, these and ``others`` as a question. Raises FitError, also where no prompt fits."""
        from trilane.engines.question import Question
        from trilane.fit.fit import with_longest_prompt

        tokens = 1 if self._longest else int(self.prompt)
        question = Question(
            model_named(model), **others, weights=weights_named(self.weights), prompt_tokens=tokens,
            generated=self.generated, batch=self.batch,
        )
        return with_longest_prompt(question) if self._longest else question
