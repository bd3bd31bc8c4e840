"""Models to generate with, made once; what the unmodified ones say; and runs of ours beside them."""

from __future__ import annotations

import gc
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from realrun.generation.generate import GenerateRequest, Pick, tokens_of
from realrun.generation.hosted_model import HostedModel, load_model, look_at, taken_apart
from realrun.machine.host_lanes import HostLanes
from realrun.machine.lanes import Machine
from realrun.machine.pinned import plain
from realrun.smoke.generation_checks import ModelOutput, output_of_executor, output_of_library
from sim.runs.scenario import Scenario
from tests.kit.tiny_models import EXPERTS, Numbers, build, spread
from traces.capture.layers import find_moe_layers
from traces.capture.load import Loaded, load

BUNDLED = Path(__file__).parents[2] / "traces" / "bundled"
MINI = BUNDLED / "mini-moe"
MINI_VECTORS = BUNDLED / "mini-moe-vectors.safetensors"
PROMPTS = ((5, 17, 33, 60, 9, 41, 77, 12), (3, 8, 21, 90, 55, 14, 2, 30))
CPU = torch.device("cpu")

Changes: TypeAlias = tuple[tuple[str, Any], ...]  # to the settings of a tiny family


@lru_cache(maxsize=4)
def hosted(family: str, changes: Changes = (), dtype: torch.dtype = torch.float32) -> HostedModel:
    """A tiny model of a family, or "mini-moe", its experts in a store."""
    if family == "mini-moe":
        loaded, store = load_model(MINI, str(dtype).removeprefix("torch."), CPU, plain)
    else:
        tiny = build(family, **dict(changes))
        tiny.model.to(dtype)
        loaded, store = taken_apart(tiny, CPU, plain)
    gc.freeze()  # a run collects garbage before it begins: not again all that the libraries have made
    return look_at(loaded, store)


@lru_cache(maxsize=4)
def library(family: str, changes: Changes = (), dtype: torch.dtype = torch.float32) -> Any:
    """The model as the library has it. (Copied: what it maps from a file lies at odd addresses.)"""
    if family != "mini-moe":
        return build(family, **dict(changes)).model.to(dtype)
    loaded = load(MINI, str(dtype).removeprefix("torch."))
    return loaded.model._apply(torch.clone)


@lru_cache(maxsize=16)
def expected(
    family: str, changes: Changes = (), prompts: tuple[tuple[int, ...], ...] = PROMPTS, generated: int = 3
) -> ModelOutput:
    """Output of the unmodified model in float32."""
    return output_of_library(library(family, changes), torch.tensor(prompts), generated)


def request(
    policy: str, slots: int | None, *, parameters: Mapping[str, object] | None = None,
    prompts: tuple[tuple[int, ...], ...] = PROMPTS, generated: int = 3, calibration: str | None = None, **more: Any,
) -> GenerateRequest:
    """A run of one policy with so many cache slots."""
    scenario = Scenario(policy=policy, parameters=dict(parameters or {}), calibration=calibration)
    return GenerateRequest(
        model="made already", prompts=prompts, scenario=scenario, generated_tokens=generated, cache_slots=slots, **more
    )


def assert_says_the_same(model: HostedModel, asked: GenerateRequest, lanes: HostLanes, as_this: ModelOutput) -> None:
    """Law 11: the same greedy tokens, logits within 1e-5."""
    said = output_of_executor(model, asked, lanes)
    assert said.tokens.tolist() == as_this.tokens.tolist()
    torch.testing.assert_close(said.logits, as_this.logits, rtol=0, atol=1e-5)


def every_slot(model: HostedModel) -> int:
    """So many slots that all experts fit."""
    return model.shape.moe_layers * model.shape.experts


# --- how often rounding changes the likeliest token -------------------------------------------------------------------

class Flips(NamedTuple):
    """The share of ``compared`` distributions whose likeliest token differs, and the largest difference of a logit."""

    compared: int
    flipped_share: float
    largest_difference: float


def flips(ours: Tensor, theirs: Tensor) -> Flips:
    """Compare logits [steps, B, V] after the same tokens."""
    differ = ours.argmax(-1) != theirs.argmax(-1)
    return Flips(differ.numel(), float(differ.float().mean()), float((ours.float() - theirs.float()).abs().max()))


def flips_against_library(library: Any, model: HostedModel, request: GenerateRequest, machine: Machine) -> Flips:
    """Compare with ``library``, the same model unmodified, in its eager implementation, on the tokens it generates."""
    theirs = output_of_library(library, tokens_of(request, model.loaded.tokenizer), request.generated_tokens)
    return flips(output_of_executor(model, request, machine, following(theirs.tokens)).logits, theirs.logits)


def following(tokens: Tensor) -> Pick:
    """The choice of ``tokens`` [B, steps], whatever the logits are."""
    return lambda logits, _sequences, step: tokens[:, step : step + 1].to(logits.device)


# --- a tiny model of every text family with a mixture of experts that transformers has --------------------------------

TOP_K = 4  # with two, the order in which experts are added up does not matter

# What configs call the same sizes; each family takes the names that it knows.
SIZES: dict[str, Any] = {
    "vocab_size": 96, "unpadded_vocab_size": 96, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 32, "num_hidden_layers": 4, "num_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "head_dim": 8, "swa_head_dim": 8, "global_head_dim": 8, "sliding_window": 16, "sliding_window_size": 16,
    "intermediate_size": 40, "ffn_hidden_size": 40, "moe_intermediate_size": 48, "expert_ffn_hidden_size": 48,
    "dense_intermediate_size": 40, "shared_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    "shared_experts_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
    "num_experts": EXPERTS, "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K, "moe_topk": TOP_K, "moe_k": TOP_K, "top_k_experts": TOP_K,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1, "n_group": 2, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
    "mamba_n_heads": 4, "mamba_num_heads": 4, "mamba_d_head": 16, "mamba_head_dim": 16, "mamba_d_state": 4,
    "mamba_dt_rank": 4, "mamba_chunk_size": 8, "chunk_size": 8, "ssm_state_size": 4, "n_groups": 1,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_head_dim": 8, "linear_num_heads": 4,
    "use_mamba_kernels": False, "enable_moe_block": True, "is_moe": True,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.1,  # 0.006 to 0.02 are for wide models: here experts would change no logit
}

MIXED = ["linear_attention", "full_attention", "linear_attention", "full_attention"]

# What else a family needs to be small, or to have a mixture in most of its layers.
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "dbrx": {
        "d_model": 32, "n_heads": 4, "n_layers": 2,
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K},
    },
    "deepseek_v4": {
        "o_groups": 2, "o_lora_rank": 16, "num_key_value_heads": 1,
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    },
    "dots3_note_text": {
        "head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "flint": {"mlp_only_layers": [0]},
    "granitemoehybrid": {"layer_types": MIXED},
    "jamba": {
        "num_hidden_layers": 6, "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2,
        "attn_layer_offset": 1,
    },
    "kimi_linear": {"layer_types": MIXED},
    "lfm2_moe": {"layer_types": ["full_attention", "conv", "full_attention", "conv"]},
    "longcat_flash": {"zero_expert_num": 4},
    "nemotron_h": {
        "num_hidden_layers": 6,
        "layers_block_type": ["moe", "full_attention", "moe", "linear_attention", "moe", "moe"],
    },
    "phimoe": {"num_experts_per_tok": 2},  # its sparse mixer has two experts a token
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "hc_lowrank": 8, "layer_types": MIXED,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},  # it skips a mixture by an expert of its own
}


# A config with one of these is of a model with experts, or of a part of one.
COUNTS = frozenset({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "ffn_config"})

_EXPERTS = re.compile(r"^class \w*(Experts|MoE|Moe)\w*\(", re.MULTILINE)
_CAUSAL = re.compile(r"^class (\w+ForCausalLM)\(", re.MULTILINE)


@cache
def families() -> dict[str, str]:
    """Model type -> class of every text model with experts that the library has."""
    return {name: found for name in _with_experts() if (found := _causal_class(name))}


def left_out() -> list[str]:
    """Model types with experts that are no text model: parts of multimodal ones, encoder-decoders, vision models."""
    return [name for name in _with_experts() if name not in families()]


def build_family(family: str) -> Loaded:
    """A model of ``family`` with the same weights every time, in float32."""
    torch.manual_seed(5)
    model = getattr(transformers, families()[family])(config_of(family)).float().eval()
    spread(model)
    return Loaded(family, "random", model, Numbers(), find_moe_layers(model), 32)


def config_of(family: str) -> Any:
    """A config of ``family`` with small sizes."""
    cls = CONFIG_MAPPING[family]
    known = {field.name for field in fields(cls)}
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]  # latent attention has no groups of heads
    return cls(**{**sizes, **OWN.get(family, {})})


def _with_experts() -> list[str]:
    """Configs of one model; those with a ``text_config`` hold several, and the text model's is on the list."""
    return [
        name for name in sorted(CONFIG_MAPPING)
        if _EXPERTS.search(_source(name))
        and (known := {field.name for field in fields(CONFIG_MAPPING[name])}) & COUNTS and "text_config" not in known
    ]


def _causal_class(name: str) -> str | None:
    """As the library's table has it, or, where a text model is missing there, as its module has it."""
    own = _CAUSAL.search(_source(name)) if model_type_to_module_name(name) == name else None
    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name) or (own[1] if own else None)


@cache
def _source(name: str) -> str:
    """The modelling code of a model type, not imported: that would take minutes for all."""
    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(name)
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("modeling_*.py")))
