"""*Share*: a program's output next to the predictions, and the file that can be shared; as ``trilane share``."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from io import StringIO
from typing import Any

from traces.models.quantisation import format_named
from trilane.common.errors import TrilaneError
from trilane.engines.accuracy.contribution import Given, RowCheck, cells, check_rows, contribution
from trilane.engines.accuracy.errors import measured
from trilane.engines.accuracy.outputs import speeds_in
from trilane.output.pages.output import number, signed_percent
from trilane.output.pages.share import NOTHING_SENT, remark_text
from trilane.page.questions import Query, checked, whole
from trilane.page.records import Record


def shared(text: str, query: Query) -> Record:
    """The rows of a text, what is missing for them, or why there are none."""
    try:
        return _shared(text, checked(query))
    except TrilaneError as error:
        return {"kind": "refused", "text": str(error)}


def _shared(text: str, query: Query) -> Record:
    named: dict[str, Any] = {name: query.get(name) or None for name in ("model", "gpu", "ram", "cpu", "pcie")}
    named |= {name: whole(query, name) for name in ("cores", "channels")}
    weights = format_named(query["weights"]) if query.get("weights") else None
    given = Given(**named, weights=weights, cpu_layers=whole(query, "n_cpu_moe", 0, 1000))
    made = contribution(speeds_in(text), given)
    if made.lacking:
        return {"kind": "lacking", "missing": [{"name": one.option.removeprefix("--").replace("-", "_"), "why": one.why}
                                               for one in made.lacking]}
    lines = cells(made.rows)
    return {
        "kind": "shared", "columns": lines[0], "lines": lines[1:], "csv": _csv(lines), "note": NOTHING_SENT,
        "rows": [_row(check) for check in check_rows(made.rows)],
    }


def _row(check: RowCheck) -> Record:
    speeds = zip(("tokens/s", "prompt tokens/s"), measured(check.row), check.predicted, strict=True)
    return {
        "id": check.row.id, "error": signed_percent(check.error), "remark": remark_text(check), "well": check.well,
        "speeds": [{"name": name, "measured": known, "predicted": predicted, "measured_text": number(known),
                    "predicted_text": number(predicted)} for name, known, predicted in speeds if known is not None],
    }


def _csv(lines: Sequence[Sequence[str]]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
