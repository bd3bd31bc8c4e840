"""The numbers that an answer depends on: those that are listed change it, and are those of its runtime."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from sim.costs import runtimes
from trilane.study.fit.asked import Asked, resolved
from trilane.study.fit.evidence import supports_of
from trilane.study.fit.fit import Fit, fit
from trilane.study.fit.policy_result import play_policy
from trilane.study.fit.question import Question, Runtime
from trilane.study.fit.routing import routing_for
from trilane.study.fit.sensitivity import BETTER, Gain, with_numbers

OFFLOADED: dict[str, Any] = {"model": "deepseek-v2-lite:6", "trace": "mini-deepseek:6", "weights": "bf16",
                             "gpu": "rtx-3060", "ram": "ddr4-3200", "context": 2048, "generated": 12}  # fmt: skip
EVERY_PART = [
    Gain(part, "", 0.1)
    for part in ("PCIe", "DRAM", "CPU compute", "GPU bandwidth", "GPU compute", "GPU memory", "GPU kernels",
                 "kernel launches", "synchronisation", "decisions")
]  # fmt: skip


@cache
def asked(how: Runtime) -> Asked:
    question = Question(**OFFLOADED, runtime=how)
    found = resolved(question, routing_for(question))
    return found.on(with_numbers(found.setting.hardware, {"gpu.memory_bytes": 4.2e9}))


def tpot_ms(one: Asked, policy: str) -> float:
    return play_policy(one, one.ready(policy)).answer.tpot_ms


def test_recorded_graphs_have_their_own_numbers_in_place_of_the_machines() -> None:
    kept = {"kernel launches": "graphs: replay_ns", "synchronisation": "graphs: spin_ns"}
    for part, name in kept.items():
        (support,) = supports_of(asked("graphs"), [Gain(part, "", 0.1)])
        assert (support.key, support.value) == (name, getattr(runtimes, name.partition(": ")[2].upper()))
        assert support.source
    eager = [supports_of(asked("eager"), [Gain(part, "", 0.1)])[0].key for part in kept]
    assert eager == ["host.launch_ns", "host.sync_ns"]


@pytest.mark.parametrize("how", ["graphs", "eager"])
@pytest.mark.parametrize("factor", [BETTER, 1 / BETTER])
def test_every_number_that_is_listed_changes_the_time_per_token(
    how: Runtime, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a policy that copies, computes on both sides and decides; of parts that gain nothing none would be listed."""
    base = tpot_ms(asked(how), "dali")
    for part in EVERY_PART:
        if part.part.endswith("compute"):
            continue  # one token's products wait for bytes: their gain is none
        for support in supports_of(asked(how), [part]):
            one = asked(how)
            runtime_number = support.key.removeprefix("graphs: ").upper()
            with monkeypatch.context() as patched:
                if support.key.startswith("graphs: "):
                    patched.setattr(runtimes, runtime_number, round(support.value * factor))
                    changed = one.on(one.setting.hardware)
                else:
                    changed = one.on(with_numbers(one.setting.hardware, {support.key: support.value * factor}))
                assert tpot_ms(changed, "dali") != base, support.key


def test_the_weakest_come_first_and_only_where_their_part_matters() -> None:
    found: Fit = fit(Question(**OFFLOADED, policies=("ktransformers",)))
    doubt = {"high": 0.1, "medium": 0.5, "low": 1.0}
    weights = [support.gain * doubt[support.confidence] for support in found.supports]
    assert weights == sorted(weights, reverse=True)
    assert all(support.gain >= 0.02 for support in found.supports)
