"""Options of real lanes, for verbs that run on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from realrun.machine import ResultPathName
from trilane.output.pages.output import note
from trilane.verbs.options import MOST_CORES, OptionError

if TYPE_CHECKING:
    from realrun.machine.machines import LaneOptions, RealMachine

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
