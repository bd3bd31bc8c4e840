"""C structures of llama.cpp as its builds from b11480 on lay them out (``llama.h``, ``ggml.h``)."""

from __future__ import annotations

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_float,
    c_int8,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_void_p,
)
from typing import Any

LogCallback = CFUNCTYPE(None, c_int32, c_char_p, c_void_p)  # level, text, user data
EvalCallback = CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)  # tensor, whether it is asked for, user data


def _fields(*declared: tuple[Any, ...]) -> tuple[tuple[str, Any], ...]:
    """Of declarations as in C: a type, and the names that follow one another in it."""
    return tuple((name, kind) for kind, *names in declared for name in names)


class BufferOverride(Structure):
    """``llama_model_tensor_buft_override``: tensors whose names match a pattern go to a buffer type."""

    _fields_ = _fields((c_char_p, "pattern"), (c_void_p, "buffer_type"))


class ModelParams(Structure):
    """``llama_model_params``."""

    _fields_ = _fields(
        (c_void_p, "devices"),
        (POINTER(BufferOverride), "tensor_buft_overrides"),
        (c_int32, "n_gpu_layers", "split_mode", "load_mode", "lazy_mode", "main_gpu"),
        (c_void_p, "tensor_split", "progress_callback", "progress_callback_user_data", "kv_overrides"),
        (c_bool, "vocab_only", "check_tensors", "use_extra_bufts", "no_host", "no_alloc", "load_mtp"),
    )


class ContextParams(Structure):
    """``llama_context_params``; ``moe_cache_size`` came with llama.cpp's pull request 29887."""

    _fields_ = _fields(
        (c_uint32, "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq"),
        (c_int32, "n_threads", "n_threads_batch"),
        (c_int32, "ctx_type", "rope_scaling_type", "pooling_type", "attention_type", "flash_attn_type"),
        (c_float, "rope_freq_base", "rope_freq_scale"),
        (c_float, "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"),
        (c_uint32, "yarn_orig_ctx"),
        (c_float, "defrag_thold"),
        (EvalCallback, "cb_eval"),
        (c_void_p, "cb_eval_user_data"),
        (c_int32, "type_k", "type_v"),
        (c_void_p, "abort_callback", "abort_callback_data"),
        (c_size_t, "moe_cache_size"),
        (c_bool, "embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full", "kv_unified"),
        (c_void_p, "samplers"),
        (c_size_t, "n_samplers"),
        (c_void_p, "ctx_other"),
    )


class TokenBatch(Structure):
    """``llama_batch``."""

    _fields_ = _fields(
        (c_int32, "n_tokens"),
        (POINTER(c_int32), "token"),
        (c_void_p, "embd", "pos", "n_seq_id", "seq_id"),
        (POINTER(c_int8), "logits"),
    )


class TensorHead(Structure):
    """The first fields of ``ggml_tensor``: elements and bytes from one to the next, by dimension, the fastest first;
    ``src``: the tensors that it is computed from.
    """

    _fields_ = _fields(
        (c_int32, "type"),
        (c_void_p, "buffer"),
        (c_int64 * 4, "ne"),
        (c_size_t * 4, "nb"),
        (c_int32, "op"),
        (c_int32 * 16, "op_params"),
        (c_int32, "flags"),
        (c_void_p * 10, "src"),
    )


# What a default structure holds: a build that differs in one of them has another layout.
MODEL_DEFAULTS: dict[str, Any] = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1,
                                  "use_extra_bufts": True}
CONTEXT_DEFAULTS: dict[str, Any] = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "rope_scaling_type": -1, "flash_attn_type": -1,
    "yarn_ext_factor": -1.0, "yarn_orig_ctx": 0, "type_k": 1, "type_v": 1, "moe_cache_size": 0, "offload_kqv": True,
    "op_offload": True, "kv_unified": False, "n_samplers": 0,
}
