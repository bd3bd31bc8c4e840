"""Reports of benchmarks: one section a benchmark, as tables on the terminal, JSON and Markdown."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trilane.output.pages.output import bullets, markdown_table

Cell = str | int | float | None
PACKAGES = ("trilane", "simpy", "numpy", "pandas", "scipy")


@dataclass(frozen=True)
class Target:
    """A figure to reach."""

    what: str
    unit: str
    wanted: float
    got: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        """True if ``got`` is on the right side of ``wanted``."""
        return self.got >= self.wanted if self.at_least else self.got <= self.wanted

    def cells(self) -> list[Cell]:
        """One row of the table of targets."""
        sign = "at least" if self.at_least else "at most"
        wanted = f"{sign} {show(self.wanted)} {self.unit}"
        return [self.what, wanted, f"{show(self.got)} {self.unit}", "met" if self.met else "MISSED"]


@dataclass(frozen=True)
class Section:
    """One table of figures."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    targets: Sequence[Target] = ()
    notes: Sequence[str] = field(default_factory=tuple)


def machine() -> dict[str, Cell]:
    """Facts of the machine and of the day of the measurement."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "date": date.today().isoformat(),
        "load average (1 min, at the start)": round(os.getloadavg()[0], 2),
        **{name: version(name) for name in PACKAGES},
    }


def cpu_model() -> str:
    """The processor's name for itself."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def show(value: Cell) -> str:
    """A number with about three digits that count, text as it is."""
    if value is None or isinstance(value, str):
        return value or "-"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def targets_section(sections: Sequence[Section]) -> Sequence[Section]:
    """All targets in one table, if there are any."""
    rows = [target.cells() for section in sections for target in section.targets]
    return [Section("Targets", ("figure", "wanted", "got", ""), rows)] if rows else []


def print_section(section: Section) -> None:
    """A table on the terminal."""
    table = Table(title=section.title, title_justify="left")
    for place, column in enumerate(section.columns):
        table.add_column(column, justify="right" if place else "left")
    for row in section.rows:
        table.add_row(*map(show, row))
    console = Console()
    console.print(table)
    for note in section.notes:
        console.print(f"  {note}", style="dim", highlight=False)


def write_json(where: dict[str, Cell], sections: Sequence[Section], path: Path) -> None:
    """Write every figure by the name of its column."""
    document = {
        "machine": where,
        "sections": [
            {
                "title": section.title,
                "rows": [dict(zip(section.columns, row, strict=True)) for row in section.rows],
                "targets": [{**asdict(target), "met": target.met} for target in section.targets],
                "notes": list(section.notes),
            }
            for section in sections
        ],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_markdown(
    where: dict[str, Cell], sections: Sequence[Section], path: Path, title: str, command: str
) -> None:
    """Write sections as a page, with all targets first."""
    text = markdown_of(where, [*targets_section(sections), *sections], title, command)
    path.write_text(text, encoding="utf-8")


def report(where: dict[str, Cell], sections: Sequence[Section], path: Path, title: str, keep: bool) -> None:
    """Print what was found; ``keep`` it, too, as ``path`` .json and .md. ``where``: before the first measurement."""
    for section in (*sections, *targets_section(sections)):
        print_section(section)
    if keep:
        write_json(where, sections, path.with_suffix(".json"))
        write_markdown(where, sections, path.with_suffix(".md"), title, str(where["command"]))


def measured_by(module: str, arguments: Sequence[str]) -> dict[str, Cell]:
    """Facts of the machine, and the command that measures."""
    return {**machine(), "command": " ".join([f"python -m {module}", *arguments])}


def markdown_of(where: dict[str, Cell], sections: Sequence[Section], title: str, command: str) -> str:
    """A page of the machine and the tables."""
    parts = [f"# {title}", f"Written by `{command}`.", bullets(f"{name}: {value}" for name, value in where.items())]
    for section in sections:
        parts += [f"## {section.title}", markdown_table(section.columns, [[*map(show, row)] for row in section.rows])]
        parts += [bullets(section.notes)] if section.notes else []
    return "\n\n".join(parts) + "\n"
