"""The page of ``trilane accuracy --requests`` for timed copies and kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trilane.output.pages.output import Part, heading, legend, table
from trilane.study.cache_logs.kernel_rows import KernelRow, errors_by_part, predicted_us

_MEANINGS = {
    "copy": "from the host's memory to the GPU's", "gpu": "a product, by the rate of the GPU's memory",
    "cpu": "experts of the CPU, by the rate of its memory",
    "median, p90": "of the errors without their signs; bias: median with their signs, above 0 is predicted too slow",
}


def kernels_page(rows: Sequence[KernelRow], path: str) -> list[Part]:
    """Errors of each part, and all rows."""
    totals = [
        [part, str(len(errors)), *(f"{value:.1%}" for value in _summary(errors))]
        for part, errors in errors_by_part(rows).items()
    ]
    lines = [[row.id, row.part, f"{predicted_us(row):,.1f}", f"{row.us:,.1f}"] for row in rows]
    return [
        heading(f"{len(rows)} timed copies and kernels: {path}"), "",
        table(["", "rows", "median", "p90", "bias"], totals), "",
        table(["row", "part", "predicted us", "measured us"], lines, 2), "",
        legend(_MEANINGS),
    ]


def _summary(errors: Sequence[float]) -> tuple[float, float, float]:
    """Median and nine tenths of the errors without their signs, median with them."""
    size = np.abs(errors)
    return float(np.median(size)), float(np.quantile(size, 0.9)), float(np.median(errors))


def kernels_record(rows: Sequence[KernelRow]) -> dict[str, Any]:
    """JSON-ready: a record for each row."""
    return {"rows": [
        {"id": row.id, "machine": row.machine, "part": row.part, "predicted_us": predicted_us(row),
         "measured_us": row.us}
        for row in rows
    ]}
