"""The page of ``trilane engines --calibrate``: numbers that speeds set, and the other speeds predicted with them."""

from __future__ import annotations

from sim.costs.engine import load_engine
from trilane.output.pages.output import Part, heading, legend, pairs, percent, signed_percent, table
from trilane.study.calibration_rows import CalibratedRows, PredictedRow

_MEANINGS = {
    "range": "with the numbers of the quickest and of the slowest program of the kind",
    "kind": "with the kind's own numbers",
    "set": "with the numbers above",
    "error": "simulated over measured, minus 1; rows that were put in set the numbers, and are no predictions",
}


def calibration_page(found: CalibratedRows) -> list[Part]:
    """Numbers with the reason why they are those that were set, and a line a row."""
    engine = load_engine(found.engine)
    why, own = {one.number: one.why for one in engine.calibrated}, engine.flat()
    numbers = [(key, f"{value:.4g}, where {found.engine} has {own[key].value:g}: {why[key]}")
               for key, value in found.numbers.items()]
    rows = table(["row", "quantity", "measured", "range", "kind", "set", "error"], map(_cells, found.rows), (0, 1))
    title = heading(f"{found.engine}, set by {', '.join(found.put_in)}")
    return [title, pairs(numbers), "", rows, legend(_MEANINGS), *_summary(found)]


def _cells(each: PredictedRow) -> list[str]:
    low_high = "" if each.ends is None else f"{each.ends[0]:.4g}..{each.ends[1]:.4g}"
    error = "put in" if each.row.put_in else signed_percent(each.error)
    return [each.row.id, each.row.play.quantity, f"{each.row.play.value:.4g}", low_high, f"{each.before:.4g}",
            f"{each.simulated:.4g}", error]


def _summary(found: CalibratedRows) -> list[str]:
    if found.median_error is None:
        return ["", "all rows were put in: none is predicted"]
    others = [each for each in found.rows if not each.row.put_in]
    inside = [each for each in others if each.ends and each.ends[0] <= each.row.play.value <= each.ends[1]]
    near = sum(abs(each.error) <= 0.15 for each in others)
    return ["", f"{len(others)} rows predicted: median error {percent(found.median_error)}, {near} within 15 %; "
                f"{len(inside)} are in the range of the kind"]
