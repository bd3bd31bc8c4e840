"""Tables of measured quality: a CSV file with a row for every policy on a model."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from trilane.common.files import atomic_path, plain_target
from trilane.study.quality.summary import SHARES, Quality, QualityError, TextMean

_INTERVALS = ("kl", "agreement", "perplexity_change")
_ENDS = ("", "_low", "_high")
_LISTS = ("kl_by_position", "drift_by_layer")
COLUMNS = (
    "model", "choice", "cached_share", "texts", "tokens", *(f"{name}{end}" for name in _INTERVALS for end in _ENDS),
    "exact_perplexity", "tpot_ms", *SHARES, *_LISTS,
)
HALF = 0.5  # of the experts, cached: the share at which all policies were measured
BUNDLED = Path(__file__).with_name("measured.csv")


def write_table(found: Sequence[Quality], path: str | Path) -> None:
    """Write the table, whole or not at all."""
    with atomic_path(plain_target(Path(path))) as aside, aside.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(_cells, found))


def read_table(path: str | Path) -> list[Quality]:
    """Read a table. Raises QualityError for another file."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise QualityError(
                f"{path}: expected the table of trilane quality, with the columns {', '.join(COLUMNS[:4])}, ...; got "
                f"{', '.join(reader.fieldnames or ['nothing'])}; write one with -o"
            )
        try:
            return [_quality(row) for row in reader]
        except (TypeError, ValueError) as error:
            raise QualityError(f"{path}: expected a number in each numeric column: {error}") from None


def _cells(quality: Quality) -> dict[str, str]:
    told = quality.to_dict()
    numbers = {name: f"{told[name]:.6g}" for name in COLUMNS[5:] if name in told and name not in _LISTS}
    return {
        "model": quality.model, "choice": quality.choice, "texts": str(quality.texts), "tokens": str(quality.tokens),
        "cached_share": "" if quality.cached_share is None else f"{quality.cached_share:g}",
        **numbers, **{name: f"{quality.shares.get(name, 0.0):.6g}" for name in SHARES},
        **{name: ";".join(f"{value:.6g}" for value in told[name]) for name in _LISTS},
    }


def _quality(row: Mapping[str, str]) -> Quality:
    intervals = {name: TextMean(*(float(row[f"{name}{end}"]) for end in _ENDS)) for name in _INTERVALS}
    by_position, by_layer = (tuple(map(float, row[name].split(";"))) for name in _LISTS)
    return Quality(
        row["model"], row["choice"], float(row["cached_share"]) if row["cached_share"] else None,
        int(row["texts"]), int(row["tokens"]), **intervals,
        exact_perplexity=float(row["exact_perplexity"]), tpot_ms=float(row["tpot_ms"]),
        shares={name: float(row[name]) for name in SHARES}, kl_by_position=by_position, drift_by_layer=by_layer,
    )
