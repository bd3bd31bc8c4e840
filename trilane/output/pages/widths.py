"""Pages as narrow as a terminal or a pipe: lines are folded, tables wrap their texts or turn; nothing is cut."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from textwrap import wrap

from rich.cells import cell_len
from rich.table import Column, Table
from rich.text import Text

_LEAST_TEXT = 14  # characters to which a column of texts shrinks at most
_LONG_WORD = 30
_KEPT = "\N{NO-BREAK SPACE}"


class Command(str):
    """A command line to paste: never broken on a terminal, elsewhere only behind a backslash."""

    __slots__ = ()


class Markdown(str):
    """A text whose lines are never broken."""

    __slots__ = ()


# --- tables -----------------------------------------------------------------------------------------------------------


def fitted(table: Table, width: int) -> Table:
    """A table that is no wider: as it is, with texts and headers on several lines, with one space between columns, or
    turned, row below row.

    Names and values without headers are folded by themselves.
    """
    if not table.show_header:
        return table
    columns, widths = table.columns, [_width(column) for column in table.columns]
    if sum(widths) + table.padding[1] * (len(columns) - 1) <= width:
        return table
    least = [_least(column, own) for column, own in zip(columns, widths, strict=True)]
    for gap in range(table.padding[1], 0, -1):
        room = width - gap * (len(columns) - 1)
        if sum(least) <= room:
            return _wrapped(table, _shrunk(widths, least, room), gap)
    return _turned(table)


def _width(column: Column) -> int:
    """Characters of a column's longest line."""
    longest = max(_longest(line) for line in _texts(column))
    return longest if column.max_width is None else min(longest, max(column.max_width, _longest(_header(column))))


def _least(column: Column, width: int) -> int:
    """Characters that a column needs: numbers are never broken, nor are words, unless they are very long."""
    if column.justify == "left":
        words = max(cell_len(word) for text in _texts(column) for word in [*text.split(), ""])
        return min(width, max(_LEAST_TEXT, min(words, _LONG_WORD)))
    words = max(cell_len(word) for word in [*_header(column).split(), ""])
    return max([words, *(_longest(str(cell)) for cell in column.cells)])


def _shrunk(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths that have room together: the widest columns become narrower first."""
    shrunk = list(widths)
    while sum(shrunk) > room:
        widest = max((each for each in range(len(shrunk)) if shrunk[each] > least[each]), key=shrunk.__getitem__)
        shrunk[widest] -= 1
    return shrunk


def _wrapped(table: Table, widths: Sequence[int], gap: int) -> Table:
    """A table with columns of these widths. The last lines of all headers are level."""
    headers = [
        [part for line in _header(column).strip().split("\n") for part in wrap(line, width) or [""]]
        for column, width in zip(table.columns, widths, strict=True)
    ]
    tall = max(map(len, headers))
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
    for column, lines, width in zip(table.columns, headers, widths, strict=True):
        made.add_column(
            Text("\n".join([*[""] * (tall - len(lines)), *lines])), justify=column.justify, header_style="bold",
            width=width, overflow="fold",
        )
    for row in zip(*(column.cells for column in table.columns), strict=True):
        made.add_row(*row)
    return made


def _turned(table: Table) -> Table:
    """Rows one below the other: the first cell of each as a heading, then a line for each other that is not empty."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    names = [" ".join(_header(column).split()) for column in table.columns]
    for first, *others in zip(*(column.cells for column in table.columns), strict=True):
        made.add_row(Text(str(first), "bold"), "")
        for name, cell in zip(names[1:], others, strict=True):
            if str(cell):
                made.add_row(f"  {name}", cell)
    return made


def _texts(column: Column) -> Iterator[str]:
    yield _header(column)
    yield from map(str, column.cells)


def _header(column: Column) -> str:
    return str(column.header)


def _longest(text: str) -> int:
    return max(map(cell_len, text.split("\n")))


# --- lines ------------------------------------------------------------------------------------------------------------


def folded(line: str, width: int) -> list[str]:
    """A line in lines of at most ``width`` characters; they go on below its last column."""
    if cell_len(line) <= width:
        return [line]
    indent = _last_column(line, width)
    return wrap(
        line[indent:], width, initial_indent=line[:indent], subsequent_indent=" " * indent,
        break_on_hyphens=False, break_long_words=False,
    )


def _last_column(line: str, width: int) -> int:
    """Index at which the last column of a line begins, or the text behind a bullet; 0 without."""
    gaps = [gap.end() for gap in re.finditer(r" {2,}|^- ", line) if gap.end() < width // 2]
    return gaps[-1] if gaps else 0


def folded_command(command: str, width: int) -> list[str]:
    r"""A command line in lines of at most ``width`` characters that end in a \; options stay with their values."""
    if len(command) <= width:
        return [command]
    kept = re.sub(r" (?!-)", _KEPT, command)
    lines = wrap(kept, width - 2, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
    return " \\\n".join(lines).replace(_KEPT, " ").splitlines()
