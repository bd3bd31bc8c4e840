"""Search the mixes of parts for better compositions, then hold the winners against everybody on other scenarios.

``python notebooks/search_compositions.py search`` writes ``data/search.csv``: every mix that was tried, with its mean
over the tuning scenarios. ``... evaluate`` writes ``data/held_out.csv``: every registered policy on the held-out
scenarios. The notebook ``better_compositions.ipynb`` reads both.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from policies.registry import policy_names, system
from policies.system import ChoiceError
from sim.runs.memory import BudgetError
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario, ScenarioError
from sim.simulate import play as simulated
from trilane.common.files import atomic_path

DATA = Path(__file__).parent / "data"
TRACES = {"mini-deepseek": "deepseek-v2-lite", "mini-moe": "phi-3.5-moe:8"}
TUNED_ON = ("rtx3090-ddr4", "rtx4090-ddr5", "a6000-xeon5220r")
MACHINES = (*TUNED_ON, "rtx3090-epyc7532", "a6000-i9-10980xe", "a100-xeon6326")
SHARES, BATCHES = (0.25, 0.4, 0.6), (1, 4)
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
    """Both traces on the machines, at every share and batch, each with other sequences."""
    found = []
    for place, (trace, machine, share, batch) in enumerate(product(TRACES, machines, SHARES, BATCHES)):
        chosen = tuple(sequences[(3 * place + n) % len(sequences)] for n in range(batch))
        found.append(Scenario(
            trace=trace, model=TRACES[trace], hardware=machine, cached_share=share, batch=batch, sequences=chosen,
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
    except (BudgetError, ChoiceError, ScenarioError) as error:
        return {"policy": policy, "tpot_ms": None, "error": str(error)}
    keys = ("tpot_ms", "ttft_ms", "approximated_weight_share", "lower_bound_tpot_ms", "null_model_tpot_ms")
    return {"policy": policy, **{key: row.get(key) for key in keys}, "labels": "; ".join(row["labels"])}


class Search:
    """Coordinate descent: axis after axis takes the choice of least mean TPOT, until a round changes nothing."""

    def __init__(self, pool: ProcessPoolExecutor, writer: Any) -> None:
        self.pool, self.writer = pool, writer
        self.tuning = [json.dumps(s.to_dict()) for s in scenarios(TUNED_ON, TUNING_SEQUENCES)]
        self.known: dict[str, tuple[float, float]] = {}

    def measure(self, mix: Mapping[str, Any]) -> tuple[float, float]:
        """(geometric mean of TPOT in ms, mean share of the routing weight that is approximated)."""
        name = json.dumps(mix, sort_keys=True)
        if name not in self.known:
            rows = list(self.pool.map(play, [(s, "mix", name) for s in self.tuning], chunksize=3))
            if any(row["tpot_ms"] is None for row in rows):
                self.known[name] = (float("inf"), 0.0)
            else:
                tpot = geometric_mean(row["tpot_ms"] for row in rows)
                self.known[name] = (tpot, fmean(row["approximated_weight_share"] or 0.0 for row in rows))
            self.writer.writerow([f"{self.known[name][0]:.4f}", f"{self.known[name][1]:.4f}", name])
            print(f"{self.known[name][0]:9.3f} {self.known[name][1]:7.4f} {name}", flush=True)
        return self.known[name]

    def descend(self, mix: dict[str, Any], axes: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        """The best mix that one axis at a time leads to."""
        while True:
            before = dict(mix)
            for choices in axes.values():
                mix = min([mix, *({**mix, **choice} for choice in choices)], key=self.rank)
            if mix == before:
                return mix

    def rank(self, mix: Mapping[str, Any]) -> float:
        """Mean TPOT; a mix that diverges too far does not count."""
        tpot, approximated = self.measure(mix)
        return tpot if approximated <= DIVERGENCE else float("inf")


def search(pool: ProcessPoolExecutor) -> None:
    """First among mixes that keep the routing, then among those that may approximate a little."""
    with atomic_path(DATA / "search.csv") as path, path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["mean_tpot_ms", "approximated_weight_share", "mix"])
        at_work = Search(pool, writer)
        exact = at_work.descend({"prefetch": "none"}, AXES)
        close = at_work.descend(exact, {"substitution": SUBSTITUTIONS})
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
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as workers:
        {"search": search, "evaluate": evaluate}[sys.argv[1]](workers)
