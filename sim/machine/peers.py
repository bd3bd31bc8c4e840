"""Links between GPUs, which hidden states cross without the host's memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from sim.machine.sourced import Sourced, read_file

_FILE = Path(str(files("sim.machine"))) / "presets" / "parts" / "peers.yaml"


class PeerKind(NamedTuple):
    """A kind of link. Without ``bytes_per_s`` it crosses the slots of both GPUs."""

    title: str
    latency_ns: Sourced[float]
    bytes_per_s: Sourced[float] | None = None


class PeerLink(NamedTuple):
    """The link to a GPU from the one before it. ``own_lane``: else it takes turns with the copies to the GPU."""

    latency_ns: float
    bytes_per_s: float
    own_lane: bool

    def ns(self, size: int) -> int:
        """Time of a transfer of ``size`` bytes: whole ns, at least 1."""
        return max(round(self.latency_ns + size / self.bytes_per_s * 1e9), 1)


@cache
def peer_kinds() -> Mapping[str, PeerKind]:
    """Kinds of links by the word that names them. Raises HardwareError for a faulty file."""
    read: Mapping[str, PeerKind] = read_file(Mapping[str, PeerKind], _FILE)
    return read


def peer_link(kind: PeerKind, d2h_bytes_per_s: float, h2d_bytes_per_s: float) -> PeerLink:
    """A link of this kind from a GPU with the one rate to its slot to a GPU with the other."""
    own = kind.bytes_per_s
    rate = min(d2h_bytes_per_s, h2d_bytes_per_s) if own is None else own.value
    return PeerLink(kind.latency_ns.value, rate, own is not None)
