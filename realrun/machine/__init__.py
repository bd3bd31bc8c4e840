"""The lanes, memory and clock of a real machine. The names of its options stand here, since they need no torch."""

from typing import Literal

LaneKind = Literal["auto", "cuda", "host-lanes"]  # without "auto": the kinds that a profile may have
ResultPathName = Literal["direct", "h2d"]  # as sim.machine.devices.ResultPath
