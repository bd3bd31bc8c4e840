"""Capture on tiny random models of many families: what is recorded is what the experts were called with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from traces.capture import CaptureSettings, capture_loaded  # noqa: E402
from traces.capture_prompts import read_prompts  # noqa: E402
from traces.capture_settings import CaptureError  # noqa: E402
from traces.hf_forecast import Forecaster  # noqa: E402
from traces.hf_layers import find_moe_layers  # noqa: E402
from traces.hf_load import Loaded  # noqa: E402
from traces.hf_record import Recorder  # noqa: E402
from traces.hf_scores import scoring_rule  # noqa: E402
from traces.trace_file import read_trace  # noqa: E402

LAYERS, EXPERTS, HIDDEN, WIDTH, VOCAB = 4, 8, 32, 48, 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = {"intermediate_size": 40, "moe_intermediate_size": WIDTH, "num_experts_per_tok": 2}
LOCAL = {"intermediate_size": WIDTH, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
ROUTED = {**SMALL, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1}
GROUPS = {"n_group": 2, "topk_group": 1}
MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}

# family -> (settings, MoE layers, shared experts, scoring rule)
FAMILIES: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "mixtral": (LOCAL, 4, 0, "softmax"),
    "qwen2_moe": (
        {**SMALL, "num_experts": EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]},
        3,
        1,
        "softmax",
    ),
    "qwen3_moe": ({**SMALL, "num_experts": EXPERTS, "head_dim": 8, "mlp_only_layers": [0]}, 3, 0, "softmax"),
    "deepseek_v2": ({**ROUTED, **MLA, **GROUPS, "topk_method": "group_limited_greedy"}, 3, 1, "softmax"),
    "deepseek_v3": ({**ROUTED, **MLA, **GROUPS}, 3, 1, "sigmoid"),
    "olmoe": ({**LOCAL, "num_experts": EXPERTS}, 4, 0, "softmax"),
    "gpt_oss": ({**LOCAL, "head_dim": 8, "sliding_window": 16}, 4, 0, "softmax"),
    "phimoe": (LOCAL, 4, 0, "softmax"),
    "glm4_moe": ({**ROUTED, "head_dim": 8, **GROUPS}, 3, 1, "sigmoid"),
    "granitemoe": (LOCAL, 4, 0, "softmax"),
    "ernie4_5_moe": (
        {
            **SMALL,
            "moe_num_experts": EXPERTS,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
        },
        3,
        1,
        "softmax",
    ),
    "minimax_m2": ({**LOCAL, "head_dim": 8}, 4, 0, "sigmoid"),
    "hunyuan_v1_moe": ({**LOCAL, "num_experts": EXPERTS, "moe_topk": 2, "head_dim": 8}, 4, 1, "softmax"),
    "gemma4_text": (
        {
            **SMALL,
            "num_experts": EXPERTS,
            "top_k_experts": 2,
            "enable_moe_block": True,
            "head_dim": 8,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "sliding_window": 16,
        },
        4,
        1,  # its dense part runs for every token
        "identity",
    ),
    "jamba": (
        {
            **LOCAL,
            "num_experts": EXPERTS,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
        2,
        0,
        "softmax",
    ),
}
PROMPTS = ["3 4 5 6 7", "8 9 10 11 12", "13 14 15"]
SETTINGS = CaptureSettings(prompt_tokens=5, generated_tokens=3, batch_size=2, forecasts=("gate@1",))


class Numbers:
    """A tokenizer for text that is token numbers."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}


def build(family: str) -> Loaded:
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family][0]})
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.ndim == 2 and ("gate.weight" in name or "router" in name):
                value.normal_(std=0.5)  # spread the routers, which families initialise in many ways
            elif "correction_bias" in name:
                value.uniform_(-0.5, 0.5)  # a bias that changes what is chosen
    return Loaded(family, "random", model, Numbers(), find_moe_layers(model), 32)


def spy(loaded: Loaded) -> list[list[tuple[Any, Any]]]:
    """Replace every experts module's forward by one that notes ids and weights, by layer, before it runs."""
    calls: list[list[tuple[Any, Any]]] = [[] for _ in loaded.layers]
    for notes, layer in zip(calls, loaded.layers, strict=True):
        original = layer.experts.forward

        def noting(hidden: Any, ids: Any, weights: Any, notes: Any = notes, original: Any = original) -> Any:
            notes.append((ids.numpy().copy(), weights.numpy().copy()))
            return original(hidden, ids, weights)

        layer.experts.forward = noting  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trace_holds_what_the_experts_got(family: str, tmp_path: Path) -> None:
    loaded = build(family)
    _, moe_layers, shared, rule = FAMILIES[family]
    calls = spy(loaded)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    trace = read_trace(
        capture_loaded(loaded, read_prompts(tmp_path / "prompts.txt"), tmp_path / "t.safetensors", SETTINGS)
    )

    shape = trace.shape
    assert (shape.moe_layers, shape.dense_layers) == (moe_layers, LAYERS - moe_layers)
    assert (shape.experts, shape.top_k, shape.hidden, shape.expert_width) == (EXPERTS, 2, HIDDEN, WIDTH)
    assert shape.shared_experts == shared
    size = sum(p.nbytes for p in loaded.model.parameters())
    slack = 0.1 if family == "jamba" else 0.01  # norms; Jamba's Mamba layers count as attention layers
    assert shape.routed_bytes + shape.non_expert_bytes == pytest.approx(size, rel=slack)
    assert trace.provenance["scores"].startswith(rule)
    assert len(trace.sequence) == (5 + 3) * 2 + (3 + 3)  # never a pad token
    for layer, notes in enumerate(calls):
        ids, weights = (np.concatenate([note[part] for note in notes[1:]]) for part in (0, 1))  # the first is the probe
        order = np.argsort(-weights.astype(np.float16), axis=1, kind="stable")
        np.testing.assert_array_equal(trace.topk_ids[:, layer], np.take_along_axis(ids, order, 1))
        np.testing.assert_array_equal(
            trace.topk_weights[:, layer], np.take_along_axis(weights, order, 1).astype(np.float16)
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_asked_about_its_own_input_chooses_the_same_again(family: str) -> None:
    loaded = build(family)
    with torch.inference_mode(), Recorder(loaded.layers) as recorder:
        loaded.model(input_ids=torch.arange(3, 19).view(2, 8))
        records = recorder.take()
        rule, _ = scoring_rule(records)
        forecaster = Forecaster(loaded.layers, (), 4, rule)
        for layer, record in zip(loaded.layers, records, strict=True):
            best, values = forecaster.rank(layer, record, record.gate_input)
            assert torch.equal(best[:, :2].sort().values, record.ids.sort().values)
            assert (values[:, :-1] >= values[:, 1:]).all()


def attempt(loaded: Loaded, folder: Path) -> None:
    loaded = replace(loaded, layers=find_moe_layers(loaded.model))
    capture_loaded(loaded, read_prompts(folder / "prompts.txt"), folder / "t.safetensors", SETTINGS)


@pytest.mark.parametrize("family", ["dbrx", "llama4_text", "jetmoe", "qwen2"])
def test_other_models_are_refused_with_one_clear_error(family: str, tmp_path: Path) -> None:
    settings = {
        "dbrx": {
            "d_model": HIDDEN,
            "n_heads": 4,
            "n_layers": 2,
            "vocab_size": VOCAB,
            "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2},
            "ffn_config": {"ffn_hidden_size": WIDTH, "moe_num_experts": EXPERTS, "moe_top_k": 2},
        },
        "llama4_text": {**COMMON, **LOCAL, "head_dim": 8, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 1},
        "jetmoe": {**COMMON, **LOCAL, "kv_channels": 8},
        "qwen2": {**COMMON, "intermediate_size": 40},
    }
    config = transformers.AutoConfig.for_model(family, **settings[family])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    with pytest.raises(CaptureError, match=r"expected|not supported"):
        attempt(Loaded(family, "random", model, Numbers(), [], 32), tmp_path)
    assert not (tmp_path / "t.safetensors").exists()
