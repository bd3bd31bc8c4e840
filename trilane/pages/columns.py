"""Tables with a row a run: columns with their legend; columns without any text are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from trilane.pages.output import legend, mebibytes, number, percent, table

Row = Mapping[str, Any]


class Column(NamedTuple):
    """``cell`` makes text of a row (``trilane.study.draws.summary``); the legend has a line ``term``: ``meaning``."""

    header: str
    cell: Callable[[Row], str]
    term: str = ""
    meaning: str = ""


def _spread(row: Row) -> str:
    low, high = row["tpot_ms_min"], row["tpot_ms_max"]
    if len(row["draws"]) == 1:
        return ""
    return "-" if low == high else f"{number(low)}-{number(high)}"


def _changed(row: Row) -> str:
    from policies.protocols import PolicyKind
    from sim.runs.vocabulary import kind_of

    return percent(row["approximated_weight_share"]) if kind_of(row["labels"]) is PolicyKind.CHANGES else ""


TTFT = Column("TTFT\nms", lambda row: number(row["ttft_ms"], 0))
TPOT = Column("TPOT\nms", lambda row: number(row["tpot_ms"], 2))
SPREAD = Column("spread", _spread, "spread", "lowest and highest TPOT of them; - where all are equal")
HITS = Column(
    "hit\nrate", lambda row: percent(row["decode_resident_hit_rate"]),
    "hit rate", "active experts that were on the GPU when their layer was routed (kind: resident), in decode steps",
)  # fmt: skip
PCIE = Column(
    "PCIe\nMiB/tok", lambda row: mebibytes(row["pcie_bytes_per_token"]),
    "PCIe", "expert weights copied to the GPU for each generated token",
)  # fmt: skip
CHANGED = Column(
    "~", _changed,
    "~", "changes the routing: the share of the router's weight on experts that do not run as routed",
)  # fmt: skip


def name_cell(key: str) -> Callable[[Row], str]:
    """A cell with a name of the row, marked if the policy knows the future (*) or changes the routing (~)."""

    def cell(row: Row) -> str:
        from sim.runs.vocabulary import kind_of
        from trilane.figures.marks import marked

        return marked(row[key], kind_of(row.get("labels", ())))

    return cell


def tabulate(columns: Sequence[Column], rows: Sequence[Row]) -> tuple[Table, str]:
    """The table, and a legend of its columns. An empty row is an empty line; one with a reason why it was
    ``refused`` has only its name, the first column.
    """
    lines = [_cells(columns, row) for row in rows]
    shown = [place for place in range(len(columns)) if any(line[place] for line in lines)]
    meanings = {columns[place].term: columns[place].meaning for place in shown if columns[place].term}
    draws = next(row["draws"] for row in rows if "draws" in row)
    if len(draws) > 1:
        meanings = {"TPOT": f"mean, as all columns, over {_in_words(draws)}", **meanings}
    made = table([columns[place].header for place in shown], [[line[place] for place in shown] for line in lines])
    return made, legend(meanings)


def _cells(columns: Sequence[Column], row: Row) -> list[str]:
    if row and not row.get("refused"):
        return [column.cell(row) for column in columns]
    name = [columns[0].cell(row), "cannot run"] if row else []
    return name + [""] * (len(columns) - len(name))


def _in_words(draws: Sequence[Row]) -> str:
    """What the draws are, and how they differ."""
    if len({tuple(draw["sequences"]) for draw in draws}) > 1:
        return f"{len(draws)} draws: the scenario, then others of the trace's sequences with other seeds"
    return f"{len(draws)} draws of the same sequences, which differ in the seed alone"
