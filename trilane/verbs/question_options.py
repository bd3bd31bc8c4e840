"""Options that make up a question: a machine by its parts, and a model with its weights and lengths."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trilane.common.quoting import quoted
from trilane.verbs.options import OptionError

if TYPE_CHECKING:
    from trilane.engines.question import Question


@dataclass(frozen=True)
class MachineParts:
    """Parts that were named, None where none was; by the names of ``trilane.engines.question.Question``."""

    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="GPU, such as rtx-4080, or none; [bold]trilane hardware --parts[/] lists all parts."
        ),
    ] = None
    ram: Annotated[str | None, typer.Option(metavar="NAME", help="Memory of the CPU, such as ddr5-5600.")] = None
    cpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="CPU, such as ryzen-9-7950x. Default: a generic one.")
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
    pcie: Annotated[str | None, typer.Option(metavar="4x16", help="PCIe slot. Default: the best of the parts.")] = None
    ram_gb: Annotated[
        int | None,
        typer.Option("--ram-gb", min=1, metavar="N", help="Memory of the host, in GiB (2^30 bytes). Default: enough."),
    ] = None
    machine: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="A preset or a profile, in place of gpu, ram and cpu.")
    ] = None


ModelOption = Annotated[
    str,
    typer.Option("--model", "-m", metavar="NAME|FILE",
                 help="Model; see [bold]trilane models[/]. Or a config.json, or a GGUF file."),
]


@dataclass(frozen=True)
class Workload:
    """Weights and lengths. Raises OptionError for a prompt that is neither a number of tokens nor "max"."""

    weights: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Format of weights, such as bf16, q8_0, q4_k_m. Default: q4_k_m, or as "
                                          "published if that has fewer than 16 bits."),
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

    def question(self, **others: Any) -> Question:
        """These and ``others`` as a question. Raises FitError, also where no prompt fits."""
        from trilane.engines.question import Question
        from trilane.fit.fit import with_longest_prompt

        tokens = 1 if self._longest else int(self.prompt)
        question = Question(
            **others, weights=self.weights, prompt_tokens=tokens, generated=self.generated, batch=self.batch
        )
        return with_longest_prompt(question) if self._longest else question
