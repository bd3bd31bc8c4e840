"""Pre-gated MoE: what the gate of a layer has chosen for the next one is copied ahead, and never in vain."""

from __future__ import annotations

from policies.protocols import PolicyKind
from policies.registry import system
from sim.runs.prepare import prepare
from sim.runs.scenario import Scenario
from sim.simulate import play

SCENARIO = Scenario(prompt_tokens=8, generated_tokens=4)


def test_copies_ahead_are_all_of_use_and_save_time() -> None:
    ahead = play(prepare(SCENARIO.with_(policy="pre-gated"))).metrics
    without = play(prepare(SCENARIO.with_(policy="on-demand", parameters={"cache": "none"}))).metrics
    assert (ahead.prefetch_accuracy, ahead.prefetches_wasted) == (1.0, 0)
    assert ahead.prefetches_used + ahead.prefetches_late > 0
    assert ahead.tpot_ms < without.tpot_ms


def test_it_is_marked_as_clairvoyant() -> None:
    assert system("pre-gated").needs.kind == PolicyKind.CLAIRVOYANT
