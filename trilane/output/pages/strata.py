"""The page of ``trilane accuracy --requests``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from trilane.engines.strata.predicted import QUANTITIES, Predicted
from trilane.engines.strata.predictions import Predictions, grouped
from trilane.engines.strata.sweeps import Sweep
from trilane.output.pages.output import Part, heading, legend, table

_NEAR = 0.05
_MEANINGS = {
    "hits given": "the log's hits and reads over the link; the times alone are predicted",
    "hits predicted": "by the slots of the cache; the share over the link is the row's, its log's, or by the rule",
    "decode tokens/s": "rows that state no windows: a window has 2.1 drafts, of which 0.7 are accepted",
    "several GPUs": "a range of layers each; hits and drafts as where none are stated",
    "median, p90": "of the errors without their signs; bias: median with their signs, above 0 is predicted too slow",
    "null": "GPU part + microseconds x entries on the CPU, both fitted to the machine's own rows",
}


def errors_of(pairs: Iterable[tuple[Predicted, float, float]]) -> list[float]:
    """Predicted over measured, minus 1."""
    return [predicted / measured - 1 for _, predicted, measured in pairs]


def strata_page(found: Predictions, path: str) -> list[Part]:
    """Errors by quantity, by machine, and the rows that are not asked."""
    machines = len(grouped(found.asked))
    lines: list[Part] = [heading(f"{len(found.asked)} requests of {machines} machines and weights: {path}"), ""]
    lines += [table(["", "rows", "machines", "median", "p90", "bias", "null: median", "p90"], _totals(found)), ""]
    lines += _hits(found)
    lines += [table(["window, hits given", "rows", "median", "p90", "bias", "null"], _machines(found)), ""]
    lines += [legend(_MEANINGS)]
    if found.left_out:
        reasons = sorted({*found.left_out.values()})
        lines += ["", f"{len(found.left_out)} rows are not asked: {'; '.join(reasons)}"]
    return lines


def sweeps_part(found: Sequence[Sweep]) -> list[Part]:
    """For each setting that was varied, the value measured best, the predicted one, and what that costs."""
    rows = [
        [each.machine, each.knob, str(len(each.measured)), f"{each.best:g}", f"{each.chosen:g}", f"{each.cost:.1%}"]
        for each in found
    ]
    near = sum(each.cost <= _NEAR for each in found)
    title = heading(f"Best settings: {near} of {len(found)} cost at most {_NEAR:.0%} of the best measured speed")
    return ["", title, table(["machine", "setting", "values", "best", "predicted", "cost"], rows, 2)]


def _totals(found: Predictions) -> list[list[str]]:
    rows = []
    for name in QUANTITIES:
        pairs = found.pairs(name)
        if not pairs:
            continue
        null = [found.null_ms[one.request.id] / real - 1 for one, _, real in pairs if name in QUANTITIES[:2]]
        machines = str(len(grouped(one for one, _, _ in pairs)))
        rows.append(
            [name, str(len(pairs)), machines, *_errors(errors_of(pairs)), *(_errors(null)[:2] if null else ["", ""])]
        )
    return rows


def _machines(found: Predictions) -> list[list[str]]:
    rows = []
    for machine, group in grouped(one for one, _, _ in found.pairs(QUANTITIES[0])).items():
        pairs = [(one, *one.pairs[QUANTITIES[0]]) for one in group]
        null = [found.null_ms[one.request.id] / real - 1 for one, _, real in pairs]
        rows.append([machine, str(len(pairs)), *_errors(errors_of(pairs)), _errors(null)[0]])
    return rows


def _hits(found: Predictions) -> list[str]:
    off = [abs(rates[0] - rates[1]) for one in found.asked if (rates := one.hit_rates)]
    if not off:
        return []
    points = 100 * np.median(off), 100 * np.quantile(off, 0.9)
    return [f"Rate of hits by slots: {points[0]:.1f} points off in the median, nine of ten within {points[1]:.1f}", ""]


def _errors(errors: Sequence[float]) -> list[str]:
    size = np.abs(errors)
    return [f"{np.median(size):.1%}", f"{np.quantile(size, 0.9):.1%}", f"{np.median(errors):+.1%}"]


def record_of(found: Predictions) -> dict[str, Any]:
    """JSON-ready: a record for each request."""
    rows = []
    for one in found.asked:
        rates = one.hit_rates
        pairs = {
            name: {"predicted_ms": round(predicted, 3), "measured_ms": round(measured, 3)}
            for name, (predicted, measured) in one.pairs.items()
        }
        rows.append({
            "id": one.request.id, "machine": one.request.machine, "quant": one.request.quant, **pairs,
            "null_window_ms": found.null_ms.get(one.request.id),
            "hit_rate": rates and {"predicted": round(rates[0], 4), "measured": round(rates[1], 4)},
            "parts_ms": one.given and {name: round(ns / 1e6, 3) for name, ns in vars(one.given).items()},
        })
    return {"requests": rows, "left_out": dict(found.left_out)}
