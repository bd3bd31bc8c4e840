"""Times of reads of experts from a disk, where the host's memory has no room for all of them.

An expert's read takes its bytes at the rate at which the disk serves the requests that are under way together. They may
be of several experts: then these arrive together, where a lane of one read at a time has one after the other.
"""

from __future__ import annotations

from dataclasses import replace

from sim.costs.cost_table import CostTable
from sim.machine.devices import Drive
from sim.machine.disks import DIRECT_DEPTH, FAULT_BYTES
from traces.models.shape import ModelShape


def with_reads(costs: CostTable, drive: Drive, shape: ModelShape, threads: int, mapped: bool) -> CostTable:
    """The costs with those of reads. ``mapped``: pages of a file are faulted in by ``threads``, with what the system
    reads around each matrix; else the engine's own readers ask for whole matrices."""
    times_ns = {size: _read_ns(size, drive, shape, threads, mapped) for size in set(shape.expert_bytes_by_layer)}
    layers = zip(costs.experts, shape.expert_bytes_by_layer, strict=True)
    return replace(costs, experts=tuple(expert._replace(read_ns=times_ns[size]) for expert, size in layers))


def _read_ns(size: int, drive: Drive, shape: ModelShape, threads: int, mapped: bool) -> int:
    matrix = size / shape.matrices_per_expert
    request = drive.request_bytes or (FAULT_BYTES if mapped else matrix)
    depth = drive.depth or (threads if mapped else DIRECT_DEPTH)
    read = size * (1 + FAULT_BYTES / 2 / matrix) if mapped else size
    return max(1, round(read / drive.bytes_per_s(min(request, size), depth) * 1e9))
