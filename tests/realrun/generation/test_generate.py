"""Law 11: a policy that keeps the routing generates, token for token, what the unmodified model generates; refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from policies.registry import SYSTEMS
from realrun.errors import LaneError, RefusedError
from realrun.generation.generate import GenerateRequest, generate, generate_hosted
from realrun.generation.hosted_model import HostedModel, check_layers, look_at, taken_apart
from realrun.machine.host_lanes import HostLanes
from realrun.machine.pinned import plain
from realrun.smoke.generation_checks import output_of_executor, output_of_library
from sim.runs.memory import BudgetError
from sim.runs.scenario import Scenario, ScenarioError
from tests.kit.depth import thinned
from tests.kit.generating import (
    CPU,
    MINI,
    MINI_VECTORS,
    PROMPTS,
    Changes,
    assert_says_the_same,
    every_slot,
    expected,
    following,
    hosted,
    library,
    request,
)
from tests.kit.tiny_models import FAMILIES, build
from traces.capture.forecasts import calibrate, checked_stream
from traces.capture.layers import find_moe_layers
from traces.capture.load import Loaded
from traces.capture.passes import HookedModel
from traces.capture.prompts import read_prompts
from traces.capture.record import RouterRecorder
from traces.capture.settings import CaptureSettings
from traces.capture.vectors import Vectors, write_vectors
from traces.file import read_trace

PRESERVING = [name for name, entry in SYSTEMS.items() if entry.needs.live and not entry.needs.changes_routing]
SIZES = ("none", "one", "some", "all")
ONLY_TWO = ("phimoe",)  # its sparse mixer has two experts a token


def slots(model: HostedModel, size: str) -> int:
    return {"none": 0, "one": 1, "some": every_slot(model) // 4, "all": every_slot(model)}[size]


# --- every policy at every cache size ---------------------------------------------------------------------------------


@thinned(9)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("policy", PRESERVING)
def test_law_11_on_trained_weights(policy: str, size: str, inline_lanes: HostLanes) -> None:
    model = hosted("mini-moe")
    learnt = {"calibration": "mini-moe-calibration", "vectors": MINI_VECTORS}
    asked = request(policy, slots(model, size), generated=2, **learnt)  # type: ignore[arg-type]
    assert_says_the_same(model, asked, inline_lanes, expected("mini-moe", generated=2))


FOUR: Changes = (("num_experts_per_tok", 4),)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, inline_lanes: HostLanes) -> tuple[Path, Path]:
    """Trace and vectors of a tiny DeepSeek-V3 with 4 experts a token, from a prompt of their own."""
    folder, model, other = tmp_path_factory.mktemp("calibrated"), hosted("deepseek_v3", FOUR), ((9, 8, 7, 6, 5, 4),)
    trace = folder / "calibration.safetensors"
    generate_hosted(model, request("naive-cpu", 0, prompts=other, trace=trace), inline_lanes)
    return trace, write_vectors(_vectors(folder), folder / "vectors.safetensors")


def _vectors(folder: Path) -> Vectors:
    """Residual and default vectors, from a text of their own."""
    prompts = folder / "prompts.txt"
    prompts.write_text("9 8 7 6 5 4 30 31\n50 51 52 53 9 9 1 2\n")
    loaded = build("deepseek_v3", **dict(FOUR))
    with torch.inference_mode(), RouterRecorder(loaded.layers) as recorder:
        run = HookedModel(loaded, CaptureSettings(prompt_tokens=8, generated_tokens=2), recorder)
        with checked_stream(run, run.probe([9, 8, 7, 6]), "quasi_hidden@1") as stream:
            return calibrate(run, stream, read_prompts(prompts))


TRAINED = [name for name in PRESERVING if any(kind == "estimator" for kind, _ in SYSTEMS[name].needs.forecasts)]


@thinned(2)
@pytest.mark.parametrize("policy", [name for name in PRESERVING if name not in TRAINED])
def test_law_11_with_four_experts_a_token(policy: str, calibrated: tuple[Path, Path], inline_lanes: HostLanes) -> None:
    model, (trace, vectors) = hosted("deepseek_v3", FOUR), calibrated
    asked = request(policy, slots(model, "some"), generated=2, calibration=str(trace), vectors=vectors)
    assert_says_the_same(model, asked, inline_lanes, expected("deepseek_v3", FOUR, generated=2))


# --- every family -----------------------------------------------------------------------------------------------------

WITHOUT_PREPARATION = (
    ("naive-cpu", "none"), ("on-demand", "one"), ("mixtral-offloading", "some"), ("hybrimoe", "some"), ("mix", "some"),
    ("llama.cpp", "all"),
)


def changes_of(family: str) -> Changes:
    """Four experts a token, where the family can."""
    names = {"gemma4_text": "top_k_experts", "ernie4_5_moe": "moe_k", "hunyuan_v1_moe": "moe_topk"}
    if family in ONLY_TWO:
        return ()
    return tuple((name, 4) for name in {"num_experts_per_tok", names.get(family, "num_experts_per_tok")})


@thinned(5)
@pytest.mark.parametrize(("policy", "size"), WITHOUT_PREPARATION)
@pytest.mark.parametrize("family", FAMILIES)
def test_law_11_for_every_family(family: str, policy: str, size: str, inline_lanes: HostLanes) -> None:
    changes = changes_of(family)
    model, as_this = hosted(family, changes), expected(family, changes, generated=2)
    assert model.shape.top_k == (2 if family in ONLY_TWO else 4)
    assert_says_the_same(model, request(policy, slots(model, size), generated=2), inline_lanes, as_this)


# --- from a folder to text --------------------------------------------------------------------------------------------

TEXTS = ("The king said to the men of the city", "for (int i = 0; i < n; i++) sum")


def test_a_folder_of_weights_becomes_text_a_run_and_a_trace(tmp_path: Path) -> None:
    asked = GenerateRequest(
        model=MINI, prompts=TEXTS, scenario=Scenario(policy="hybrimoe", cached_share=0.25), prompt_tokens=8,
        generated_tokens=4, dtype="float32", trace=tmp_path / "said.safetensors",
    )
    made = generate(asked)
    tokenizer = hosted("mini-moe").loaded.tokenizer
    prompts = torch.tensor([tokenizer(text)["input_ids"][:8] for text in TEXTS])
    said = output_of_library(library("mini-moe"), prompts, 4)
    assert made.tokens == tuple(map(tuple, said.tokens.tolist()))
    assert made.texts == [tokenizer.decode(row) for row in said.tokens]
    trace = read_trace(tmp_path / "said.safetensors")
    assert trace.checksum == made.trace.checksum == made.run.trace_checksum
    assert [(trace.sequence == s).sum() for s in (0, 1)] == [12, 12]
    assert made.run.metrics.decode_steps == 4
    assert made.run.metrics.ttft_ms is not None
    assert made.run.metrics.tpot_ms is not None
    assert made.run.labels == ("generated on host-lanes",)


def test_a_draw_is_the_same_whatever_the_policy(inline_lanes: HostLanes) -> None:
    model = hosted("mixtral")
    one, other = (
        generate_hosted(model, request(policy, 4, generated=8, temperature=1.0), inline_lanes).tokens
        for policy in ("on-demand", "naive-cpu")
    )
    assert one == other != tuple(map(tuple, expected("mixtral", generated=8).tokens.tolist()))


def test_what_it_computes_with_lies_in_the_store(inline_lanes: HostLanes) -> None:
    """A control: other weights in the store, another output."""
    model = look_at(*taken_apart(build("mixtral"), CPU, plain))
    for expert in range(model.shape.experts):
        model.store.layouts[3].views(model.store.buffer(3, expert))["down_proj"].mul_(1.05)
    said = output_of_executor(model, request("mix", 8), inline_lanes, following(expected("mixtral").tokens))
    assert (said.logits - expected("mixtral").logits).abs().max() > 1e-4


def test_runs_one_after_another_do_not_disturb_each_other(inline_lanes: HostLanes) -> None:
    model = hosted("mixtral")
    for policy, size in (("mixtral-offloading", 6), ("on-demand", 1), ("mixtral-offloading", 6)):
        assert_says_the_same(model, request(policy, size), inline_lanes, expected("mixtral"))


def test_what_ran_before_leaves_nothing_in_the_model(inline_lanes: HostLanes) -> None:
    model = hosted("mixtral")
    experts = [layer.experts for layer in model.loaded.layers]
    before = [dict(vars(module)) for module in experts]
    hooks = [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.loaded.model.modules()]
    implementation = model.loaded.model.config._experts_implementation
    generate_hosted(model, request("smoe", 6), inline_lanes)
    assert [dict(vars(module)) for module in experts] == before
    assert hooks == [
        (len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.loaded.model.modules()
    ]
    assert model.loaded.model.config._experts_implementation == implementation
    with pytest.raises(RuntimeError, match="run the model through the executor"):
        model.loaded.model(torch.tensor(PROMPTS))


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


@pytest.mark.parametrize(("asked", "says"), [
    (GenerateRequest("x", ()), "expected prompts and generated_tokens >= 0, got 0 and 32"),
    (GenerateRequest("x", PROMPTS, generated_tokens=-1), "generated_tokens >= 0, got 2 and -1"),
    (GenerateRequest("x", PROMPTS, Scenario(noisy_forecast_recall=(0.5,))), "noisy_forecast_recall is for simul"),
    (GenerateRequest("x", PROMPTS, Scenario(prefill_chunk_tokens=4)), "prefill_chunk_tokens is for simulations"),
    (GenerateRequest("x", PROMPTS, Scenario(cached_share=0.5), cache_slots=4), "give one of cache_slots, cached_sh"),
])
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
