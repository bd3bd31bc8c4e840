"""The numbers that an answer depends on: those that are listed change it, and are those of its engine."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from sim.costs import engine_costs
from sim.costs.engine import load_engine
from sim.runs.prepare import Prepared
from trilane.engines.gains import BETTER, Gain
from trilane.engines.question import Question
from trilane.fit.fit import fit
from trilane.fit.policy_result import play_policy
from trilane.fit.prepared_question import on_machine, prepared_for
from trilane.fit.sensitivity import evidence_of

OFFLOADED: dict[str, Any] = {"model": "deepseek-v2-lite:6", "trace": "mini-deepseek:6", "weights": "bf16",
                             "gpu": "rtx-3060", "ram": "ddr4-3200", "prompt_tokens": 2048, "generated": 12}
EVERY_PART = [
    Gain(part, "", 0.1)
    for part in ("PCIe", "DRAM", "CPU compute", "GPU bandwidth", "GPU compute", "GPU memory", "GPU kernels",
                 "kernel launches", "synchronisation", "decisions")
]


@cache
def asked(how: str) -> Prepared:
    found = prepared_for(Question(**OFFLOADED, policy_engine=how))
    return on_machine(found, found.hardware.with_numbers({"gpu.memory_bytes": 4.2e9}))


def tpot_ms(one: Prepared, policy: str) -> float:
    return play_policy(one.with_policy(policy)).result.tpot_ms


def test_recorded_graphs_have_their_own_numbers_in_place_of_the_machines() -> None:
    kept = {"kernel launches": "ideal: replay_ns", "synchronisation": "ideal: spin_ns"}
    ideal = load_engine("ideal").flat()
    for part, name in kept.items():
        (support,) = evidence_of(asked("ideal"), [Gain(part, "", 0.1)])
        assert (support.key, support.value) == (name, ideal[name.partition(": ")[2]].value)
        assert support.source
    eager = [evidence_of(asked("pytorch"), [Gain(part, "", 0.1)])[0].key for part in kept]
    assert eager == ["host.launch_ns", "host.sync_ns"]


@pytest.mark.parametrize("how", ["ideal", "pytorch"])
@pytest.mark.parametrize("factor", [BETTER, 1 / BETTER])
def test_every_number_that_is_listed_changes_the_time_per_token(
    how: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a policy that copies, computes on both sides and decides; of parts that gain nothing none would be listed."""
    base = tpot_ms(asked(how), "dali")
    for part in EVERY_PART:
        if part.part.endswith("compute"):
            continue  # one token's products wait for bytes: their gain is none
        for support in evidence_of(asked(how), [part]):
            one = asked(how)
            with monkeypatch.context() as patched:
                if support.key.startswith("ideal: "):
                    name, ideal = support.key.removeprefix("ideal: "), load_engine("ideal")
                    other = ideal.flat()[name]._replace(value=round(support.value * factor))
                    changed_engine = replace(ideal, **{name: other})
                    patched.setattr(engine_costs, "load_engine", lambda _, given=changed_engine: given)
                    changed = on_machine(one, one.hardware)
                else:
                    changed = on_machine(one, one.hardware.with_numbers({support.key: support.value * factor}))
                assert tpot_ms(changed, "dali") != base, support.key


def test_the_weakest_come_first_and_only_where_their_part_matters() -> None:
    found = fit(Question(**OFFLOADED, policies=("ktransformers",))).policies
    assert found is not None
    doubt = {"high": 0.1, "medium": 0.5, "low": 1.0}
    weights = [support.gain * doubt[support.confidence] for support in found.supports]
    assert weights == sorted(weights, reverse=True)
    assert all(support.gain >= 0.02 for support in found.supports)
