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


class BufferOverride(Structure):
    """``llama_model_tensor_buft_override``: tensors whose names match a pattern go to a buffer type."""

    _fields_ = (("pattern", c_char_p), ("buffer_type", c_void_p))


class ModelParams(Structure):
    """``llama_model_params``."""

    _fields_ = (
        ("devices", c_void_p),
        ("tensor_buft_overrides", POINTER(BufferOverride)),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    )


class ContextParams(Structure):
    """``llama_context_params``; ``moe_cache_size`` came with llama.cpp's pull request 29887."""

    _fields_ = (
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("n_outputs_max", c_uint32),
        ("n_outputs_max_per_seq", c_uint32),
        ("n_threads", c_int32),
        ("n_threads_batch", c_int32),
        ("ctx_type", c_int32),
        ("rope_scaling_type", c_int32),
        ("pooling_type", c_int32),
        ("attention_type", c_int32),
        ("flash_attn_type", c_int32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
        ("yarn_orig_ctx", c_uint32),
        ("defrag_thold", c_float),
        ("cb_eval", EvalCallback),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("abort_callback", c_void_p),
        ("abort_callback_data", c_void_p),
        ("moe_cache_size", c_size_t),
        ("embeddings", c_bool),
        ("offload_kqv", c_bool),
        ("no_perf", c_bool),
        ("op_offload", c_bool),
        ("swa_full", c_bool),
        ("kv_unified", c_bool),
        ("samplers", c_void_p),
        ("n_samplers", c_size_t),
        ("ctx_other", c_void_p),
    )


class TokenBatch(Structure):
    """``llama_batch``."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", POINTER(c_int8)),
    )


class TensorHead(Structure):
    """The first fields of ``ggml_tensor``: elements and bytes from one to the next, by dimension, the fastest first;
    ``src``: the tensors that it is computed from.
    """

    _fields_ = (
        ("type", c_int32),
        ("buffer", c_void_p),
        ("ne", c_int64 * 4),
        ("nb", c_size_t * 4),
        ("op", c_int32),
        ("op_params", c_int32 * 16),
        ("flags", c_int32),
        ("src", c_void_p * 10),
    )


# What a default structure holds: a build that differs in one of them has another layout.
MODEL_DEFAULTS: dict[str, Any] = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1,
                                  "use_extra_bufts": True}  # fmt: skip
CONTEXT_DEFAULTS: dict[str, Any] = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "rope_scaling_type": -1, "flash_attn_type": -1,
    "yarn_ext_factor": -1.0, "yarn_orig_ctx": 0, "type_k": 1, "type_v": 1, "moe_cache_size": 0, "offload_kqv": True,
    "op_offload": True, "kv_unified": False, "n_samplers": 0,
}  # fmt: skip
