"""Disks from which weights are read that the host's memory has no room for: kinds, and the rate of their reads."""

from __future__ import annotations

import re
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
_SLOWEST_GBPS, _FASTEST_GBPS, _MOST_DRIVES = 0.05, 100.0, 4
_STRIPE = re.compile(r"(\d{1,3})\s*x[\s-]*([a-z].*)", re.IGNORECASE)
# Of a page fault, Linux reads 256 KiB of a file that is read in order, of which half is there already, as the commit
# "readahead: sequential mmap readahead" says, which measured it (torvalds/linux, 2009).
FAULT_BYTES = 128 << 10
DIRECT_DEPTH = 8  # requests at once of engines with readers of their own (JustVugg/colibri README, antirez/ds4 PR 1082)


class Disk(NamedTuple):
    """A kind of disk, or a stripe of several. A read of s bytes that is alone takes ``latency_ns`` + s /
    ``alone_bytes_per_s``."""

    title: str
    latency_ns: Sourced[float]
    alone_bytes_per_s: Sourced[float]
    ceiling_bytes_per_s: Sourced[float]  # of all drives
    in_order_share: Sourced[float]  # of the ceiling, which one program reaches that reads a file in order
    drives: int = 1  # over which the bytes are striped, as by RAID 0

    @property
    def in_order_bytes_per_s(self) -> float:
        """Rate of reading a file in order, while the system reads ahead."""
        return self.ceiling_bytes_per_s.value * self.in_order_share.value

    def bytes_per_s(self, size: float, depth: float) -> float:
        """Rate of reads of ``size`` bytes, ``depth`` at a time."""
        latency, alone, ceiling = self.latency_ns, self.alone_bytes_per_s, self.ceiling_bytes_per_s
        return rate_of_reads(latency.value, alone.value, ceiling.value, size, depth, self.drives)


def rate_of_reads(
    latency_ns: float, alone_bytes_per_s: float, ceiling_bytes_per_s: float, size: float, depth: float, drives: int = 1
) -> float:
    """Rate in bytes per second of reads of ``size`` bytes, ``depth`` at a time, each from one of the ``drives``.

    What a read takes beyond its share of the ceiling is divided by the depth. Of the rates of a Phison E27T at depths
    of 4 to 128, which did not set its numbers, this is off by 17 % at most in reads of 256 KiB, and by 49 % in those of
    64 KiB, whose own ceiling is lower.
    """
    ceiling = ceiling_bytes_per_s / GB  # bytes per ns
    alone_ns = latency_ns + size / alone_bytes_per_s * 1e9
    beyond = max(alone_ns / size - drives / ceiling, 0.0)
    return min(GB / (beyond / depth + 1 / ceiling), depth * size / alone_ns * GB)


@cache
def disks() -> Mapping[str, Disk]:
    """Kinds of disks by name, from the slowest on. Raises HardwareError for a faulty file."""
    read: Mapping[str, Disk] = read_file(Mapping[str, Disk], _FILE)
    return read


@cache
def disk(name: str) -> Disk:
    """A kind of disk by its name, a stripe of several ("2x-nvme-4x4"), or one by the GB/s of its reads: then the other
    numbers are those of the kind nearest to it. Raises HardwareError for none of these."""
    kinds, striped = disks(), _STRIPE.fullmatch(name)
    if striped is not None:
        return _stripe(int(striped[1]), disk(striped[2]))
    if name.lower() in kinds:
        return kinds[name.lower()]
    try:
        rate = float(name)
    except ValueError:
        raise HardwareError(f"{unknown('disk', name, kinds)}; or GB/s, such as 3.5; or several, 2x-nvme-4x4") from None
    if not _SLOWEST_GBPS <= rate <= _FASTEST_GBPS:
        raise HardwareError(f"disk {name}: expected a rate of {_SLOWEST_GBPS:g} to {_FASTEST_GBPS:g} GB/s")
    nearest = min(kinds.values(), key=lambda kind: abs(kind.ceiling_bytes_per_s.value - rate * GB))
    ceiling = Sourced(rate * GB, "stated with the question", "high")
    return nearest._replace(title=f"disk of {rate:g} GB/s", ceiling_bytes_per_s=ceiling)


def _stripe(drives: int, one: Disk) -> Disk:
    """Several equal drives over which the bytes are striped. Raises HardwareError for less than 2 or too many."""
    if not 2 <= drives <= _MOST_DRIVES:
        raise HardwareError(f"disk {drives}x {one.title}: expected 2 to {_MOST_DRIVES} of a kind")
    value, source, confidence = one.ceiling_bytes_per_s
    ceiling = Sourced(drives * value, f"estimate: {drives} times that of one; {source}", confidence)
    return one._replace(title=f"{drives} x {one.title}", ceiling_bytes_per_s=ceiling, drives=drives)


def disk_numbers(name: str) -> dict[str, Sourced[Any]]:
    """A kind of disk, or one of so many GB/s, as numbers of a machine by dotted key. Raises HardwareError."""
    kind = disk(name)
    rates = {key: getattr(kind, key) for key in ("latency_ns", "alone_bytes_per_s", "ceiling_bytes_per_s")}
    exact = {"name": Sourced(kind.title, name, "high"), "drives": Sourced(kind.drives, name, "high")}
    return {f"disk.{key}": number for key, number in {**exact, **rates}.items()}
