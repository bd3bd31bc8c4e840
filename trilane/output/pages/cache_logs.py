"""The page of ``trilane accuracy --requests`` for logs of caches of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from trilane.output.pages.output import Part, heading, legend, table
from trilane.study.cache_logs.comparison import (
    GIVEN,
    HIT_RATE,
    LOADS,
    QUANTITIES,
    SETTINGS,
    STEP,
    Compared,
    ComparedLogs,
)

_MEANINGS = {
    "hit rate": "predicted less measured, in points; experts of a layer that the cache has when it is routed",
    "loads given": "the log's loads; the times alone are predicted",
    "loads predicted": "by the policy, played at every step of the model's routing",
    "median, p90": "of the errors without their signs; bias: median with their signs",
    "(ms)": "the machine is assumed, or a number was taken from the row: its times count in no error",
}


def cache_logs_page(found: ComparedLogs, path: str) -> list[Part]:
    """Errors by quantity, directions of pairs, all rows, and those that are not asked."""
    lines: list[Part] = [heading(f"{len(found.asked)} settings of caches of experts: {path}"), ""]
    lines += [table(["", "rows", "median", "p90", "bias"], list(_totals(found))), ""]
    if found.pairs:
        lines += [table(["direction of a change of", "pairs", "right"], list(_directions(found))), ""]
    head = ["row", "policy", "slots", "prefetch", "hits", "measured", "loads", "measured", "ms", "measured"]
    lines += [table(head, [_row(one) for one in found.asked], 2), "", legend(_MEANINGS)]
    if found.left_out:
        reasons = sorted({*found.left_out.values()})
        lines += ["", f"{len(found.left_out)} rows are not asked: {'; '.join(reasons)}"]
    return lines


def _totals(found: ComparedLogs) -> Iterator[list[str]]:
    for quantity in QUANTITIES:
        if errors := found.errors(quantity):
            size = np.abs(errors)
            values = np.median(size), np.quantile(size, 0.9), np.median(errors)
            points = quantity == HIT_RATE
            cells = [f"{100 * value:.1f}" for value in values] if points else [f"{value:.1%}" for value in values]
            yield [f"{quantity}, points" if points else quantity, str(len(errors)), *cells]


def _directions(found: ComparedLogs) -> Iterator[list[str]]:
    for setting in SETTINGS:
        if pairs := [pair for pair in found.pairs if pair.setting == setting]:
            yield [setting, str(len(pairs)), str(sum(pair.right for pair in pairs))]


def _row(one: Compared) -> list[str]:
    row, played = one.row, one.played
    time = "" if played.step_ms is None else f"{played.step_ms:.1f}"
    return [
        row.id, row.policy.partition("{")[0], f"{row.slots:.1f}",
        str(row.prefetch), f"{played.hit_rate:.1%}", _cell(row.hit_rate, "{:.1%}"), f"{played.loads:.1f}",
        _cell(row.loads, "{:.1f}"), time, _cell(row.step_ms, "{:.1f}" if one.counts(STEP) else "({:.1f})"),
    ]


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def record_of(found: ComparedLogs) -> dict[str, Any]:
    """JSON-ready: a record for each row and each pair."""
    names = {HIT_RATE: "hit_rate", LOADS: "loads", GIVEN: "given_ms", STEP: "step_ms"}
    rows = [
        {
            "id": one.row.id, "source": one.row.source, "model": one.row.model, "policy": one.row.policy,
            "slots": one.row.slots, "prefetch": one.row.prefetch, "predicted": vars(one.played),
            "compared": {
                names[quantity]: {"predicted": predicted, "measured": measured, "counts": one.counts(quantity)}
                for quantity, (predicted, measured) in one.values.items()
            },
        }
        for one in found.asked
    ]
    pairs = [pair._asdict() | {"right": pair.right} for pair in found.pairs]
    return {"rows": rows, "pairs": pairs, "left_out": found.left_out}
