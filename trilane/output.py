"""What verbs print and write: tables, JSON, progress; results go to standard output, all else to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

T = TypeVar("T")

JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON too; [bold]-[/] prints it instead."),
]


class OutputError(ValueError):
    """A result that cannot be written where it was asked for."""


def errors() -> Console:
    """The console of messages and progress."""
    return Console(stderr=True, highlight=False)


def show(json_target: str | None, *parts: Table | str) -> None:
    """Print tables and lines, unless standard output belongs to JSON."""
    if json_target == "-":
        return
    console = Console(highlight=False)
    if not console.is_terminal:  # a pipe or a file has no width: let no table be cut there
        console = Console(highlight=False, width=220)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def note(message: str) -> None:
    """A remark that is no result."""
    errors().print(message, soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> Table:
    """A table whose first ``text_columns`` columns are text; the others are numbers and stand to the right."""
    wide = not sys.stdout.isatty() or Console().width >= 100
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0))
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < text_columns else "right", header_style="bold", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def pairs(title: str, values: Iterable[tuple[str, str]]) -> Table:
    """A table of names and what they stand for."""
    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, show_header=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in values:
        made.add_row(name, value)
    return made


def write_json(value: Any, target: str | None) -> None:
    """Write ``value`` to a file, or to standard output for ``-``; nothing for None."""
    if target is None:
        return
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    with aside(target) as path:
        path.write_text(text, encoding="utf-8")


@contextmanager
def aside(target: str | Path) -> Iterator[Path]:
    """A path to write to, which takes the name ``target`` once all is written; nothing half-written remains."""
    path = writable(target)
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def writable(target: str | Path) -> Path:
    """``target``, if a file can be put there: found out before the work, not after. Raises OutputError."""
    path = Path(target)
    if not path.parent.is_dir():
        raise OutputError(f"{path}: the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise OutputError(f"{path}: expected the name of a file, this is a folder")
    return path


def check_targets(*targets: str | Path | None) -> None:
    """Refuse, before any work, targets that cannot be written. Raises OutputError."""
    for target in targets:
        if target is not None and str(target) != "-":
            writable(target)


def progress(items: Sequence[T], label: str) -> Iterator[T]:
    """``items``, with a bar on standard error while it is a terminal."""
    console = errors()
    return iter(track(items, label, console=console, transient=True, disable=not console.is_terminal))


@contextmanager
def working(label: str) -> Iterator[None]:
    """A sign of life on standard error for work whose end is not known."""
    with errors().status(label):
        yield


def percent(value: float | None, digits: int = 0) -> str:
    """A fraction in percent."""
    return "-" if value is None else f"{100 * value:.{digits}f}%"


def number(value: float | None, digits: int = 1) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"
