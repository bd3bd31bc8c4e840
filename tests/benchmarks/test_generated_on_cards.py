"""Generations on two GPUs of host lanes have the tokens of the unmodified model and the counts of the simulator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.generated_on_cards import CALIBRATION, POLICIES, SHARE, compared, difference, hosted, true_tokens
from realrun.machine.host_lanes import HostLanes
from sim.runs.scenario import Scenario


@pytest.fixture(scope="module")
def lanes() -> Iterator[HostLanes]:
    made = HostLanes(inline=True)
    yield made
    made.close()


@pytest.mark.parametrize("gpus", [1, 2])
def test_tokens_and_counts_agree_and_times_are_compared(lanes: HostLanes, gpus: int) -> None:
    model, tokens = hosted(lanes), true_tokens(2)
    for policy in POLICIES:
        scenario = Scenario(policy=policy, calibration=CALIBRATION, cached_share=SHARE, gpus=gpus)
        found = compared(model, scenario, tokens, lanes)
        assert found.what == ""
        assert len(found.runs) == 1
        assert (found.runs[0].spans.kind == "hand_over").sum() == 2 * 3 * (gpus - 1)
        assert found.predicted.metrics.tpot_ms is not None


def test_other_tokens_and_counts_are_said(lanes: HostLanes) -> None:
    model, tokens = hosted(lanes), true_tokens(2)
    scenario = Scenario(policy="fiddler", calibration=CALIBRATION, cached_share=SHARE, gpus=2)
    assert compared(model, scenario, [0, *tokens[1:]], lanes).what.startswith("expected the tokens [0, ")
    found = compared(model, scenario, tokens, lanes)
    spans = found.predicted.spans
    fewer = replace(found.predicted, spans=spans[spans.kind != "hand_over"])
    assert difference(found.runs[0], fewer).endswith("generated, simulated: ('d2h', 'hand_over', 0, 3, 1, 0)")
