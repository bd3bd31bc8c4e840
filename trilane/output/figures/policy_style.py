"""The look of each policy: one colour a family, one line and marker a member, the same in every picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from policies.protocols import PolicyKind
from trilane.output.figures.style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION

LineStyle = str | tuple[int, tuple[float, ...]]


class Look(NamedTuple):
    """Colour, line and marker of a policy, as matplotlib names them."""

    colour: str
    line: LineStyle
    marker: str


_LINES: tuple[LineStyle, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5)))
_MARKERS = "osD^vP"
_FAMILIES: Mapping[str, tuple[str, ...]] = {
    BLUE: ("dali", "dali-beam", "dali-ilp", "random-prefetch"),
    VERMILLION: (
        "hybrimoe", "hybrimoe@impl", "static-threshold", "llama-cache-lru", "llama-cache-lru@impl", "llama-cache-heat",
        "llama-cache-pool", "prescope",
    ),
    GREEN: ("best-exact", "best-approx", "mix"),
    ORANGE: (
        "fiddler", "ktransformers", "llama.cpp", "layer-wise", "moe-lightning", "naive-cpu", "fiddler@impl",
        "ktransformers@layer-wise", "llama.cpp@impl", "llama-cache-static",
    ),
    SKY: (
        "mixtral-offloading", "on-demand", "moe-infinity", "edgemoe", "adapmoe", "deepspeed", "mixtral-offloading@impl",
        "moe-infinity@impl", "moe-lightning@impl", "llama.cpp@cache", "pre-gated", "least-stale", "seqmoe",
    ),
    PURPLE: (
        "smoe", "daop", "quasi-pf", "router-pf", "est-pf", "hybrid-pf", "daop@impl", "quasi-pf@impl", "quasi-pf@exact",
        "router-pf@exact", "est-pf@exact", "hybrid-pf@exact", "cache-prior", "buddy", "kt-deferral",
        "hobbit",
    ),
}
_LOOKS = {
    name: Look(colour, _LINES[place % len(_LINES)], _MARKERS[(place + place // 12) % len(_MARKERS)])  # 12: both repeat
    for colour, family in _FAMILIES.items()
    for place, name in enumerate(family)
}
CLAIRVOYANT = Look("black", "--", "")
_UNKNOWN = Look(INK, "-", "X")
ALSO_RAN = Look("#C4C4C4", "-", "")  # the slower ones of very many policies


def look_of(policy: str, kind: PolicyKind = PolicyKind.KEEPS) -> Look:
    """The look of a policy of this kind; policies without a family are dark grey."""
    return CLAIRVOYANT if kind == PolicyKind.CLAIRVOYANT else _LOOKS.get(policy, _UNKNOWN)
