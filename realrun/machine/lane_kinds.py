"""The words for kinds of lanes, for command lines too: nothing here needs torch."""

from __future__ import annotations

from typing import Literal

LaneKind = Literal["auto", "cuda", "host-lanes"]  # but for "auto", the kinds that a profile says it is of
