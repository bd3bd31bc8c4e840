"""Published measurements of quality under changed routing or fewer bits, each with its source.

``published.csv`` has those of repositories and threads; the accuracies that the papers print are read from
``study/papers/published.csv``. Values of one ``group`` can be compared with each other: one model, one measure and one
text or task. ``choice`` is Trilane's policy with the same method at the same value of its parameter, if there is one.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from math import log, log1p
from pathlib import Path
from typing import Annotated, Literal

from policies.papers.smoe import Smoe
from trilane.common.csv_files import read_csv
from trilane.common.hints import Name, between
from trilane.study.papers.figures import FIGURES, PublishedFigure, read_figures
from trilane.study.quality.summary import QualityError

PUBLISHED = Path(__file__).with_name("published.csv")
LESS_IS_BETTER = ("kl", "perplexity", "perplexity change percent")
Measure = Literal[
    "kl", "perplexity", "perplexity change percent", "agreement percent", "agreement of the routing percent",
    "accuracy percent", "right of 10", "right of 15",
]
_SMOE = re.compile(r"smoe-t4-(?P<task>.+)-(?P<model>[a-z0-9]+)-a(?P<alpha>[\d.]+)")
_DAOP = re.compile(r"daop-t6-(?P<model>[^-]+)-(?P<share>[\d.]+)-(?P<task>.+)")


@dataclass(frozen=True, kw_only=True)
class PublishedQuality:
    """One value. ``baseline``: without the method, in the same measure; ``sample``: what it was measured on.

    ``moved``: share of the routing that is changed, of the kind ``moved_kind``. ``cached_share``: of the experts.
    """

    id: Name
    group: Name
    model: str
    method: str
    choice: str = ""
    setting: str = ""
    measure: Measure
    value: float
    baseline: float | None = None
    sample: str = ""
    moved: Annotated[float, between(0, 1)] | None = None
    moved_kind: str = ""
    tok_s: float | None = None
    baseline_tok_s: float | None = None
    source: str
    cached_share: float | None = None

    @property
    def loss(self) -> float:
        """A number that grows as quality falls, comparable within the group."""
        return self.value if self.measure in LESS_IS_BETTER else -self.value

    @property
    def nats(self) -> float | None:
        """Cost of the method in nats a token: the divergence over that of the baseline or, where perplexity is all
        that is known, the change of its logarithm. None for other measures."""
        if self.measure == "kl":
            return self.value - (self.baseline or 0.0)
        if self.measure == "perplexity" and self.baseline is not None:
            return log(self.value / self.baseline)
        return log1p(self.value / 100) if self.measure == "perplexity change percent" else None


@cache
def published() -> tuple[PublishedQuality, ...]:
    """All values, those of papers last. Raises QualityError."""
    own = read_csv(PublishedQuality, PUBLISHED, "a CSV file of published quality", QualityError)
    papers = [found for figure in read_figures(FIGURES).values() if (found := _of_paper(figure)) is not None]
    return (*own, *papers)


def groups() -> dict[str, list[PublishedQuality]]:
    """Values by group."""
    found = defaultdict(list)
    for each in published():
        found[each.group].append(each)
    return found


def _of_paper(figure: PublishedFigure) -> PublishedQuality | None:
    """An accuracy of a paper's table; None for other figures."""
    if figure.quantity != "accuracy" or figure.value is None:
        return None
    choice, cached_share, group = "", None, f"{figure.paper} {figure.where}".lower().replace(" ", "-")
    if match := _SMOE.fullmatch(figure.id):
        alpha = float(match["alpha"])
        choice, group = _smoe(alpha), f"{group}-{match['model']}-{match['task']}"
    elif match := _DAOP.fullmatch(figure.id):
        cached_share = float(match["share"]) / 100
        choice, group = "daop" if cached_share < 1 else "", f"{group}-{match['model']}-{match['task']}"
    else:
        group = f"{group}-{figure.model}-{figure.id.rpartition('-')[2]}".lower().replace(" ", "-")
    return PublishedQuality(
        id=figure.id, group=group, model=figure.model, method=figure.method, choice=choice,
        measure="accuracy percent", value=figure.value, source=f"{figure.paper}, {figure.where}",
        cached_share=cached_share,
    )


def _smoe(alpha: float) -> str:
    """SMoE at a value of alpha; empty for 0, which keeps the routing."""
    if not alpha:
        return ""
    return "smoe" if alpha == Smoe().alpha else f"smoe{{alpha: {alpha:g}}}"
