"""The C library of llama.cpp through ctypes: of the package xllamacpp, or another build of the same source."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from ctypes import CDLL, POINTER, Structure, c_bool, c_char_p, c_float, c_int32, c_size_t, c_ubyte, c_void_p, sizeof
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Self

from realrun.errors import RefusedError
from realrun.llama_cpp.structs import (
    CONTEXT_DEFAULTS,
    MODEL_DEFAULTS,
    ContextParams,
    LogCallback,
    ModelParams,
    TokenBatch,
)

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
    """Collects the log of the library from its creation on; a later one takes over."""

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
    """Something that the library holds in memory; a context manager, with whose block it ends."""

    def __init__(self, handle: int, free: Callable[[int], None]) -> None:
        self.handle, self._free = handle, free

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._free(self.handle)


@cache
def llama_library() -> CDLL:
    """The library, with its functions' types set and its structures checked.

    Raises RefusedError where there is none, or one that lays its structures out in another way.
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
    found = kind.from_buffer_copy(room)
    other = [name for name, value in defaults.items() if getattr(found, name) != value]
    padding = sizeof(kind) - len(written)
    if other or not 0 <= padding < 8:
        what = f"{other[0]} = {getattr(found, other[0])!r}" if other else f"{len(written)} bytes"
        raise RefusedError(
            f"llama.cpp: expected the structures of {KNOWN_PACKAGE}, found others ({kind.__name__}: {what}); "
            f"install that version: pip install '{KNOWN_PACKAGE.replace(' ', '==')}', or name a library of its source "
            f"in {VARIABLE}"
        )


def has_library() -> bool:
    """Whether a library is named, or the package that brings one is installed."""
    return bool(os.environ.get(VARIABLE) or find_spec("xllamacpp"))


def library_version() -> dict[str, str]:
    """What ``llama_library`` is, for provenance: the package's version; another build does not tell its own."""
    return {"llama.cpp": OWN_BUILD} if os.environ.get(VARIABLE) else {"xllamacpp": version("xllamacpp")}


def gpu_name() -> str:
    """What llama.cpp calls the first GPU that it can use. Raises RefusedError without one."""
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
