"""Output of verbs: tables, numbers, JSON, Markdown, progress; results go to standard output, all else to stderr."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn, track
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from trilane.common.files import OutputError, atomic_path, check_folder_of, ending_of, errors_name, plain_target
from trilane.common.quoting import printable, shortened
from trilane.common.units import MIB
from trilane.output.pages.widths import Command, Markdown, fitted, folded, folded_command

if TYPE_CHECKING:
    from trilane.study.player import Progress, Watch


T = TypeVar("T")
Part = Table | Text | str  # of a page
STANDARD_OUTPUT = Path("standard output")  # its name in messages
PIPE = 160  # characters of a line in a pipe or a file
WIDTH = "TRILANE_WIDTH"  # of the environment: another number of them

JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON too; [bold]-[/] prints it instead."),
]


def named_as(*endings: str) -> Callable[[str | None], str | None]:
    """A check of an option's value, the name of a file to write. It raises OutputError for another ending."""

    def check(path: str | None) -> str | None:
        if path is not None:
            ending_of(path, *endings)
        return path

    return check


def report(json_target: str | None, record: Any, *parts: Part) -> None:
    """Print the parts of a page, and write its ``record`` as JSON to ``json_target``, if that is not None."""
    show(json_target, *parts)
    write_json(record, json_target)


def errors() -> Console:
    """The console of messages and progress."""
    return Console(stderr=True, highlight=False)


def show(json_target: str | None, *parts: Part) -> None:
    """Print tables and lines, unless standard output belongs to JSON; to a pipe or a file without padding."""
    if json_target == "-":
        return
    console = Console(highlight=False)
    if console.is_terminal:
        _print(console, parts)
        return
    width = os.environ.get(WIDTH, "")
    piped = Console(highlight=False, width=int(width) if width.isdigit() and int(width) else PIPE, file=StringIO())
    _print(piped, parts)
    assert isinstance(piped.file, StringIO)
    _write("".join(f"{line.rstrip()}\n" for line in piped.file.getvalue().splitlines()))


def _write(text: str) -> None:
    """Write to standard output. Raises OSError with its name."""
    with errors_name(STANDARD_OUTPUT):
        sys.stdout.write(text)
        sys.stdout.flush()  # what is known is shown while the rest is worked out


def _print(console: Console, parts: Sequence[Part]) -> None:
    for part in parts:
        if isinstance(part, Table):
            console.print(fitted(part, console.width))
        elif isinstance(part, Text):
            console.print(part)
        else:
            console.print(plain("\n".join(_lines(part, console))), soft_wrap=True)


def _lines(text: str, console: Console) -> Iterator[str]:
    """The lines of a text, folded; a command line only where no terminal does it, and Markdown never."""
    for line in text.split("\n"):
        if isinstance(text, Markdown) or (isinstance(text, Command) and console.is_terminal):
            yield line
        else:
            yield from (folded_command if isinstance(text, Command) else folded)(line, console.width)


def note(message: str) -> None:
    """Print a remark, which is not part of the result, to standard error."""
    errors().print(plain(shortened(printable(message))), soft_wrap=True)


def plain(text: str, style: str = "") -> Text:
    """Text of any origin as it is: without rich's markup, and with control characters as escapes."""
    return Text(printable(text), style)


def heading(text: str) -> Text:
    """A line over a table."""
    return plain(text, "bold")


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    text_columns: int | Sequence[int] = 1,
    wrap: bool = False,
    widest: Mapping[str, int] | None = None,
) -> Table:
    """A table whose first ``text_columns`` columns, or those named, are text; the others are numbers, aligned to the
    right.

    ``wrap``: the last column may take several lines. ``widest``: so may these columns, from this many characters on.
    """
    lines = [list(row) for row in rows]
    texts = range(text_columns) if isinstance(text_columns, int) else text_columns
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    tall = max(column.count("\n") for column in columns)
    for place, column in enumerate(columns):
        most = (widest or {}).get(column)
        folded = most is not None or (wrap and place == len(columns) - 1)
        header = plain("\n" * (tall - column.count("\n")) + column)  # the last lines of all headers are level
        made.add_column(header, justify="left" if place in texts or folded else "right", header_style="bold",
                        no_wrap=not folded, overflow="fold" if folded else "ellipsis", max_width=most)
    for line in lines:
        made.add_row(*map(plain, line))
    return made


def legend(meanings: Mapping[str, str]) -> str:
    """Meanings of the columns and marks of a table: an empty line, then a line for each."""
    width = max(map(len, meanings)) + 2
    return "\n".join(["", *(f"{name:<{width}}{meaning}" for name, meaning in meanings.items())])


def pairs(values: Iterable[tuple[str, ...]]) -> Table:
    """Names and their values; a third column may hold sources."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    made.add_column(style="dim", overflow="fold")
    for row in values:
        made.add_row(*map(plain, row))
    return made


def reasons_table(title: str, what: str, reasons: Mapping[str, int]) -> list[Part]:
    """How many there are of each reason; nothing without any."""
    rows = [[str(count), reason] for reason, count in reasons.items()]
    return [heading(title), table([what, "why"], rows, 2), ""] if rows else []


def write_json(value: Any, target: str | None) -> None:
    """Write ``value`` to a file, or to standard output for ``-``; nothing for None."""
    if target is None:
        return
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    if target == "-":
        _write(text)
        return
    with atomic_path(writable(target)) as path:
        path.write_text(text, encoding="utf-8")


def writable(target: str | Path) -> Path:
    """``target``, if a file can be written there, which is checked before the work. Raises OutputError."""
    path = plain_target(Path(target))
    check_folder_of(path)
    if path.is_dir():
        raise OutputError(f"{path}: expected the name of a file, this is a folder")
    return path


def check_targets(
    *targets: str | Path | None, picture: str | None = None, data: bool = False,
    inputs: Iterable[str | Path | None] = (),
) -> None:
    """Refuse, before any work, targets that cannot be written, that are one file, or that would overwrite an input.

    ``picture``: one more target, of a kind that can be drawn; ``data``: a CSV goes next to it. ``inputs`` are names
    that the user gave; those that are not files are ignored, and a folder stands for the files in it. Raises
    OutputError, PictureError.
    """
    csv = Path(picture).with_suffix(".csv") if picture and data else None
    paths = [writable(target) for target in (*targets, picture, csv) if target is not None and str(target) != "-"]
    for place, path in enumerate(paths):
        if any(_same(path, other) for other in paths[:place]):
            raise OutputError(f"{path}: expected a file of its own for every result, two go there; name another")
    for given in (Path(name) for name in inputs if name):
        files = given.iterdir() if given.is_dir() else (given,)
        for file, path in product((file for file in files if file.exists()), paths):
            if _same(path, file):
                raise OutputError(f"{path}: expected another file than the input, which would be lost; name another")
    if picture is not None:
        from trilane.output.figures.figure_files import picture_format

        picture_format(picture)


def _same(one: Path, other: Path) -> bool:
    """True if two paths, of files that may not exist, are one file."""
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


def check_folder(target: str | None) -> None:
    """Refuse, before any work, a folder that cannot be used or created. Raises OutputError."""
    path = Path(target or ".")
    nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not nearest.is_dir():
        raise OutputError(f"{path}: expected a folder, {nearest} is a file")


def progress(items: Sequence[T], label: str) -> Iterator[T]:
    """``items``, with a progress bar if standard error is a terminal."""
    console = errors()
    return iter(track(items, label, console=console, transient=True, disable=not console.is_terminal))


@contextmanager
def watching(label: str) -> Iterator[Watch]:
    """A progress bar on standard error, if that is a terminal, which the block moves by calls with a ``Progress``."""
    console = errors()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"),
    )
    with Bar(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=600
    ) as bar:
        task = bar.add_task(label, total=None)
        begun: list[str] = []  # the part that is played

        def watch(now: Progress) -> None:
            if begun != [now.what]:  # what an earlier study has kept took no time in this one
                bar.reset(task, total=now.total, completed=now.kept)
                begun[:] = [now.what]
            failed = f" ({now.failed:,} failed)" if now.failed else ""
            bar.update(task, completed=now.done, description=f"{label}{f', {now.what}' if now.what else ''}{failed}")

        yield watch


@contextmanager
def working(label: str) -> Iterator[Callable[[str], None]]:
    """A spinner on standard error for work of unknown length; the block may change its text."""
    with errors().status(plain(label)) as status:
        yield lambda text: status.update(plain(text))


def percent(value: float | None, digits: int = 0) -> str:
    """A fraction in percent, or a dash for a missing one: None or NaN."""
    if value is None or value != value:
        return "-"
    return f"{round(100 * value, digits) + 0.0:.{digits}f}%"  # + 0.0: no minus before a zero


def number(value: float | None, digits: int = 1) -> str:
    """A number, or a dash for a missing one: None or NaN."""
    return "-" if value is None or value != value else f"{value:,.{digits}f}"


def mebibytes(size: float | None) -> str:
    """A number of bytes in MiB, or a dash for a missing one."""
    return number(None if size is None else size / MIB)


def signed_percent(value: float | None) -> str:
    """A difference in percent with its sign, or a dash for a missing one."""
    return "-" if value is None else f"{round(100 * value, 1) + 0.0:+.1f}%"


def reason_of(error: str) -> str:
    """An error without its numbers: errors that differ in numbers alone have one reason."""
    return re.sub(r"[\d.,]+", "", error)


# --- Markdown ---------------------------------------------------------------------------------------------------------

def markdown_table(
    headers: Sequence[str], lines: Iterable[Sequence[str]], text_columns: Sequence[int] = (0,), newline: str = " "
) -> str:
    """A table of which all columns but ``text_columns`` are numbers; ``newline`` stands for line breaks in cells."""
    rule = ["---" if place in text_columns else "---:" for place in range(len(headers))]
    return "\n".join(f"| {' | '.join(cells)} |".replace("\n", newline) for cells in (headers, rule, *lines))


def bullets(lines: Iterable[str]) -> str:
    """A list with an entry a line."""
    return "\n".join(f"- {line}" for line in lines)
