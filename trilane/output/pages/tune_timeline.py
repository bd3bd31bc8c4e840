"""The section of ``trilane tune --explain``: what takes the time of one token, part by part."""

from __future__ import annotations

from collections.abc import Iterator

from trilane.engines.tune.tuned import Tuned
from trilane.output.pages.fit_engine import PARTS
from trilane.output.pages.output import Part, heading, number, percent, table

_BAR = 40  # letters of the longest bar


def timeline_page(tuned: Tuned) -> list[Part]:
    """What happens in the time of one token, part by part, and in how many layers."""
    columns = ("part", "layers", "ms a layer", "ms", "share", "")
    return ["", heading("one token, in the mean of the answer"), table(columns, _timeline(tuned), (0, 5))]


def _timeline(tuned: Tuned) -> Iterator[list[str]]:
    longest = max(tuned.decode_ms.values())
    for part, ms in tuned.decode_ms.items():
        if layers := _layers(tuned, part):
            each = number(ms / layers, 3) if part != "others" else "-"
            yield [PARTS[part], number(layers, 0), each, number(ms, 2), percent(ms / tuned.tpot_ms),
                   "#" * round(_BAR * ms / longest)]


def _layers(tuned: Tuned, part: str) -> int:
    """In which a part takes time."""
    host, cached = tuned.host_layers, tuned.cache_mib is not None
    whole = tuned.layers
    layers = {
        "gpu_experts": whole if cached or tuned.gpu_experts else whole - host,
        "cpu_experts": (0 if cached else host) if "gpu_experts" in tuned.decode_ms else whole,
        "handing_over": host, "copies": host if cached else 0,
    }
    return layers.get(part, whole)
