"""Search the mixes of parts for better compositions, then hold the winners against everybody on other scenarios.

``python notebooks/search_compositions.py search`` writes ``data/search.csv``: every mix that was tried, with its mean
over the tuning scenarios, or over the first of them where it was slow there. ``... evaluate`` writes
``data/held_out.csv``: every registered policy on the held-out scenarios. A number behind either is that of processes.
The notebook ``better_compositions.ipynb`` reads both.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from policies.registry import policy_names, system
from policies.system import ChoiceError
from sim.runs.demand import MissingFromTraceError
from sim.runs.memory import BudgetError
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import play as simulated
from trilane.common.files import atomic_path

DATA = Path(__file__).parent / "data"
TRACES = {  # many small experts and few large ones, of each a routing that was recorded and one that was fitted
    "mini-deepseek": "deepseek-v2-lite",
    "gpt-oss-20b": "gpt-oss-20b",
    "mini-moe": "phi-3.5-moe:8",
    "synthetic:deepseek-v2-lite/20x32+32": "deepseek-v2-lite",
    "synthetic:mixtral-8x7b:8/20x32+32": "mixtral-8x7b:8",
}
WITHOUT_SCORES = ("gpt-oss-20b",)  # of the experts that were not chosen
TUNED_ON = ("rtx3090-ddr4", "rtx4090-ddr5", "a6000-xeon5220r")
MACHINES = (*TUNED_ON, "rtx3090-epyc7532", "a6000-i9-10980xe", "a100-xeon6326")
CASES = [[(0.25, 1), (0.4, 4)], [(0.6, 1), (0.25, 4)], [(0.4, 1), (0.6, 4)]]  # share cached, batch
STRIDE, SCREENED = 5, 12  # of the tuning scenarios, in the order 0, 5, 10 ... 1, 6, ...: those that a mix has first
SLOW = 1.03  # a mix that takes so many times as long there as the best one is not played in the others
TUNING_SEQUENCES, HELD_OUT_SEQUENCES = range(10), range(10, 20)
DIVERGENCE = 0.05  # share of the routing weight that best-approx may change, on average over the tuning scenarios
DEFAULTS = {name: default for name, _, default in system("mix").parameter_table()}
AXES: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "assigner": [{"assigner": name} for name in (
        "pipeline", "exact", "simulation", "greedy", "beam", "cost-rule", "two_pointer_min", "load-all", "stay")],
    "cache": [{"cache": name} for name in ("static", "lru", "lfu", "score-window")]
    + [{"cache": "mrs", "alpha": alpha, "keep": keep, "prior": prior}
       for alpha in (0.01, 0.03, 0.1, 0.3) for keep in (None, 12) for prior in (False, True)],
    "slots": [{"pool": pool, "placement": placement}
              for pool in (False, True) for placement in ("none", "random", "popular")],
    "prefetch": [{"prefetch": "none"}]
    + [{"prefetch": how, "forecast": kind, "lookahead": ahead, "into": into}
       for how, into in (("top", "staging"), ("top", "cache"), ("impact", "cache"), ("forecast", "cache"),
                         ("forecast", "staging"))
       for kind in ("gate", "residual", "quasi_hidden") for ahead in (1, 2, 3)
       if not (how in ("top", "impact") and ahead > 1 and kind != "gate") and not (how == "top" and ahead > 1)],
}  # fmt: skip
SUBSTITUTIONS = [{"substitution": alpha} for alpha in (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)]


def scenarios(machines: Iterable[str], sequences: Sequence[int]) -> list[Scenario]:
    """Each trace on each machine, in one of three pairs of cases (a Latin square), each with other sequences."""
    found: list[Scenario] = []
    for row, (trace, model) in enumerate(TRACES.items()):
        for column, machine in enumerate(machines):
            for share, batch in CASES[(row + column) % len(CASES)]:
                chosen = tuple(sequences[(3 * len(found) + n) % len(sequences)] for n in range(batch))
                found.append(Scenario(
                    trace=trace, model=model, hardware=machine, cached_share=share, batch=batch, sequences=chosen,
                    prompt_tokens=32, generated_tokens=32,
                ))  # fmt: skip
    return found


@cache
def _prepared(scenario: str) -> Prepared:
    return prepare(Scenario.from_dict(json.loads(scenario)))


def play(task: tuple[str, str, str]) -> dict[str, Any]:
    """One policy in one scenario: what the CSV files keep of it."""
    scenario, policy, parameters = task
    try:
        row = simulated(_prepared(scenario).with_policy(policy, json.loads(parameters))).to_dict()
    except (BudgetError, ChoiceError, MissingFromTraceError, ScenarioError) as error:
        return {"policy": policy, "tpot_ms": None, "error": str(error)}
    keys = ("tpot_ms", "ttft_ms", "approximated_weight_share", "lower_bound_tpot_ms", "null_model_tpot_ms")
    return {"policy": policy, **{key: row.get(key) for key in keys}, "labels": "; ".join(row["labels"])}


class Measured(NamedTuple):
    """A mix in ``scenarios`` of the tuning scenarios: its TPOT over that of the first mix (geometric mean), and the
    mean share of the routing weight that it approximates."""

    ratio: float
    approximated: float
    scenarios: int


class Search:
    """Coordinate descent: axis after axis takes the choice of least mean TPOT, until a round changes nothing."""

    def __init__(self, pool: ProcessPoolExecutor, writer: Any, first: Mapping[str, Any]) -> None:
        self.pool, self.writer = pool, writer
        tuning = [json.dumps(s.to_dict()) for s in scenarios(TUNED_ON, TUNING_SEQUENCES)]
        order = [scenario for start in range(STRIDE) for scenario in tuning[start::STRIDE]]
        first_ms = [float(row["tpot_ms"]) for row in self.plays(first, order)]
        self.tuning = list(zip(order, first_ms, strict=True))
        self.first_ms = geometric_mean(first_ms)
        self.known: dict[str, Measured] = {}

    def plays(self, mix: Mapping[str, Any], chosen: Iterable[str]) -> list[dict[str, Any]]:
        """A mix in some of the tuning scenarios."""
        return list(self.pool.map(play, [(scenario, "mix", json.dumps(mix)) for scenario in chosen], chunksize=3))

    def measure(self, mix: Mapping[str, Any], bound: float = float("inf")) -> Measured:
        """In all scenarios, or in the first where its ratio there is some per cent above ``bound``.

        Mixes that name ``substitution`` are played where the trace has the scores that this needs.
        """
        name = json.dumps(mix, sort_keys=True)
        if name not in self.known:
            tasks = [task for task in self.tuning if "substitution" not in mix or not _lacks_scores(task[0])]
            places = [scenario for scenario, _ in tasks]
            rows = self.plays(mix, places[:SCREENED])
            if self.mean(rows, tasks).ratio <= SLOW * bound:
                rows += self.plays(mix, places[SCREENED:])
            found = self.mean(rows, tasks)
            self.known[name] = found
            mean_ms = found.ratio * self.first_ms
            self.writer.writerow([f"{mean_ms:.4f}", f"{found.approximated:.4f}", found.scenarios, name])
            print(f"{mean_ms:9.3f} {found.approximated:7.4f} {found.scenarios:3d} {name}", flush=True)
        return self.known[name]

    def mean(self, rows: Sequence[Mapping[str, Any]], tasks: Sequence[tuple[str, float]]) -> Measured:
        """Of plays in the first of ``tasks``; infinite for a mix that cannot be played in one of them."""
        if any(row["tpot_ms"] is None for row in rows):
            return Measured(float("inf"), 0.0, len(rows))
        ratio = geometric_mean(row["tpot_ms"] / first for row, (_, first) in zip(rows, tasks, strict=False))
        return Measured(ratio, fmean(row["approximated_weight_share"] or 0.0 for row in rows), len(rows))

    def descend(self, mix: dict[str, Any], axes: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        """The best mix that one axis at a time leads to."""
        while True:
            before = dict(mix)
            for choices in axes.values():
                for choice in choices:
                    mix = min(mix, {**mix, **choice}, key=lambda other, best=mix: self.rank(other, best))
            if mix == before:
                return mix

    def rank(self, mix: Mapping[str, Any], best: Mapping[str, Any]) -> float:
        """Ratio of TPOT; a mix that diverges too far, or is slow in the scenarios of the screen, does not count."""
        found = self.measure(mix, self.measure(best).ratio)
        return found.ratio if found.scenarios > SCREENED and found.approximated <= DIVERGENCE else float("inf")


def _lacks_scores(scenario: str) -> bool:
    return Scenario.from_dict(json.loads(scenario)).trace in WITHOUT_SCORES


def search(pool: ProcessPoolExecutor) -> None:
    """From two starts among mixes that keep the routing, then among those that may approximate a little."""
    with atomic_path(DATA / "search.csv") as path, path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["mean_tpot_ms", "approximated_weight_share", "scenarios", "mix"])
        registered = {name: default for name, _, default in system("best-exact").parameter_table()}
        del registered["substitution"]
        at_work = Search(pool, writer, registered)
        ends = [at_work.descend(start, AXES) for start in (registered, {"prefetch": "none"})]
        exact = min(ends, key=lambda mix: at_work.measure(mix).ratio)
        close = at_work.descend({**exact, "substitution": 0.0}, {"substitution": SUBSTITUTIONS})
    print("best-exact", json.dumps(exact), "\nbest-approx", json.dumps(close))


def evaluate(pool: ProcessPoolExecutor) -> None:
    """Everybody on every machine, with sequences that the search has not seen."""
    held_out = scenarios(MACHINES, HELD_OUT_SEQUENCES)
    tasks = [(s, name, "{}") for s in held_out for name in policy_names()]
    rows = pool.map(play, [(json.dumps(s.to_dict()), name, given) for s, name, given in tasks], chunksize=8)
    columns = (
        "trace", "hardware", "cached_share", "batch", "policy", "tpot_ms", "ttft_ms", "approximated_weight_share",
        "lower_bound_tpot_ms", "null_model_tpot_ms", "labels", "error",
    )  # fmt: skip
    with atomic_path(DATA / "held_out.csv") as path, path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        for (scenario, _, _), row in zip(tasks, rows, strict=True):
            place = {name: getattr(scenario, name) for name in columns[:4]}
            writer.writerow({**place, **{key: _short(value) for key, value in row.items()}})


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    processes = int(sys.argv[2]) if len(sys.argv) > 2 else None
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as workers:
        {"search": search, "evaluate": evaluate}[sys.argv[1]](workers)
