"""Disks from which weights are read that the host's memory has no room for: kinds, and the rate of their reads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from sim.machine.plausibility import HardwareError
from sim.machine.sourced import Sourced, read_file
from trilane.common.names import unknown
from trilane.common.units import GB

_FILE = Path(str(files("sim.machine"))) / "presets" / "parts" / "disks.yaml"
_SLOWEST_GBPS, _FASTEST_GBPS = 0.05, 100.0
# Of a page fault, Linux reads 256 KiB of a file that is read in order, of which half is there already, as the commit
# "readahead: sequential mmap readahead" says, which measured it (torvalds/linux, 2009).
FAULT_BYTES = 128 << 10
DIRECT_DEPTH = 8  # requests at once of engines with readers of their own (JustVugg/colibri README, antirez/ds4 PR 1082)


class Disk(NamedTuple):
    """A kind of disk. A read of s bytes that is alone takes ``latency_ns`` + s / ``alone_bytes_per_s``."""

    title: str
    latency_ns: Sourced[float]
    alone_bytes_per_s: Sourced[float]
    ceiling_bytes_per_s: Sourced[float]
    in_order_share: Sourced[float]  # of the ceiling, which one program reaches that reads a file in order

    @property
    def in_order_bytes_per_s(self) -> float:
        """Rate of reading a file in order, while the system reads ahead."""
        return self.ceiling_bytes_per_s.value * self.in_order_share.value

    def bytes_per_s(self, size: float, depth: float) -> float:
        """Rate of reads of ``size`` bytes, ``depth`` at a time."""
        latency, alone, ceiling = self.latency_ns, self.alone_bytes_per_s, self.ceiling_bytes_per_s
        return rate_of_reads(latency.value, alone.value, ceiling.value, size, depth)


def rate_of_reads(
    latency_ns: float, alone_bytes_per_s: float, ceiling_bytes_per_s: float, size: float, depth: float
) -> float:
    """Rate in bytes per second of reads of ``size`` bytes, ``depth`` at a time.

    What a read takes beyond its share of the ceiling is divided by the depth. Of the rates of a Phison E27T at depths
    of 4 to 128, which did not set its numbers, this is off by 17 % at most in reads of 256 KiB, and by 49 % in those of
    64 KiB, whose own ceiling is lower.
    """
    ceiling = ceiling_bytes_per_s / GB  # bytes per ns
    alone_ns = latency_ns + size / alone_bytes_per_s * 1e9
    beyond = max(alone_ns / size - 1 / ceiling, 0.0)
    return GB / (beyond / depth + 1 / ceiling)


@cache
def disks() -> Mapping[str, Disk]:
    """Kinds of disks by name, from the slowest on. Raises HardwareError for a faulty file."""
    read: Mapping[str, Disk] = read_file(Mapping[str, Disk], _FILE)
    return read


@cache
def disk(name: str) -> Disk:
    """A kind of disk by its name, or by the GB/s of its reads: then the other numbers are those of the kind nearest to
    it. Raises HardwareError for neither."""
    kinds = disks()
    if name.lower() in kinds:
        return kinds[name.lower()]
    try:
        rate = float(name)
    except ValueError:
        raise HardwareError(f"{unknown('disk', name, kinds)}; or GB/s, such as 3.5") from None
    if not _SLOWEST_GBPS <= rate <= _FASTEST_GBPS:
        raise HardwareError(f"disk {name}: expected a rate of {_SLOWEST_GBPS:g} to {_FASTEST_GBPS:g} GB/s")
    nearest = min(kinds.values(), key=lambda kind: abs(kind.ceiling_bytes_per_s.value - rate * GB))
    ceiling = Sourced(rate * GB, "stated with the question", "high")
    return nearest._replace(title=f"disk of {rate:g} GB/s", ceiling_bytes_per_s=ceiling)


def disk_numbers(name: str) -> dict[str, Sourced[Any]]:
    """A kind of disk, or one of so many GB/s, as numbers of a machine by dotted key. Raises HardwareError."""
    kind = disk(name)
    rates = {key: getattr(kind, key) for key in ("latency_ns", "alone_bytes_per_s", "ceiling_bytes_per_s")}
    return {f"disk.{key}": number for key, number in {"name": Sourced(kind.title, name, "high"), **rates}.items()}
