"""Expert caches in patched llama.cpp as others measured them, next to the same played here: ``python -m
benchmarks.expert_caches [--write]``. Five minutes on one core.

``expert_caches.csv`` has what was measured, a row with its source; ``expert_caches.yaml`` how it is played
(``cache_plays``).
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cache_plays import Facts, experiments, plays, settings, upload_costs, window_hits
from benchmarks.figures import machine as this_machine
from trilane.common.files import atomic_path
from trilane.output.pages.output import markdown_table

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "expert_caches.json", HERE / "expert_caches.md"
NEAR = 0.2  # of a ratio
SAME = 0.03  # of a ratio of 1: not told apart; deviations are 3.44 in 113.9 (repaired-72) and 3.60 in 81.7 (ncmoe-22)
_COLUMNS = ("method", "over", "quantity", "theirs", "ours", "ours / theirs", "source")
_UPLOADS = ("us an upload", "tok/s as shipped", "hits", "tok/s repaired", "hits")
Plays = Mapping[str, Mapping[str, Facts]]  # by machine and method


class Row(NamedTuple):
    """One measurement: a quantity of ``method``, or its ratio to that of ``over``."""

    machine: str
    method: str
    over: str
    quantity: str
    value: float
    source: str

    @property
    def measured(self) -> bool:
        """True if measured by an engine, or by a replay that counts; not by a formula of counts."""
        return not self.source.startswith("a formula")

    def played(self, results: Plays) -> float:
        """The quantity as played here."""
        mine = results[self.machine][self.method][self.quantity]
        return mine / results[self.machine][self.over][self.quantity] if self.over else mine


def rows() -> list[Row]:
    """The measurements."""
    with (HERE / "expert_caches.csv").open(encoding="utf-8", newline="") as file:
        return [Row(**{**row, "value": float(row["value"])}) for row in csv.DictReader(file)]


# --- the page ---------------------------------------------------------------------------------------------------------


def right_way(theirs: float, ours: float) -> bool:
    """True if two ratios are on the same side of 1, or both are as good as 1."""
    return (theirs > 1) == (ours > 1) or max(abs(theirs - 1), abs(ours - 1)) <= SAME


def _counts(measured: bool, results: Plays) -> tuple[int, int, int]:
    """How many ratios there are, go the same way, and are near."""
    pairs = [(row.value, row.played(results)) for row in rows() if row.over and row.measured == measured]
    ways = sum(right_way(*pair) for pair in pairs)
    return len(pairs), ways, sum(abs(ours / theirs - 1) <= NEAR for theirs, ours in pairs)


def page(made: Mapping[str, Any]) -> str:
    """The table as Markdown."""
    results: Plays = made["plays"]
    counted, by_formula = (_counts(measured, results) for measured in (True, False))
    lines = [
        "# Expert caches in patched llama.cpp: theirs, ours, why they differ", "",
        f"Made by `python -m benchmarks.expert_caches --write`. Of {counted[0]} measured ratios on one machine "
        f"{counted[1]} go the same way (or both are within {SAME:.0%} of 1), and {counted[2]} are within {NEAR:.0%}. "
        f"{by_formula[0]} more are by a formula that its author has withdrawn: of them {by_formula[1]} and "
        f"{by_formula[2]}. In the ratios counted no number was fitted to a speed of this page; experiments say where "
        "one was. Routing is synthetic.", "",
    ]
    for machine, about in settings()["machines"].items():
        lines += [f"## {machine}", "", about["about"], ""]
        lines += [f"- put in: {what}" for what in about.get("put_in", ())] + [""] * ("put_in" in about)
        its_rows = [_cells(row, results) for row in rows() if row.machine == machine]
        lines += [markdown_table(_COLUMNS, its_rows, (0, 1, 2, 6)), "", about["why"], "", *_experiments(machine, made)]
    lines += ["## When the patch as shipped collapses", "", settings()["collapse"], ""]
    formats = ("{:g}", "{:.1f}", "{:.1%}", "{:.1f}", "{:.1%}")
    uploads = [[form.format(number) for form, number in zip(formats, row, strict=True)] for row in made["uploads"]]
    lines.append(markdown_table(_UPLOADS, uploads, ()))
    return "\n".join(lines) + "\n"


def _experiments(machine: str, made: Mapping[str, Any]) -> Sequence[str]:
    cells = [
        (tried["what"], tried["method"], tried["over"], f"{tried['ratio']:.3g}",
         f"{tried['hit_rate']:.1%}" if "hit_rate" in tried else "")
        for tried in made["experiments"] if tried["machine"] == machine
    ]
    lines = [markdown_table(("experiment", "method", "over", "ratio", "hits"), cells, (0, 1, 2))] if cells else []
    if machine in made["windows"]:
        lines += ["", f"Kept for a window, the most used experts of the one before have {made['windows'][machine]:.1%} "
                  "of this routing's lookups."]
    return [*lines, ""] if lines else []


def _cells(row: Row, results: Plays) -> Sequence[str]:
    ours = row.played(results)
    return row.method, row.over, row.quantity, f"{row.value:g}", f"{ours:.3g}", f"{ours / row.value:.2f}", row.source


def main() -> None:
    """Play all, print the page, and keep it if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.expert_caches", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write expert_caches.json and expert_caches.md")
    write = parser.parse_args().write
    results: dict[str, dict[str, Facts]] = {}
    for machine, method, method_play in plays():
        results.setdefault(machine, {})[method] = method_play.facts()
        print(machine, method, results[machine][method], flush=True)
    tried = [
        {"machine": machine, **{key: given[key] for key in ("what", "method", "over")}, "ratio": ratio, **facts}
        for machine, given, facts, ratio in experiments()
    ]
    made = {
        "machine": this_machine(), "plays": results, "experiments": tried, "windows": window_hits(),
        "uploads": upload_costs(),
    }
    print(page(made))
    if write:
        for path, text in ((RESULTS, json.dumps(made, indent=1) + "\n"), (PAGE, page(made))):
            with atomic_path(path) as aside:
                aside.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
