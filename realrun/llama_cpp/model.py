"""A GGUF file loaded by llama.cpp: its sizes and its vocabulary."""

from __future__ import annotations

import os
from ctypes import c_int32, c_void_p, cast, create_string_buffer
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realrun.errors import RefusedError
from realrun.llama_cpp.library import EngineLog, Handle, llama_library
from realrun.llama_cpp.structs import BufferOverride

LOAD_MODES = {True: 1, False: 0}  # enum llama_load_mode: MMAP, NONE
NO_VOCABULARY, SENTENCE_PIECE = 0, 1  # enum llama_vocab_type
BYTE = 1 << 5  # LLAMA_TOKEN_ATTR_BYTE
EXPERTS_OF_LAYER = r"blk\.{}\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # as --n-cpu-moe matches them (common/common.h)


class LlamaModel(Handle):
    """A model in memory.

    ``gpu_layers``: layers whose weights go to the GPU, -1 for all; with 0 none is used, not even for long prompts
    (``--device none``); ``cpu_expert_layers``: of how many layers the experts stay with the CPU all the same
    (``--n-cpu-moe``); ``mmap``: pages of the file, or memory of its own; ``repack``: whether weights may be laid out
    anew for the CPU's kernels, as llama.cpp does by default.
    Raises RefusedError with the library's reason if the file cannot be loaded.
    """

    def __init__(
        self, path: Path, *, gpu_layers: int = 0, cpu_expert_layers: int = 0, mmap: bool = True, repack: bool = True
    ) -> None:
        self.path = path
        self.library = llama_library()
        self.log = EngineLog(self.library)
        if gpu_layers and not self.library.llama_supports_gpu_offload():
            raise RefusedError("expected a llama.cpp that knows a GPU, this one computes on the CPU alone")
        params = self.library.llama_model_default_params()
        params.n_gpu_layers, params.load_mode, params.use_extra_bufts = gpu_layers, LOAD_MODES[mmap], repack
        self._devices = None if gpu_layers else (c_void_p * 1)(None)
        params.devices = None if self._devices is None else cast(self._devices, c_void_p)
        self._overrides = self._on_cpu(cpu_expert_layers)
        params.tensor_buft_overrides = self._overrides
        handle = self.library.llama_model_load_from_file(os.fsencode(path), params)
        if not handle:
            raise RefusedError(f"{path}: expected a GGUF file that llama.cpp loads: {self.log.complaint()}")
        super().__init__(handle, self.library.llama_model_free)

    @property
    def vocabulary(self) -> int:
        """Token ids that the model knows; they are below it."""
        return int(self.library.llama_vocab_n_tokens(self._vocab))

    def metadata(self, key: str) -> str | None:
        """The value of a key of the file, as text; None if it is not there."""
        size = self.library.llama_model_meta_val_str(self.handle, key.encode(), None, 0)
        if size < 0:
            return None
        room = create_string_buffer(size + 1)
        self.library.llama_model_meta_val_str(self.handle, key.encode(), room, size + 1)
        return room.value.decode("utf-8", errors="replace")

    def tokens_of(self, text: str) -> NDArray[np.int32]:
        """The token ids of a text, with those that the model puts at the start. Raises RefusedError without them."""
        kind = int(self.library.llama_vocab_type(self._vocab))
        if kind == NO_VOCABULARY:
            raise RefusedError(f"{self.path}: expected a vocabulary, the file has none; give prompts as token ids")
        if kind == SENTENCE_PIECE and self._byte_tokens < 256:
            raise RefusedError(f"{self.path}: expected a token for each of 256 bytes, found {self._byte_tokens}")
        raw = text.encode()
        room = (c_int32 * (4 * len(raw) + 8))()  # a space may become three bytes, and each of them a token
        count = self.library.llama_tokenize(self._vocab, raw, len(raw), room, len(room), True, True)
        if count < 0:
            raise RefusedError(f"{self.path}: expected at most {len(room)} tokens of a prompt, found {-count}")
        return np.array(room[:count], np.int32)

    @property
    def _vocab(self) -> int:
        return int(self.library.llama_model_get_vocab(self.handle))

    @cached_property
    def _byte_tokens(self) -> int:
        """Without one for each byte, llama.cpp ends the process at a character that the vocabulary lacks."""
        attributes = (self.library.llama_vocab_get_attr(self._vocab, token) for token in range(self.vocabulary))
        return sum(bool(attribute & BYTE) for attribute in attributes)

    def _on_cpu(self, layers: int) -> Any:
        """Overrides that keep the experts of the first layers with the CPU, ended by an empty one."""
        cpu = self.library.ggml_backend_cpu_buffer_type()
        entries = [BufferOverride(EXPERTS_OF_LAYER.format(layer).encode(), cpu) for layer in range(layers)]
        return (BufferOverride * (layers + 1))(*entries) if entries else None
