"""What can be chosen of real lanes by every verb that makes them, and what their user is told of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from realrun.machine import ResultPathName
from trilane.pages.output import note

if TYPE_CHECKING:
    from realrun.machine.machines import LaneOptions, RealMachine


class LaneOptionError(ValueError):
    """A number that no lanes can have."""


ResultPathOption = Annotated[
    ResultPathName | None,
    typer.Option(help="cuda: how the CPU's results come to the GPU. direct: it reads them in place. h2d: they queue "
                      "behind copies of experts. Default: direct where the GPU can, else h2d."),
]  # fmt: skip
CpuThreadsOption = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="cuda: threads that compute experts. Default: [bold]trilane profile[/] "
                                          "measures up to as many as there are physical cores but two, which the host "
                                          "and the copies have, and takes the fastest; else all of these."),
]  # fmt: skip
DeviceOption = Annotated[int | None, typer.Option(min=0, metavar="N", help="cuda: which GPU. Default: 0.")]
ChunkOption = Annotated[
    float | None,
    typer.Option("--chunk-mb", metavar="X",
                 help="MB (10^6 bytes) that are copied to the GPU in one piece, between which smaller copies pass; 0 "
                      "(cuda): whole experts. Default: 4.2, on host lanes 1.05."),
]  # fmt: skip

HostMemoryOption = Annotated[
    float | None,
    typer.Option(
        "--host-memory-gb", metavar="X",
        help="Host memory (10^9 bytes) that experts may take, whatever the system says is free: for machines whose "
             "memory grows as it is used. Default: TRILANE_HOST_MEMORY_GB of the environment, else what is free, once "
             "memory that grows has been touched.",
    ),
]  # fmt: skip


@dataclass(frozen=True)
class Chosen:
    """What was given of these options, None where nothing was. Raises LaneOptionError for a chunk that is no size."""

    cpu_threads: int | None
    device: int | None
    result_path: ResultPathName | None
    chunk_mb: float | None

    def __post_init__(self) -> None:
        if self.chunk_mb is not None and not 0 <= self.chunk_mb < 1e6:
            raise LaneOptionError(f"--chunk-mb: expected a number of MB (10^6 bytes) from 0 on, got {self.chunk_mb:g}")

    def options(self, **others: Any) -> LaneOptions:
        """For a machine, with what else was chosen of it; this needs torch."""
        from realrun.machine.machines import LaneOptions

        chunk_bytes = None if self.chunk_mb is None else round(self.chunk_mb * 1e6)
        return LaneOptions(
            cpu_threads=self.cpu_threads, device_index=self.device, result_path=self.result_path,
            chunk_bytes=chunk_bytes, **others,
        )  # fmt: skip


def tell(machine: RealMachine) -> None:
    """Print what is worth knowing of a machine once it has its memory."""
    for remark in machine.remarks():
        note(f"{machine.kind}: {remark}")
