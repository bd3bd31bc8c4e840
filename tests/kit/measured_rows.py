"""Measured rows for tests: a model and machine that are known, and speeds that are made up."""

from __future__ import annotations

from typing import Any

from trilane.engines.accuracy.measured_rows import MeasuredRow

DESKTOP = "rtx-4080+ddr5-5600+ryzen-9-7950x"


def row(row_id: str = "1", decode: float | None = 100.0, **others: Any) -> MeasuredRow:
    """A row of Qwen3-30B on a desktop, wholly on the GPU."""
    given = {"model": "qwen3-30b-a3b", "weights": "q4_k_m", "machine": DESKTOP, "engine": "llama.cpp", "cpu_layers": 0}
    return MeasuredRow(id=row_id, decode_tokens_per_s=decode, **{"quality": "A", **given, **others})
