"""The words for what can be chosen of lanes, for command lines too: nothing here needs torch or the simulator."""

from __future__ import annotations

from typing import Literal

LaneKind = Literal["auto", "cuda", "host-lanes"]  # but for "auto", the kinds that a profile says it is of
ResultPathName = Literal["direct", "h2d"]  # as sim.machine.hardware.ResultPath
