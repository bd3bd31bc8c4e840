"""What came of a campaign: as a table, which docs/notes/reliability.md shows too, and as a list of faults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.fuzz.campaign import Tally

PAGE = Path(__file__).parents[2] / "docs" / "notes" / "reliability.md"
_BLOCK = re.compile(r"(?<=<!-- fuzz -->\n).*?(?=<!-- /fuzz -->)", re.DOTALL)
_COLUMNS = ("read", "inputs", "accepted", "refused", "faults", "mean ms", "slowest s", "most memory MiB")


def summary(tallies: Mapping[str, Tally]) -> list[str]:
    """A row for each reader, and one for all."""
    whole = [tally for tally in tallies.values() if tally.inputs]
    rows = [_row(reader, [tally]) for reader, tally in tallies.items() if tally.inputs]
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = (_COLUMNS, rule, *rows, _row("all", whole))
    return [f"| {' | '.join(_cells(line, widths))} |" for line in lines]


def _cells(line: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    for place, (cell, width) in enumerate(zip(line, widths, strict=True)):
        yield cell.rjust(width) if place else cell.ljust(width)


def _row(reader: str, tallies: Sequence[Tally]) -> list[str]:
    inputs, accepted = sum(each.inputs for each in tallies), sum(each.accepted for each in tallies)
    wrong = sum(len(tasks) for each in tallies for tasks in each.faults.values())
    return [
        reader, f"{inputs:,}", f"{accepted / inputs:.0%}", f"{(inputs - accepted - wrong) / inputs:.0%}", f"{wrong:,}",
        f"{1000 * sum(each.seconds for each in tallies) / inputs:.0f}", f"{max(each.slowest for each in tallies):.1f}",
        f"{max(each.grown_bytes for each in tallies) / 2**20:.0f}",
    ]


def faults(tallies: Mapping[str, Tally]) -> Iterator[str]:
    """Every kind of fault, the most frequent first, with the first input that has it."""
    found = [(tasks, fault) for tally in tallies.values() for fault, tasks in tally.faults.items()]
    for tasks, fault in sorted(found, key=lambda pair: -len(pair[0])):
        first = tasks[0]
        yield f'{len(tasks):>6,} x {fault}  --reader "{first.reader}" --seed {first.seed} --number {first.number}'


def write(tallies: Mapping[str, Tally], about: str) -> None:
    """Renew the block of the page."""
    block = "\n".join([*summary(tallies), "", f"{about}.", ""])
    PAGE.write_text(_BLOCK.sub(lambda _: block, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
