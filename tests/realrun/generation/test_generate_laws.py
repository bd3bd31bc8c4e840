"""What a generation leaves: spans that obey the laws, a log and a trace that agree with the simulator (law 10)."""

from __future__ import annotations

from dataclasses import replace as with_fields
from pathlib import Path

import numpy as np
import pytest

from policies.registry import SYSTEMS
from realrun.execution.call_log import LoggedSession, replay
from realrun.generation.generate import Generated, generate_hosted
from realrun.machine.host_lanes import HostLanes
from sim.runs.prepare import Prepared, prepare
from sim.runs.scenario import Scenario
from sim.simulate import play
from tests.kit.depth import thinned
from tests.kit.generating import MINI, MINI_VECTORS, PROMPTS, every_slot, hosted, request
from tests.kit.spoilt import routings_of
from traces.capture.capture import CaptureSettings, capture_loaded
from traces.capture.load import load
from traces.capture.prompts import read_prompts
from traces.file import read_trace
from traces.layout import ForecastKey
from traces.trace import Trace
from trilane.study.validation.parity import answers_of, plans_changed
from trilane.testing.accounting import law_12_accounting
from trilane.testing.laws import law_1_conservation, law_2_causality, law_3_exclusivity, law_4_capacity

LIVE = [name for name, entry in SYSTEMS.items() if entry.needs.live]


def made(policy: str, trace: Path, lanes: HostLanes) -> Generated:
    """A run of two sequences with a quarter of the experts cached, and its trace."""
    model = hosted("mini-moe")
    asked = request(
        policy, every_slot(model) // 4, calibration="mini-moe-calibration", vectors=MINI_VECTORS, trace=trace
    )
    return generate_hosted(model, asked, lanes)


def as_scenario(run: Generated) -> Prepared:
    """The scenario that a run says it was, about to be simulated on the trace that it left."""
    return prepare(Scenario.from_dict(dict(run.run.scenario)))


@thinned(5)
@pytest.mark.parametrize("policy", LIVE)
def test_its_spans_obey_the_laws_and_its_log_can_be_replayed(
    policy: str, tmp_path: Path, inline_lanes: HostLanes
) -> None:
    generated = made(policy, tmp_path / "trace.safetensors", inline_lanes)
    run = generated.run
    law_2_causality(run.spans)
    law_3_exclusivity(run.spans)
    law_4_capacity(run.spans, run.memory["cache_bytes"] + run.memory["staging_bytes"])
    law_12_accounting(run.spans, batch=2)
    if not SYSTEMS[policy].needs.changes_routing:
        law_1_conservation(run.spans, routings_of(as_scenario(generated).demand))
    assert replay(generated.session.log, as_scenario(generated).session()) is None  # law 10, the same answers
    simulated = as_scenario(generated).session_of(LoggedSession)
    play(as_scenario(generated), simulated)
    changed = plans_changed(answers_of(generated.session), answers_of(simulated))
    ahead = {"prefetch", "swap"} & set(run.spans.kind)
    assert changed == 0 or ahead  # law 10, the same plans where nothing depends on when a copy arrives
    if not ahead:
        assert generated.session.plans() == simulated.plans()
        assert generated.session.copies() == simulated.copies()


def test_the_trace_is_that_of_the_models_own_routers(tmp_path: Path, inline_lanes: HostLanes) -> None:
    kept, none = (made(name, tmp_path / name, inline_lanes).trace for name in ("naive-cpu", "on-demand"))
    assert (kept.topk_ids == none.topk_ids).all()
    assert (kept.topk_weights == none.topk_weights).all()
    assert kept.scores is not None
    assert not kept.forecasts
    assert {str(key) for key in made("hybrimoe", tmp_path / "hybrimoe", inline_lanes).trace.forecasts} == {
        "gate@1", "gate@2", "gate@3"
    }


class Numbers:
    """A tokenizer for text that is token numbers."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def captured_beside(folder: Path) -> Trace:
    """What capture makes of the bundled model and the prompts."""
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(" ".join(map(str, prompt)) for prompt in PROMPTS))
    settings = CaptureSettings(
        prompt_tokens=8, generated_tokens=3, temperature=0, forecasts=("gate@1", "gate@2", "gate@3", "quasi_hidden@1")
    )
    loaded = with_fields(load(MINI, "float32"), tokenizer=Numbers())
    capture_loaded(loaded, read_prompts(prompts), folder / "captured", settings, vectors=MINI_VECTORS)
    return read_trace(folder / "captured")


@pytest.mark.parametrize("policy", ["best-exact", "hybrimoe"])
def test_routing_and_forecasts_are_those_that_capture_sees(
    policy: str, tmp_path: Path, inline_lanes: HostLanes
) -> None:
    generated = made(policy, tmp_path / "trace.safetensors", inline_lanes)
    captured = captured_beside(tmp_path)
    for key, forecast in generated.trace.forecasts.items():
        assert (forecast.ids == captured.forecasts[key].ids).all(), key
    assert (generated.trace.topk_ids == captured.topk_ids).all()


def test_a_partial_forecast_is_the_truth_where_all_experts_are_on_the_gpu(inline_lanes: HostLanes) -> None:
    model = hosted("mini-moe")
    trace = generate_hosted(model, request("smoe", every_slot(model)), inline_lanes).trace
    top_k = model.shape.top_k
    forecast = trace.forecasts[ForecastKey("partial", 1)].ids[:, :-1, :top_k]
    assert (np.sort(forecast) == np.sort(trace.topk_ids[:, 1:])).all()
