"""Figures that papers and other sources print: ``published.csv``, and ``further/*.csv`` of the same form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from trilane.common.csv_files import read_csv
from trilane.common.errors import TrilaneError
from trilane.common.hints import Name, at_most

FIGURES = Path(__file__).with_name("published.csv")
FURTHER = Path(__file__).with_name("further")


class PapersError(TrilaneError):
    """Papers, figures or plays that cannot be read, or names that are not among them."""


@dataclass(frozen=True, kw_only=True)
class PublishedFigure:
    """A figure and its place. ``kind``: what the text says of it; ``left_out``: why it is not asked."""

    id: Name
    paper: Name
    where: str
    quantity: Name
    method: str
    baseline: str
    model: str
    value: Annotated[float, at_most(1e9)] | None
    unit: str
    kind: Literal["exact", "approx", "range_lo", "range_hi", "upper_bound", "lower_bound", "maximum", "derived",
                  "missing"]
    left_out: str

    @property
    def bound(self) -> str:
        """The sign in front of a bound; empty for other figures."""
        return {"upper_bound": "<=", "lower_bound": ">="}.get(self.kind, "")

    def meets_bound(self, simulated: float) -> bool:
        """True if it is a bound, and the value on its right side."""
        assert self.value is not None
        return {"<=": simulated <= self.value, ">=": simulated >= self.value}.get(self.bound, False)

    def log_ratio(self, simulated: float) -> float:
        """ln(simulated / published); 0 on the right side of a bound, infinite where the signs differ."""
        assert self.value is not None
        if self.meets_bound(simulated):
            return 0.0
        ratio = simulated / self.value
        return math.log(ratio) if ratio > 0 else -math.inf


@cache
def read_figures(path: Path = FIGURES) -> Mapping[str, PublishedFigure]:
    """By id. Raises PapersError."""
    figures = read_csv(PublishedFigure, path, "a CSV file of published figures", PapersError)
    found = {figure.id: figure for figure in figures}
    if len(found) < len(figures):
        raise PapersError(f"{path}: expected an id of its own for every figure")
    return found


@cache
def published() -> Mapping[str, PublishedFigure]:
    """The figures of the five papers and of all further sources, by id. Raises PapersError."""
    files = [read_figures(path) for path in (FIGURES, *sorted(FURTHER.glob("*.csv")))]
    found = {figure_id: figure for file in files for figure_id, figure in file.items()}
    if len(found) < sum(map(len, files)):
        raise PapersError(f"{FURTHER}: expected an id of its own for every figure, in all files")
    return found


def askable() -> dict[str, PublishedFigure]:
    """Published figures that are not left out, by id."""
    return {figure.id: figure for figure in published().values() if not figure.left_out}
