"""Play policies of papers on Strata's kernels: ``python notebooks/papers_on_strata.py`` writes
``data/papers_on_strata.csv``, which the notebook ``papers_against_engines.ipynb`` reads.

A row is an answer to one text, after a prompt of a few tokens: the mean window at its beginning (the first third, when
the caches know other texts) and at its end. Some ten minutes on a core; ``--jobs 2`` shares them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from policies.registry import system
from sim.costs.engine import load_fitted
from sim.machine.hardware import load_hardware
from sim.runs.prepare import Prepared, prepare
from sim.runs.run import Run
from sim.runs.scenario import Scenario
from sim.simulate import play
from traces.models.catalogue import load_model
from trilane.common.csv_files import write_csv
from trilane.engines.strata.settings import cache_slots

FOUND = Path(__file__).parent / "data" / "papers_on_strata.csv"
MODEL, KV_BITS = "qwen3.8-flash-next@gsq-q2_0", 8.5  # Strata keeps keys and values in 8 bits and a scale
MACHINES = {  # a machine, and the context for which it has room
    "8 GB": ("rtx-4060+ddr4-3200+ryzen-5-5600", 32768),  # PCIe 4 x8
    "16 GB": ("rtx-5080+ddr5-3600+ryzen-9-7900x", 262144),  # PCIe 5 x16; the one that BFinn/flashrt measured
    "24 GB": ("rtx-4090+ddr5-5600+ryzen-9-7950x", 131072),  # PCIe 4 x16
}
QUICK_SWAPS = "strata, quick swaps"  # --adapt-every, -swaps and -decay as a fork has them
POLICIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "strata": ("strata", {"awaits_swaps": False}),  # both as a fork has them, without the wait
    QUICK_SWAPS: ("strata", {"awaits_swaps": False, "every": 2, "swaps": 192, "decay": 0.92}), "dali": ("dali", {}),
    "hybrimoe": ("hybrimoe", {}), "daop": ("daop", {}), "smoe": ("smoe", {"prefetch": False}),
    "fiddler": ("fiddler", {}), "moe-infinity": ("moe-infinity", {}), "on-demand": ("on-demand", {}),
    "llama-cache-lru": ("llama-cache-lru", {}),
}
TEXTS = 2
TOKENS = {True: 424, False: 160}  # of an answer with and without drafts: about as many steps
# 2.4 drafts a window, of which 69 % are accepted; the open requests have 2.1 and 70 % in the mean
# (trilane.engines.strata.settings): another one behind a draft with a chance of 0.78; of windows, 0.73 accept the
# first, 0.73 ** 2 the second and so on.
DRAFTS: Mapping[str, Any] = {
    "draft_tokens": 3, "draft_offered": 0.78, "draft_acceptance": 0.73, "rejected_drafts": "drawn",
}
SLOWER = 1.25  # more than nine of ten windows of the open requests are off by
RECALL = 0.5  # of forecasts where they are worse; the trace's, of another model, are right about four times of five
AS_STATED, SLOWER_COPIES, SLOWER_POOL = "as stated", "slower copies", "slower pool"
WORSE_FORECASTS = "worse forecasts"


@dataclass(frozen=True)
class Answer:
    """One policy's answer. Times in ms."""

    machine: str
    drafts: bool
    case: str
    text: int
    policy: str  # of POLICIES
    kept: bool  # the routing
    slots: int
    windows: int
    tokens_a_window: float
    first_ms: float  # a window, in the first third of the answer
    last_ms: float  # in the last third
    hits: float  # of the experts that a layer uses, share on the GPU when it is routed
    mb_a_window: float  # copied


def answers(machine: str, drafts: bool, case: str) -> list[Answer]:
    """The answers of all policies to all texts, of the first only where something is changed.

    With worse forecasts those of policies that have any, and of Strata, with which they are compared.
    """
    found = []
    for text in range(TEXTS if case == AS_STATED else 1):
        prepared = prepared_for(machine, drafts, case, text)
        for label, chosen in POLICIES.items():
            if case != WORSE_FORECASTS or label == "strata" or prepared.with_policy(*chosen).needs.forecasts:
                found.append(answer(machine, case, prepared, label))
    return found


def prepared_for(machine: str, drafts: bool, case: str, text: int) -> Prepared:
    """A scenario in which the cache has the slots that Strata would give it."""
    hardware, context = MACHINES[machine]
    shape = load_model(MODEL)
    slots = cache_slots(replace(shape, kv_bits=KV_BITS), load_hardware(hardware), context)
    worse = case == WORSE_FORECASTS
    return prepare(Scenario(
        trace=f"synthetic:qwen3.8-flash-next/{TEXTS}x16+{max(TOKENS.values())}{'/none' * worse}", model=MODEL,
        hardware=hardware, engine="strata", engine_overrides=overrides(case), sequences=(text,), seed=text,
        noisy_forecast_recall=(RECALL,) * 3 if worse else None, prompt_tokens=16, generated_tokens=TOKENS[drafts],
        cached_share=slots / (shape.moe_layers * shape.experts), **(DRAFTS if drafts else {}),
    ))


def overrides(case: str) -> dict[str, float]:
    """Numbers of the engine that make copies or the pool slower."""
    engine = load_fitted("strata")
    assert engine.window is not None
    changes = {
        SLOWER_COPIES: {"window.fetch_share": engine.window.fetch_share.value / SLOWER},
        SLOWER_POOL: {"cpu.weights_per_cycle.legacy": engine.cpu.weights_per_cycle["legacy"].value / SLOWER},
    }
    return changes.get(case, {})


def answer(machine: str, case: str, prepared: Prepared, label: str) -> Answer:
    """Play one policy."""
    policy, parameters = POLICIES[label]
    run = play(prepared.with_policy(policy, parameters))
    spans, scenario = run.spans[run.spans["phase"] == "decode"], run.scenario
    first_ms, last_ms, windows = thirds(run)
    return Answer(
        machine=machine, drafts=scenario.draft_tokens > 0, case=case, text=scenario.seed, policy=label,
        kept=not system(policy).needs.changes_routing, slots=round((scenario.cached_share or 0.0) * 24576),
        windows=windows, tokens_a_window=round((scenario.generated_tokens or 0) / windows, 3),
        first_ms=round(first_ms, 3), last_ms=round(last_ms, 3),
        hits=round(run.metrics.decode_resident_hit_rate or 0.0, 3),
        mb_a_window=round(float(spans.loc[spans["lane"] == "h2d", "bytes"].sum()) / windows / 1e6, 1),
    )


def thirds(run: Run) -> tuple[float, float, int]:
    """The mean window of the first and of the last third of an answer in ms, and how many windows it has."""
    decoded = run.spans[run.spans["phase"] == "decode"]
    ends_ms = decoded.groupby("step")["end_ns"].max().to_numpy() / 1e6
    windows_ms = np.diff(ends_ms)
    third = len(windows_ms) // 3
    return float(windows_ms[:third].mean()), float(windows_ms[-third:].mean()), len(ends_ms)


def cases() -> Iterator[tuple[str, bool, str]]:
    """Machine, whether there are drafts, and what is changed, which is with drafts only."""
    yield from product(MACHINES, (True, False), (AS_STATED,))
    yield from product(MACHINES, (True,), (SLOWER_COPIES, SLOWER_POOL, WORSE_FORECASTS))


def main(jobs: int) -> None:
    """Play all cases and write them."""
    names = [field.name for field in fields(Answer)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        played = pool.map(answers, *zip(*cases(), strict=True))
        rows = [[getattr(one, name) for name in names] for found in played for one in found]
    write_csv([names, *rows], FOUND)


if __name__ == "__main__":
    main(int(sys.argv[2]) if sys.argv[1:2] == ["--jobs"] else 1)
