"""Refusals of a generation before it begins, with what was expected and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from realrun.errors import LaneError, RefusedError
from realrun.generation.generate import GenerateRequest, generate, generate_hosted
from realrun.generation.hosted_model import check_layers, taken_apart
from realrun.machine.host_lanes import HostLanes
from realrun.machine.pinned import plain
from sim.runs.memory import BudgetError
from sim.runs.scenario import Scenario, ScenarioError
from tests.kit.generating import CPU, MINI, MINI_VECTORS, PROMPTS, assert_says_the_same, expected, hosted, request
from tests.kit.tiny_families import build
from traces.capture.layers import find_moe_layers
from traces.capture.load import Loaded


def test_the_future(inline_lanes: HostLanes) -> None:
    with pytest.raises(RefusedError, match=r"'oracle' needs the routing of later layers.*simulate this one"):
        generate_hosted(hosted("mixtral"), request("oracle", 4), inline_lanes)


def test_copies_in_fewer_bits(inline_lanes: HostLanes) -> None:
    with pytest.raises(RefusedError, match=r"'hobbit' needs copies of experts in fewer bits.*simulate it"):
        generate_hosted(hosted("mixtral"), request("hobbit", 4), inline_lanes)


def test_prompts_of_several_lengths(inline_lanes: HostLanes) -> None:
    asked = request("on-demand", 4, prompts=((1, 2, 3), (4, 5)))
    with pytest.raises(RefusedError, match=r"prompts of one length, got \[2, 3\] tokens"):
        generate_hosted(hosted("mixtral"), asked, inline_lanes)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (GenerateRequest("x", ()), "expected prompts and generated_tokens >= 0, got 0 and 32"),
        (GenerateRequest("x", PROMPTS, generated_tokens=-1), "generated_tokens >= 0, got 2 and -1"),
        (GenerateRequest("x", PROMPTS, Scenario(noisy_forecast_recall=(0.5,))), "noisy_forecast_recall is for simul"),
        (GenerateRequest("x", PROMPTS, Scenario(prefill_chunk_tokens=4)), "prefill_chunk_tokens is for simulations"),
        (
            GenerateRequest("x", PROMPTS, Scenario(cached_share=0.5), cache_slots=4),
            "give one of cache_slots, cached_sh",
        ),
    ],
)
def test_requests_that_no_model_can_meet(asked: GenerateRequest, says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        generate(asked)


def test_forecasts_that_need_vectors_without_any(inline_lanes: HostLanes) -> None:
    with pytest.raises(RefusedError, match=r"'dali' needs forecasts of the kind residual.*--vectors FILE"):
        generate_hosted(hosted("mixtral"), request("dali", 4), inline_lanes)


def test_vectors_of_another_model(inline_lanes: HostLanes) -> None:
    with pytest.raises(RefusedError, match="expected vectors of mixtral"):
        generate_hosted(hosted("mixtral"), request("dali", 4, vectors=MINI_VECTORS), inline_lanes)


def test_calibration_on_another_topology(inline_lanes: HostLanes) -> None:
    with pytest.raises(ScenarioError, match="has moe_layers = 8"):
        generate_hosted(hosted("mixtral"), request("fiddler", 4, calibration="mini-moe-calibration"), inline_lanes)


def test_calibration_on_the_prompts_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline_lanes: HostLanes
) -> None:
    """Found when it is known what they are routed to; without that check the run would count."""
    model, seen, trace = hosted("mixtral"), str(tmp_path / "seen.safetensors"), tmp_path / "trace.safetensors"
    generate_hosted(model, request("on-demand", 4, trace=seen), inline_lanes)
    asked = request("fiddler", 4, calibration=seen, trace=trace)
    with pytest.raises(ScenarioError, match=r"has the prompt of sequence 0: a policy would know its future"):
        generate_hosted(model, asked, inline_lanes)
    assert not trace.exists()
    others = tuple(tuple(reversed(tokens)) for tokens in PROMPTS)
    generate_hosted(model, request("fiddler", 4, calibration=seen, prompts=others), inline_lanes)
    monkeypatch.setattr("realrun.generation.generate.check_other_prompts", lambda *_: None)
    assert generate_hosted(model, asked, inline_lanes).run.scenario.calibration == seen


def test_a_forecast_that_the_family_cannot_give(inline_lanes: HostLanes) -> None:
    with pytest.raises(
        RefusedError, match=r"'smoe' cannot run on this model: .*expects the same attention in every la"
    ):
        generate_hosted(hosted("gpt_oss"), request("smoe", 4), inline_lanes)


def test_more_slots_than_experts(inline_lanes: HostLanes) -> None:
    with pytest.raises(ScenarioError, match="cached_share: expected a number from 0 to 1"):
        generate_hosted(hosted("mixtral"), request("on-demand", 33), inline_lanes)


def test_a_gpu_too_small_for_the_rest(inline_lanes: HostLanes) -> None:
    scenario = Scenario(policy="on-demand", gpu_memory_gb=0.002, hardware_overrides={"gpu.reserve_bytes": 1_990_000})
    with pytest.raises(BudgetError, match="below what runs without any cached expert"):
        generate_hosted(hosted("mixtral"), GenerateRequest("x", PROMPTS, scenario), inline_lanes)


def test_what_is_no_model(tmp_path: Path) -> None:
    empty, absent = tmp_path, tmp_path / "none"
    for model, says in ((empty, "expected a causal language model and tokenizer"), (absent, "no such folder")):
        with pytest.raises(RefusedError, match=says):
            generate(GenerateRequest(model, PROMPTS, Scenario(policy="on-demand")))
    with pytest.raises(RefusedError, match="dtype: expected one of auto, float32"):
        generate(GenerateRequest(MINI, PROMPTS, Scenario(policy="on-demand"), dtype="float8"))


def test_a_family_whose_experts_the_library_does_not_dispatch() -> None:
    config = transformers.AutoConfig.for_model(
        "llama4_text", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=16, intermediate_size_mlp=16, num_local_experts=4,
        num_experts_per_tok=1, interleave_moe_layer_step=1, max_position_embeddings=64, pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    loaded = Loaded("llama4", "random", model, None, find_moe_layers(model), 32)
    with pytest.raises(RefusedError, match=r"Llama4TextExperts: expected an experts module of the library's registry"):
        taken_apart(loaded, CPU, plain)


def test_experts_of_several_sizes() -> None:
    layers = [build("mixtral").layers[0], build("mixtral", intermediate_size=16).layers[0]]
    with pytest.raises(RefusedError, match="as many experts of one size in every layer"):
        check_layers(layers)


def test_a_run_that_fails_leaves_no_trace_and_a_model_that_runs(tmp_path: Path, inline_lanes: HostLanes) -> None:
    model, path = hosted("mixtral"), tmp_path / "trace.safetensors"

    def pick(logits: torch.Tensor, _sequences: object, step: int) -> torch.Tensor:
        if step == 1:
            raise KeyboardInterrupt
        return logits.argmax(-1, keepdim=True)

    with pytest.raises(KeyboardInterrupt):
        generate_hosted(model, request("mixtral-offloading", 4, trace=path), inline_lanes, pick)
    assert list(tmp_path.iterdir()) == []
    assert_says_the_same(model, request("mixtral-offloading", 4), inline_lanes, expected("mixtral"))


def test_an_expert_that_cannot_be_computed_stops_the_run_and_its_machine(
    monkeypatch: pytest.MonkeyPatch, inline_lanes: HostLanes
) -> None:
    model, layouts, lanes = hosted("mixtral"), hosted("mixtral").store.layouts, HostLanes(inline=True)
    with monkeypatch.context() as patch:
        patch.setattr(type(layouts[0]), "views", lambda self, buffer: {})
        with pytest.raises((LaneError, KeyError)):
            generate_hosted(model, request("on-demand", 4), lanes)
    with pytest.raises(LaneError, match="run on a new machine"):
        generate_hosted(model, request("on-demand", 4), lanes)
    lanes.close()
    assert_says_the_same(model, request("on-demand", 4), inline_lanes, expected("mixtral"))
