"""Place of the table of which each token reads a few rows, in engines that map their file, and time of its reads.

llama.cpp leaves such a table in the file (PR 27794): rows are faults, and pages stay in what memory is left. They are
taken as one after another, with what the system reads around each, 172 us on an NVMe disk. Prompts on a Strix Halo took
189, 178 and 90 us a row longer than with direct reads (512, 2,048 and 8,192 tokens; ggml-org/llama.cpp PR 29030).
"""

from __future__ import annotations

from typing import NamedTuple

from sim.machine.disks import FAULT_BYTES, disk
from traces.models.row_tables import row_table
from traces.models.shape import ModelShape
from trilane.engines.memory import SplitMemory

USUAL_DISK = "nvme-4x4"


class TableReads(NamedTuple):
    """A table next to a model in memory. ``left_bytes``: for it, None: enough; ``token_ms``: at most, to read a token's
    rows from ``disk``, if those in memory are no more often used than others; 0 where all have room."""

    name: str
    size_bytes: int
    rows_per_token: int
    row_bytes: float
    left_bytes: int | None
    disk: str
    token_ms: float

    @property
    def in_memory_bytes(self) -> int:
        """Bytes for which memory is left."""
        return self.size_bytes - self.on_disk_bytes

    @property
    def on_disk_bytes(self) -> int:
        """Bytes for which no memory is left."""
        return 0 if self.left_bytes is None else max(self.size_bytes - self.left_bytes, 0)


def table_reads(shape: ModelShape, memory: SplitMemory, disk_name: str | None) -> TableReads | None:
    """The reads of a model's table; None where it has none."""
    table = row_table(shape)
    if table is None:
        return None
    kind = disk_name or USUAL_DISK
    left = memory.left_bytes
    missing = 0.0 if left is None else max(1 - left / table.size_bytes, 0.0)
    row_ns = FAULT_BYTES / disk(kind).bytes_per_s(FAULT_BYTES, 1) * 1e9
    return TableReads(*table, left, kind, missing * table.rows_per_token * row_ns / 1e6)
