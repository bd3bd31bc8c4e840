"""Sentences on what makes a machine slower than its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trilane.engines.accuracy.slow_machines import SlowCause, SlowPart
from trilane.output.pages.output import number

_REASONS: Mapping[SlowPart, Sequence[tuple[float, str]]] = {  # from which share of the rate on, the highest first
    SlowPart.HOST_MEMORY: (
        (0.6, "modules at their default speed (no XMP or EXPO profile), pages of 4 KiB, or another program that reads "
              "memory"),
        (0.25, "one memory channel in place of two or more, or another program that reads memory"),
        (0.0, "experts read from disk, since the memory is full"),
    ),
    SlowPart.LINK: ((0.0, "fewer lanes, or an older generation (nvidia-smi -q: Link Width, PCIe Generation)"),),
    SlowPart.GPU_MEMORY: (
        (0.3, "another program on the card, or a lower memory clock"),
        (0.0, "weights that the driver keeps in host memory, since the card is full"),
    ),
    SlowPart.GPU_PRODUCTS: ((0.0, "a limit of power or temperature (nvidia-smi -q -d PERFORMANCE)"),),
    SlowPart.PAGEABLE: ((0.0, "the driver did not pin the host memory"),),
}


def slow_part(causes: Sequence[SlowCause]) -> list[str]:
    """A line for each cause that explains what was measured; nothing without one."""
    if not causes:
        return []
    title = "Slower than predicted from its parts. If the parts are right, one of these explains all that was measured:"
    return ["", title, *(f"- {_rate(cause)}: {_reason(cause)}" for cause in causes)]


def _rate(cause: SlowCause) -> str:
    if cause.part is SlowPart.PAGEABLE:
        return "copies from pageable memory"
    return f"{number(cause.share, 2)} of the rate of the {cause.part}"


def _reason(cause: SlowCause) -> str:
    return next(text for least, text in _REASONS[cause.part] if cause.share >= least)
