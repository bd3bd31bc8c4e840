"""Law 11: a policy that keeps the routing generates, token for token, what the unmodified model generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from policies.registry import SYSTEMS
from realrun.generation.generate import GenerateRequest, generate, generate_hosted
from realrun.generation.hosted_model import HostedModel, look_at, taken_apart
from realrun.machine.host_lanes import HostLanes
from realrun.machine.pinned import plain
from realrun.smoke.generation_checks import output_of_executor, output_of_library
from sim.runs.scenario import Scenario
from tests.kit.depth import thinned
from tests.kit.flips import following
from tests.kit.generating import (
    CPU,
    MINI,
    MINI_VECTORS,
    PROMPTS,
    Changes,
    assert_says_the_same,
    every_slot,
    expected,
    hosted,
    library,
    request,
)
from tests.kit.tiny_families import FAMILIES, build
from traces.capture.forecasts import calibrate, checked_stream
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
