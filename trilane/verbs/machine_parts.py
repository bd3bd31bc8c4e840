"""Options that name a machine by its parts, or by a preset or a profile, for verbs that answer for one machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True)
class MachineParts:
    """What was named, None where nothing was; by the names of ``trilane.study.fit.question.Question``."""

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
    ] = None  # fmt: skip
