"""Tables with a row a run, of compared and of ablated policies: columns with their legend, without empty ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from policies.protocols import PolicyKind
from trilane.output.figures.marks import kind_of_row, marked
from trilane.output.figures.quality_words import nats
from trilane.output.pages.output import legend, mebibytes, number, percent, table
from trilane.study.quality.curve import estimated

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


def _kind_range(row: Row) -> str:
    quick, slow = row.get("tpot_ms_quick"), row.get("tpot_ms_slow")
    return "" if quick is None else f"{number(quick)}-{number(slow)}"


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: percent(row[name])


def _nats(row: Row) -> str:
    estimate = estimated(row)
    return "-" if estimate is None else nats(estimate.mean)


def _with_disk(name: str) -> Callable[[Row], str]:
    """A share of rows whose host has no room for all experts; nothing in others."""
    return lambda row: percent(row[name]) if name in row else ""


_TIMES = (
    Column("TTFT\nms", lambda row: number(row["ttft_ms"], 0)),
    Column("TPOT\nms", lambda row: number(row["tpot_ms"], 2)),
    Column("spread", _spread, "spread", "lowest and highest TPOT of them; - where all are equal"),
)
_HITS = Column(
    "hit\nrate", _share("decode_resident_hit_rate"),
    "hit rate", "active experts that were on the GPU when their layer was routed (kind: resident), in decode steps",
)
_PCIE = Column(
    "PCIe\nMiB/tok", lambda row: mebibytes(row["pcie_bytes_per_token"]),
    "PCIe", "expert weights copied to the GPU for each generated token",
)
_CHANGED = Column(
    "~", lambda row: percent(row["approximated_weight_share"]) if kind_of_row(row) is PolicyKind.CHANGES else "",
    "~", "changes the routing: the share of the router's weight on experts that do not run as routed",
)
_DIVERGED = Column(
    "KL\nest.", lambda row: _nats(row) if kind_of_row(row) is PolicyKind.CHANGES else "",
    "KL est.", "divergence of the next token in nats, estimated from the weight that is moved by a curve through mini "
    "models: it ranks policies, and is no measure for a large model (docs/quality.md)",
)
COMPARED = (  # of ``trilane compare``
    Column("\npolicy", lambda row: marked(row["policy"], kind_of_row(row))),
    *_TIMES,
    Column(
        "range\nof kind", _kind_range, "range of kind",
        "TPOT with the numbers of the quickest and of the slowest of such programs; a time of your own program narrows "
        "it: trilane engines --calibrate",
    ),
    _HITS, _PCIE,
    Column(
        "busy\ngpu", _share("gpu_busy_share"),
        "busy", "share of the time in which the lane works: GPU, CPU experts, copies to the GPU (h2d)",
    ),
    Column("\ncpu", _share("cpu_busy_share")),
    Column("\nh2d", _share("h2d_busy_share")),
    Column("\ndisk", _with_disk("disk_busy_share")),
    Column(
        "wait\nh2d", _share("stall_h2d_share"),
        "wait", "share of the time in which the GPU waits for copies (h2d) or CPU experts; it also waits for the host",
    ),
    Column("\ncpu", _share("stall_cpu_share")),
    Column("\ndisk", _with_disk("stall_disk_share"), "disk", "reads of experts into the host's memory"),
    Column(
        "RAM\nhits", _with_disk("ram_hit_rate"),
        "RAM hits", "of the experts that the CPU computed or a layer had copied, those that the host held (decode)",
    ),
    Column(
        "\nregret", lambda row: "" if row["regret"] is None else percent(row["regret"]),
        "regret", "TPOT over that of the clairvoyant run (*), which knows the future, minus 1",
    ),
    _CHANGED, _DIVERGED,
)
ABLATED = (  # of ``trilane ablate``
    Column("", lambda row: marked(row["label"], kind_of_row(row))),
    *_TIMES,
    Column(
        "speed-\nup", lambda row: "" if row["speedup"] is None else f"{row['speedup']:.2f}x",
        "speed-up", "TPOT of the first row over this row's",
    ),
    Column(
        "against\nwhole", lambda row: f"{100 * row['over_whole']:+.1f}%" if row["over_whole"] else "",
        "against whole", "TPOT over that of the policy with all its parts, minus 1",
    ),
    _HITS, _PCIE, _CHANGED,
)


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
    """The draws in words, with how they differ."""
    if len({tuple(draw["sequences"]) for draw in draws}) > 1:
        return f"{len(draws)} draws: the scenario, then others of the trace's sequences with other seeds"
    return f"{len(draws)} draws of the same sequences, which differ in the seed alone"
