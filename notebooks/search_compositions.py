"""Search the mixes of parts for better compositions, then hold the winners against everybody on other scenarios.

``python notebooks/search_compositions.py search`` writes ``data/search.csv``: every mix that was tried, with its mean
over the tuning scenarios. ``... evaluate`` writes ``data/held_out.csv``: the mix that the search found and every
registered policy on the held-out scenarios. ``... improve`` writes ``data/better_parts.csv``: ``best-exact``, and
what ``trilane fit`` would recommend, there and on machines with a part 25 % better, over several draws of sequences.
The notebook ``better_compositions.ipynb`` reads all three.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, geometric_mean, stdev
from typing import Any

from policies.registry import policy_names, system
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from sim.simulate import play as simulated
from trilane.common.errors import TrilaneError
from trilane.common.files import atomic_path
from trilane.engines.gains import PARTS, ScaledPart
from trilane.fit.prepared_question import DEFAULT_CANDIDATES
from trilane.fit.sensitivity import with_better

DATA = Path(__file__).parent / "data"
TRACES = {  # recorded and fitted routing, flat (DeepSeek) and skewed; 12 layers of each
    "mini-deepseek:12": "deepseek-v2-lite:12",
    "synthetic:deepseek-v2-lite:12": "deepseek-v2-lite@q4_k_m:12",
    "gpt-oss-20b:12": "gpt-oss-20b@mxfp4:12",
    "synthetic:qwen3-30b-a3b:12": "qwen3-30b-a3b@q4_k_m:12",
}
UNSEEN_TRACES = {"mini-moe": "phi-3.5-moe:8"}
WITHOUT_SCORES = ("gpt-oss-20b:12",)  # of experts that were not chosen: nothing can be substituted by score
TUNED_ON = ("rtx3090-ddr4", "rtx4090-ddr5", "a6000-xeon5220r")
MACHINES = (*TUNED_ON, "rtx3090-epyc7532", "a6000-i9-10980xe", "a100-xeon6326")
LOADS = ((0.25, 1), (0.4, 4), (0.25, 4), (0.6, 1), (0.4, 1), (0.6, 4))  # share of the experts cached, batch
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
}
COLUMNS_OF_PARTS = (
    "part", *(f"{time}_{what}" for time in ("tpot", "answer") for what in ("ms", "longer", "error")),
)
SUBSTITUTIONS = [{"substitution": alpha} for alpha in (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5)]


def scenarios(
    traces: Mapping[str, str], machines: Sequence[str], sequences: Sequence[int], loads: int
) -> list[Scenario]:
    """Every trace on every machine, at some of the loads, in turn, and each with other sequences."""
    found = []
    for (row, trace), (column, machine), turn in product(enumerate(traces), enumerate(machines), range(loads)):
        share, batch = LOADS[(loads * (row + column + row // 3) + turn) % len(LOADS)]
        chosen = tuple(sequences[(3 * len(found) + n) % len(sequences)] for n in range(batch))
        found.append(Scenario(
            trace=trace, model=traces[trace], hardware=machine, cached_share=share, batch=batch, sequences=chosen,
            prompt_tokens=32, generated_tokens=32,
        ))
    return found


@cache
def _prepared(scenario: str) -> Prepared:
    return prepare(Scenario.from_dict(json.loads(scenario)))


def play(task: tuple[str, str, str]) -> dict[str, Any]:
    """One policy in one scenario: what the CSV files keep of it."""
    scenario, policy, parameters = task
    try:
        row = simulated(_prepared(scenario).with_policy(policy, json.loads(parameters))).to_dict()
    except TrilaneError as error:
        return {"tpot_ms": None, "error": str(error)}
    keys = ("tpot_ms", "ttft_ms", "approximated_weight_share", "lower_bound_tpot_ms", "null_model_tpot_ms")
    return {**{key: row.get(key) for key in keys}, "labels": "; ".join(row["labels"])}


def draws_of(scenario: Scenario) -> list[Scenario]:
    """The scenario from each of the held-out sequences on: with a batch, each sequence is in several draws."""
    sequences, batch = HELD_OUT_SEQUENCES, scenario.batch
    return [
        replace(scenario, sequences=tuple(sequences[(first + n) % len(sequences)] for n in range(batch)))
        for first in range(len(sequences))
    ]


def drawn(task: tuple[str, str, bool]) -> list[dict[str, Any]]:
    """One policy in the draws of one scenario, on the machine ("") and, if asked for, with each part 25 % better: mean
    times in ms, and by how much they are longer, with the standard error, a token and in the whole answer."""
    scenario, policy, better = task
    parts: list[ScaledPart] = list(PARTS) if better else []
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ("", *(part.name for part in parts))}
    for draw in draws_of(Scenario.from_dict(json.loads(scenario))):
        prepared = prepare(draw).with_policy(policy)
        for name, machine in [("", prepared), *((part.name, with_better(prepared, part)) for part in parts)]:
            row = simulated(machine).to_dict()
            times[name].append((row["tpot_ms"], row["makespan_ms"]))
    return [{"part": name, **_compared(times[""], each)} for name, each in times.items()]


def _compared(before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for column, old, new in zip(("tpot", "answer"), zip(*before, strict=True), zip(*after, strict=True), strict=True):
        longer = [b / a - 1 for a, b in zip(old, new, strict=True)]
        found |= {
            f"{column}_ms": fmean(new), f"{column}_longer": fmean(longer),
            f"{column}_error": stdev(longer) / len(longer) ** 0.5,
        }
    return found


class Search:
    """Coordinate descent: axis after axis takes the choice of least mean TPOT, until a round changes nothing."""

    def __init__(self, pool: ProcessPoolExecutor, writer: Any, tuning: Iterable[Scenario]) -> None:
        self.pool, self.writer = pool, writer
        self.tuning = [json.dumps(s.to_dict()) for s in tuning]
        self.known: dict[str, tuple[float, float]] = {}

    def measure(self, mix: Mapping[str, Any]) -> tuple[float, float]:
        """(geometric mean of TPOT in ms, mean share of the routing weight that is approximated)."""
        name = json.dumps(mix, sort_keys=True)
        if name not in self.known:
            rows = list(self.pool.map(play, [(s, "mix", name) for s in self.tuning], chunksize=2))
            if any(row["tpot_ms"] is None for row in rows):
                self.known[name] = (float("inf"), 0.0)
            else:
                tpot = geometric_mean(row["tpot_ms"] for row in rows)
                self.known[name] = (tpot, fmean(row["approximated_weight_share"] or 0.0 for row in rows))
            tpot, approximated = self.known[name]
            self.writer.writerow([len(rows), f"{tpot:.4f}", f"{approximated:.4f}", name])
            print(f"{tpot:9.3f} {approximated:7.4f} {name}", flush=True)
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
    tuning = scenarios(TRACES, TUNED_ON, TUNING_SEQUENCES, loads=2)
    with atomic_path(DATA / "search.csv") as path, path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["scenarios", "mean_tpot_ms", "approximated_weight_share", "mix"])
        exact = Search(pool, writer, tuning).descend({"prefetch": "none"}, AXES)
        scored = [s for s in tuning if s.trace not in WITHOUT_SCORES]
        close = Search(pool, writer, scored).descend(exact, {"substitution": SUBSTITUTIONS})
    print("best-exact", json.dumps(exact), "\nbest-approx", json.dumps(close))


def found() -> str:
    """The mix of least mean TPOT among those that keep the routing, of ``data/search.csv``."""
    with (DATA / "search.csv").open() as file:
        rows = list(csv.DictReader(file))
    everywhere = max(int(row["scenarios"]) for row in rows)
    return min((float(r["mean_tpot_ms"]), r["mix"]) for r in rows if int(r["scenarios"]) == everywhere)[1]


def evaluate(pool: ProcessPoolExecutor) -> None:
    """Everybody on every machine, with sequences that the search has not seen."""
    policies = [("found", "mix", found()), *((name, name, "{}") for name in policy_names())]
    tasks = [(s, label, name, given) for s in held_out() for label, name, given in policies]
    rows = pool.map(play, [(json.dumps(s.to_dict()), name, given) for s, _, name, given in tasks], chunksize=8)
    columns = (
        "tpot_ms", "ttft_ms", "approximated_weight_share", "lower_bound_tpot_ms", "null_model_tpot_ms", "labels",
        "error",
    )
    _write("held_out.csv", columns, ((s, label, row) for (s, label, *_), row in zip(tasks, rows, strict=True)))


def improve(pool: ProcessPoolExecutor) -> None:
    """All that ``trilane fit`` chooses from, on the machines as they are; ``best-exact``, and what it would recommend,
    also on machines that are better in one part."""
    places = [json.dumps(s.to_dict()) for s in held_out()]

    def rows_of(asked: Sequence[tuple[str, str]], better: bool) -> dict[tuple[str, str], list[dict[str, Any]]]:
        tasks = [(place, name, better) for place, name in asked]
        return dict(zip(asked, pool.map(drawn, tasks), strict=True))

    rows = rows_of(list(product(places, DEFAULT_CANDIDATES)), better=False)
    judged = [(place, name) for place in places for name in dict.fromkeys(("best-exact", fastest(rows, place)))]
    rows |= rows_of(judged, better=True)
    _write("better_parts.csv", COLUMNS_OF_PARTS, (
        (Scenario.from_dict(json.loads(place)), name, row) for (place, name), each in rows.items() for row in each
    ))


def fastest(rows: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], place: str) -> str:
    """Name of the policy that ``trilane fit`` recommends there: of its candidates, that of the shortest answers."""
    return min(DEFAULT_CANDIDATES, key=lambda name: rows[place, name][0]["answer_ms"])


def held_out() -> list[Scenario]:
    """All traces on all machines, with sequences that the search has not seen."""
    return scenarios({**TRACES, **UNSEEN_TRACES}, MACHINES, HELD_OUT_SEQUENCES, loads=1)


def _write(name: str, columns: Sequence[str], rows: Iterable[tuple[Scenario, str, Mapping[str, Any]]]) -> None:
    """A table in ``data``: where, which policy, and these columns."""
    place = ("trace", "hardware", "cached_share", "batch")
    with atomic_path(DATA / name) as path, path.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*place, "policy", *columns), restval="", lineterminator="\n")
        writer.writeheader()
        for scenario, policy, row in rows:
            where = {key: getattr(scenario, key) for key in place}
            writer.writerow({**where, "policy": policy, **{key: _short(value) for key, value in row.items()}})


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as workers:
        {"search": search, "evaluate": evaluate, "improve": improve}[sys.argv[1]](workers)
