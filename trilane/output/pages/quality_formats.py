"""The section of ``trilane tune --accept-kl``: speed bought with fewer bits."""

from __future__ import annotations

from collections.abc import Sequence

from trilane.output.figures.quality_words import nats
from trilane.output.pages.output import Part, heading, number, table
from trilane.output.pages.widths import Command
from trilane.study.quality.formats import Bargain


def bargains_part(found: Sequence[Bargain], most_nats: float) -> list[Part]:
    """The formats, the fastest first, with the line of the first."""
    if not found:
        return [f"accepting KL {most_nats:g}: no format of this model has a published divergence of at most that and "
                "fits the machine (trilane quality --published lists what is known)", ""]
    rows = [
        [one.weights, nats(one.value.value), number(one.tuned.tokens_per_s), number(one.tuned.ttft_ms / 1e3),
         number(one.tuned.answer_ms / 1e3), f"{one.value.setting}: {one.value.source.partition(' ')[0]}"]
        for one in found
    ]
    columns = ["format", "KL\nnats", "tokens/s", "first\ntoken s", "last\ntoken s", "published of"]
    about = f"accepting KL {most_nats:g}: formats whose published divergence is at most that"
    return [heading(about), table(columns, rows, (0, 5)), "", Command(found[0].tuned.command), ""]
