"""How spans look: a name for every lane, and a few families of kinds with a colour each, the same in every picture."""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """Span kinds that a reader need not tell apart at a glance."""

    label: str
    colour: str  # of the Okabe-Ito palette, which colour-blind readers can tell apart, or a grey
    kinds: tuple[str, ...]


FAMILIES = (
    Family("expert on GPU or CPU", "#0072B2", ("expert",)),
    Family("attention, gate, shared experts, combine", "#9A9A9A", ("attention", "gate", "shared", "combine")),
    Family("load that the layer waits for", "#D55E00", ("demand",)),
    Family("prefetch", "#009E73", ("prefetch",)),
    Family("cache swap, write-back", "#CC79A7", ("swap", "writeback")),
    Family("routing, activations, results", "#56B4E9", ("routing", "activations", "result")),
    Family("planning", "#E69F00", ("plan", "foresee")),
    Family("speculation", "#F0E442", ("speculate", "precompute")),
    Family("launch", "#C8C8C8", ("launch",)),
    Family("host waits for the routing", "#EDEDED", ("wait",)),
)
COLOURS = {kind: family.colour for family in FAMILIES for kind in family.kinds}
LANE_NAMES = {
    "host": "host thread",
    "gpu": "GPU",
    "cpu": "CPU experts",
    "h2d": "copies to GPU",
    "d2h": "copies to host",
}
