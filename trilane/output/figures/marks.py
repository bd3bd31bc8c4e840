"""Marks, colours and looks: how tables and pictures tell policies apart, the same everywhere.

Marks behind names, ``*`` and ``~``, are made here alone, from the kind, when a name is shown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from policies.protocols import PolicyKind
from sim.runs.vocabulary import kind_of

SIGNS = {PolicyKind.CLAIRVOYANT: "*", PolicyKind.CHANGES: "~"}
_MEANINGS = {PolicyKind.CLAIRVOYANT: "knows the future", PolicyKind.CHANGES: "changes the routing"}


def marked(name: str, kind: PolicyKind) -> str:
    """A name as tables and pictures show it: "oracle *", "daop ~", "dali"."""
    return f"{name} {SIGNS[kind]}" if kind in SIGNS else name


def kind_of_row(row: Mapping[str, Any]) -> PolicyKind:
    """The kind of the policy of a run (``Run.to_dict()``), or of a mean of runs, by its labels."""
    return kind_of(row.get("labels", ()))


def meanings(kinds: Collection[PolicyKind]) -> dict[str, str]:
    """For a legend: the marks of these kinds, and what each means."""
    return {sign: _MEANINGS[kind] for kind, sign in SIGNS.items() if kind in kinds}


# --- colours and looks ------------------------------------------------------------------------------------------------

# Okabe-Ito colours, which readers with any colour vision can tell apart; without yellow, which is too pale on white.
BLUE, VERMILLION, GREEN = "#0072B2", "#D55E00", "#009E73"
ORANGE, SKY, PURPLE = "#E69F00", "#56B4E9", "#CC79A7"
INK, GREY, GRID, WHISKER = "#444444", "#BBBBBB", "#E5E5E5", "#222222"
IMPOSSIBLE = "#E8E8E8"  # beyond the lower bound

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
        "ktransformers@layer-wise", "llama.cpp@impl", "llama-cache-static", "strata",
        "colibri", "pin-hot", "ik-prefetch",
    ),
    SKY: (
        "mixtral-offloading", "on-demand", "moe-infinity", "edgemoe", "adapmoe", "deepspeed", "mixtral-offloading@impl",
        "moe-infinity@impl", "moe-lightning@impl", "llama.cpp@cache", "pre-gated", "least-stale", "seqmoe",
        "moe-stream", "ds4", "flashmoe",
    ),
    PURPLE: (
        "smoe", "daop", "quasi-pf", "router-pf", "est-pf", "hybrid-pf", "daop@impl", "quasi-pf@impl", "quasi-pf@exact",
        "router-pf@exact", "est-pf@exact", "hybrid-pf@exact", "cache-prior", "buddy", "kt-deferral",
        "hobbit", "strata@tail-skip",
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
