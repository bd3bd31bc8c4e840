"""llama.cpp's C library through ctypes: its structures, the types of its functions, and checks of both.

All that depends on a build of llama.cpp is in this file. Structures are laid out as in builds from b11480 on
(``llama.h``, ``ggml.h``). The library is that of the package xllamacpp, which brings no programs, or another build of
the same source.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from ctypes import (
    CDLL,
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
    c_ubyte,
    c_uint32,
    c_void_p,
    sizeof,
)
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Self

from realrun.errors import RefusedError

LogCallback = CFUNCTYPE(None, c_int32, c_char_p, c_void_p)  # level, text, user data
EvalCallback = CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)  # tensor, whether it is asked for, user data


def _fields(*declared: tuple[Any, ...]) -> tuple[tuple[str, Any], ...]:
    """ctypes fields from declarations as in C, each a type with the names that have it."""
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


# Values in a default structure: a build that differs in one of them has another layout.
MODEL_DEFAULTS: dict[str, Any] = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1,
                                  "use_extra_bufts": True}
CONTEXT_DEFAULTS: dict[str, Any] = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "rope_scaling_type": -1, "flash_attn_type": -1,
    "yarn_ext_factor": -1.0, "yarn_orig_ctx": 0, "type_k": 1, "type_v": 1, "moe_cache_size": 0, "offload_kqv": True,
    "op_offload": True, "kv_unified": False, "n_samplers": 0,
}


KNOWN_PACKAGE = "xllamacpp 2026.10.11549"
OWN_BUILD = f"own build, with the structures of {KNOWN_PACKAGE}"
VARIABLE = "LLAMA_LIBRARY"  # the path of a libllama.so, such as one built for a GPU (examples/build_llama.sh)
GPU = 1  # enum ggml_backend_dev_type
INSTALL = "in the folder of Trilane: `.venv/bin/pip install -c constraints.txt -e '.[llama]'`"
LONGEST_QUOTE = 300
RESULT_IS_FIRST_ARGUMENT = ("x86_64", "AMD64")  # of functions that return a structure, by the calling convention
ROOM_BYTES = 1024  # more than any structure of parameters

_SIGNATURES: tuple[tuple[Any, tuple[Any, ...], tuple[str, ...]], ...] = (  # result, arguments, functions
    (None, (), ("llama_backend_init",)),
    (None, (LogCallback, c_void_p), ("llama_log_set",)),
    (c_bool, (), ("llama_supports_gpu_offload",)),
    (ModelParams, (), ("llama_model_default_params",)),
    (ContextParams, (), ("llama_context_default_params",)),
    (c_void_p, (c_char_p, ModelParams), ("llama_model_load_from_file",)),
    (c_void_p, (c_void_p, ContextParams), ("llama_init_from_model",)),
    (None, (c_void_p,), ("llama_model_free", "llama_free", "llama_synchronize")),
    (c_void_p, (c_void_p,), ("llama_model_get_vocab", "llama_get_memory")),
    (c_int32, (c_void_p,), ("llama_vocab_type", "llama_vocab_n_tokens", "llama_n_ctx")),
    (c_int32, (c_void_p, c_char_p, c_char_p, c_size_t), ("llama_model_meta_val_str",)),
    (c_int32, (c_void_p, c_int32), ("llama_vocab_get_attr",)),
    (c_int32, (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool), ("llama_tokenize",)),
    (None, (c_void_p, c_int32, c_int32), ("llama_set_n_threads",)),
    (TokenBatch, (POINTER(c_int32), c_int32), ("llama_batch_get_one",)),
    (c_int32, (c_void_p, TokenBatch), ("llama_decode",)),
    (POINTER(c_float), (c_void_p, c_int32), ("llama_get_logits_ith",)),
    (None, (c_void_p, c_bool), ("llama_memory_clear",)),
    (c_bool, (c_void_p, c_int32, c_int32, c_int32), ("llama_memory_seq_rm",)),
    (None, (c_void_p, c_int32, c_int32, c_int32, c_int32), ("llama_memory_seq_add", "llama_memory_seq_cp")),
    (c_bool, (c_void_p,), ("llama_memory_can_shift",)),
    (c_size_t, (c_void_p, c_int32), ("llama_state_seq_get_size",)),
    (c_size_t, (c_void_p, c_void_p, c_size_t, c_int32), ("llama_state_seq_get_data", "llama_state_seq_set_data")),
    (c_char_p, (c_void_p,), ("ggml_get_name", "ggml_backend_dev_description")),
    (c_size_t, (c_void_p,), ("ggml_nbytes",)),
    (None, (c_void_p, c_void_p, c_size_t, c_size_t), ("ggml_backend_tensor_get",)),
    (c_void_p, (), ("ggml_backend_cpu_buffer_type",)),
    (c_void_p, (c_int32,), ("ggml_backend_dev_by_type",)),
)
_callbacks: dict[str, object] = {}  # the one that the library calls, kept alive although its log may be gone


class EngineLog:
    """The library's log from the creation of this object on, until another one is created."""

    def __init__(self, library: CDLL) -> None:
        self._pieces: list[str] = []
        callback = LogCallback(self._take)
        library.llama_log_set(callback, None)
        _callbacks["set"] = callback

    def _take(self, level: int, text: bytes, user_data: Any) -> None:
        self._pieces.append(text.decode("utf-8", errors="replace"))

    @property
    def lines(self) -> list[str]:
        """All lines so far, oldest first."""
        return "".join(self._pieces).splitlines()

    def complaint(self, since: int = 0) -> str:
        """The first line, from line ``since`` on, that speaks of an error; shortened."""
        wrong = (line.strip() for line in self.lines[since:] if "error" in line.lower() or "failed" in line.lower())
        return next(wrong, "no reason given")[:LONGEST_QUOTE]


class Handle:
    """An object in the library's memory, freed at the end of the ``with`` block."""

    def __init__(self, handle: int, free: Callable[[int], None]) -> None:
        self.handle, self._free = handle, free

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._free(self.handle)


@cache
def llama_library() -> CDLL:
    """The library, with its functions' types set and its structures checked.

    Raises RefusedError if there is none, or if it lays its structures out in another way.
    """
    path = _library_path()
    try:
        library = CDLL(path)
    except OSError as error:
        raise RefusedError(f"expected a library of llama.cpp that can be loaded: {error}") from None
    for result, arguments, names in _SIGNATURES:
        for name in names:
            if not hasattr(library, name):
                raise RefusedError(f"llama.cpp: expected the function {name} of {KNOWN_PACKAGE}, and it is not there")
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    check_layout(ModelParams, MODEL_DEFAULTS, _written_by(library, "llama_model_default_params"))
    check_layout(ContextParams, CONTEXT_DEFAULTS, _written_by(library, "llama_context_default_params"))
    library.llama_backend_init()
    return library


def check_layout(kind: type[Structure], defaults: Mapping[str, object], written: bytes) -> None:
    """Refuse a build whose default structure, the bytes that it wrote, is not laid out as ``kind``.

    ``written`` ends with the last byte that was written; what follows it in ``kind`` is padding.
    """
    room = written + bytes(max(0, sizeof(kind) - len(written)))
    structure = kind.from_buffer_copy(room)
    other = [name for name, value in defaults.items() if getattr(structure, name) != value]
    padding = sizeof(kind) - len(written)
    if other or not 0 <= padding < 8:
        what = f"{other[0]} = {getattr(structure, other[0])!r}" if other else f"{len(written)} bytes"
        raise RefusedError(
            f"llama.cpp: expected the structures of {KNOWN_PACKAGE}, found others ({kind.__name__}: {what}); "
            f"install that version: pip install '{KNOWN_PACKAGE.replace(' ', '==')}', or name a library of its source "
            f"in {VARIABLE}"
        )


def has_library() -> bool:
    """True if ``LLAMA_LIBRARY`` names a library, or the package xllamacpp is installed."""
    return bool(os.environ.get(VARIABLE) or find_spec("xllamacpp"))


def library_version() -> dict[str, str]:
    """The package and version of ``llama_library``, for provenance; another build does not give its own version."""
    return {"llama.cpp": OWN_BUILD} if os.environ.get(VARIABLE) else {"xllamacpp": version("xllamacpp")}


def gpu_name() -> str:
    """The name of the first GPU that llama.cpp can use. Raises RefusedError if there is none."""
    library = llama_library()
    device = library.ggml_backend_dev_by_type(GPU)
    if not device:
        raise RefusedError(
            f"expected a llama.cpp that finds a GPU, this one ({library._name}) does not; name one that was built for "
            f"CUDA in {VARIABLE} (examples/build_llama.sh)"
        )
    return str(library.ggml_backend_dev_description(device).decode("utf-8", errors="replace"))


def _library_path() -> str:
    if named := os.environ.get(VARIABLE):
        return named
    try:
        import xllamacpp
    except ImportError as error:
        raise RefusedError(
            f"expected the package xllamacpp, which brings llama.cpp, and could not import it ({error}); {INSTALL}"
        ) from None
    return str(xllamacpp.xllamacpp.__file__)


def _written_by(library: CDLL, name: str) -> bytes:
    """The bytes that a function for a default structure writes, found by running it over two different patterns; on
    processors that return structures in another way, those of the structure that is expected.
    """
    if platform.machine() not in RESULT_IS_FIRST_ARGUMENT:
        return bytes(getattr(library, name)())
    rooms = [(c_ubyte * ROOM_BYTES)(*[pattern] * ROOM_BYTES) for pattern in (0xAA, 0x55)]
    function = CDLL(library._name)[name]  # a function object of its own: the result goes where its argument points
    function.restype, function.argtypes = None, (c_void_p,)
    for room in rooms:
        function(room)
    first, second = map(bytes, rooms)
    end = 1 + max(i for i in range(ROOM_BYTES) if first[i] == second[i])
    return first[:end]
