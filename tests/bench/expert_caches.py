"""Expert caches in patched llama.cpp as others measured them, next to the same played here: ``python -m
tests.bench.expert_caches [--write]``. Two minutes on one core.

``expert_caches.csv`` has what was measured, a row with its source; ``expert_caches.yaml`` how it is played.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import play
from traces.synthesis.named import with_lengths
from trilane.common.files import atomic_path
from trilane.common.yaml_files import read_yaml

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "expert_caches.json", HERE / "expert_caches.md"
NEAR = 0.2  # of a ratio
Facts = Mapping[str, float]  # of one play
Plays = Mapping[str, Mapping[str, Facts]]  # by machine and method


class Row(NamedTuple):
    """One measurement: a quantity of ``method``, or its ratio to that of ``over``."""

    machine: str
    method: str
    over: str
    quantity: str
    value: float
    source: str

    def played(self, plays: Plays) -> float:
        """The same here."""
        mine = plays[self.machine][self.method][self.quantity]
        return mine / plays[self.machine][self.over][self.quantity] if self.over else mine


def rows() -> list[Row]:
    """The measurements."""
    with (HERE / "expert_caches.csv").open(encoding="utf-8", newline="") as file:
        return [Row(**{**row, "value": float(row["value"])}) for row in csv.DictReader(file)]


@cache
def settings() -> dict[str, Any]:
    """The file that says how they are played."""
    return dict(read_yaml(HERE / "expert_caches.yaml"))


def scenarios() -> Iterator[tuple[str, str, Scenario]]:
    """(machine, method, scenario) of all."""
    common = settings()["setting"]
    for machine, about in settings()["machines"].items():
        for method, given in about["methods"].items():
            fields = {**common, **about["setting"], **given}
            slots, pageable = fields.pop("slots"), fields.pop("pageable", False)
            fields["cached_share"] = slots / about["experts"]
            fields["hardware_overrides"] = {
                **fields.get("hardware_overrides", {}), **(about["pageable"] if pageable else {})
            }  # fmt: skip
            model, lengths = fields["model"].partition("@")[0], (fields["prompt_tokens"], fields["generated_tokens"])
            fields["trace"] = with_lengths(f"synthetic:{model}", 1, *lengths, ())
            yield machine, method, Scenario(**fields)


def facts_of(scenario: Scenario) -> Facts:
    """What is compared of one play."""
    prepared = prepare(scenario)
    metrics, size = play(prepared).metrics, prepared.costs.experts[0].expert_bytes
    return {
        "tokens_per_s": round(1e3 / metrics.tpot_ms, 2),
        "hit_rate": round(metrics.decode_served_hit_rate or 0.0, 4),
        "uploads_per_token": round(metrics.pcie_swap_bytes_per_token / size, 2),
    }


def upload_costs() -> list[tuple[int, float, float, float, float]]:
    """(us of an upload, tokens/s and hit rate of the patch as shipped, and as repaired), on the first machine."""
    shipped, repaired = (
        next(s for _, method, s in scenarios() if method == name) for name in ("shipped-66", "repaired-66")
    )
    found = []
    for us in (90, 200, 300, 350, 400, 500):
        facts: list[float] = []
        for scenario in (shipped, repaired):
            over = {**shipped.hardware_overrides, "link.h2d_bytes_per_s": 2.857e6 / (us * 1e-6)}
            mine = facts_of(scenario.with_(hardware_overrides=over))
            facts += [mine["tokens_per_s"], mine["hit_rate"]]
        found.append((us, *facts))
    return found  # type: ignore[return-value]


# --- the page ---------------------------------------------------------------------------------------------------------


def right_way(theirs: float, ours: float) -> bool:
    """Whether a ratio is on the same side of 1."""
    return (theirs > 1) == (ours > 1)


def page(plays: Plays, costs: list[tuple[int, float, float, float, float]]) -> str:
    """The table as Markdown."""
    ratios = [(row.value, row.played(plays)) for row in rows() if row.over]
    near = sum(abs(ours / theirs - 1) <= NEAR for theirs, ours in ratios)
    ways = sum(right_way(*pair) for pair in ratios)
    lines = [
        "# Expert caches in patched llama.cpp: theirs, ours, why they differ", "",
        f"Made by `python -m tests.bench.expert_caches --write`. Of {len(ratios)} ratios on one machine {ways} go the "
        f"same way, and {near} are within {NEAR:.0%}. No number was fitted to a speed of this page. Routing is "
        "synthetic.", "",
    ]  # fmt: skip
    for machine, about in settings()["machines"].items():
        lines += [f"## {machine}", "", about["about"], ""]
        lines += [f"- put in: {what}" for what in about.get("put_in", ())] + [""] * ("put_in" in about)
        lines += ["| method | over | quantity | theirs | ours | ours / theirs | source |"]
        lines += ["|---|---|---|---:|---:|---:|---|"]
        lines += [_line(row, plays) for row in rows() if row.machine == machine]
        lines += ["", about["why"], ""]
    lines += ["## When the patch as shipped collapses", "", settings()["collapse"], ""]
    lines += ["| us an upload | tok/s as shipped | hits | tok/s repaired | hits |", "|---:|---:|---:|---:|---:|"]
    lines += [f"| {us} | {slow:.1f} | {h:.1%} | {fast:.1f} | {g:.1%} |" for us, slow, h, fast, g in costs]
    return "\n".join(lines) + "\n"


def _line(row: Row, plays: Plays) -> str:
    ours = row.played(plays)
    cells = (row.method, row.over, row.quantity, f"{row.value:g}", f"{ours:.3g}", f"{ours / row.value:.2f}", row.source)
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Play all, print the page, and keep it if asked to."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.expert_caches", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write expert_caches.json and expert_caches.md")
    write = parser.parse_args().write
    plays: dict[str, dict[str, Facts]] = {}
    for machine, method, scenario in scenarios():
        plays.setdefault(machine, {})[method] = facts_of(scenario)
        print(machine, method, plays[machine][method], flush=True)
    costs = upload_costs()
    print(page(plays, costs))
    if write:
        for path, text in ((RESULTS, json.dumps([plays, costs], indent=1) + "\n"), (PAGE, page(plays, costs))):
            with atomic_path(path) as aside:
                aside.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
