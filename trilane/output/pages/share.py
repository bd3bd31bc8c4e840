"""The page of ``trilane share``: predicted against measured speeds, and everything that the file will hold."""

from __future__ import annotations

from collections.abc import Sequence

from trilane.engines.accuracy.contribution import Lacking, RowCheck, cells
from trilane.engines.accuracy.errors import measured
from trilane.output.pages.output import Part, heading, number, signed_percent, table

NOTHING_SENT = "nothing is sent: attach the file to an issue (template: Measured speeds)"


def share_page(checks: Sequence[RowCheck]) -> list[Part]:
    """Speeds, then the file's cells that are not empty."""
    rows = [
        [check.row.id, kind, number(known), number(predicted), signed_percent(check.error), remark_text(check)]
        for check in checks
        for kind, known, predicted in zip(("decode", "prompt"), measured(check.row), check.predicted, strict=True)
        if known is not None
    ]
    head, *lines = cells([check.row for check in checks])
    shared = [name for place, name in enumerate(head) if any(line[place] for line in lines)]
    kept = [[line[head.index(name)] for name in shared] for line in lines]
    return [
        heading("predicted and measured, tokens/s"),
        table(("row", "speed", "measured", "predicted", "error", "remark"), rows, (0, 1, 5), wrap=True), "",
        heading("everything in the file"), *_facts(shared, kept), "", NOTHING_SENT,
    ]


def _facts(names: Sequence[str], lines: Sequence[Sequence[str]]) -> list[Part]:
    """Columns that all rows share as pairs, and the others as a table."""
    same = [place for place in range(len(names)) if len({line[place] for line in lines}) == 1 and len(lines) > 1]
    others = [place for place in range(len(names)) if place not in same]
    pairs = [f"{names[place]}: {lines[0][place]}" for place in same]
    return [*pairs, table([names[place] for place in others], [[line[place] for place in others] for line in lines],
                          len(others))]


def remark_text(check: RowCheck) -> str:
    """Words for what speaks against a row."""
    texts = [f"the same as row {check.duplicate}"] if check.duplicate else []
    texts += ["far from the prediction: is the setting right?"] if check.suspect else []
    texts += [f"as if {cause.part} had {cause.share:.0%} of its rate" for cause in check.causes[:1]]
    return "; ".join(texts) or "well"


def lacking_text(lacking: Sequence[Lacking]) -> str:
    """A line for each thing that is missing."""
    return "\n".join(["share: this is missing, and the output does not say it:",
                      *(f"{one.option}: {one.why}" for one in lacking)])
