"""A context of llama.cpp: tokens in, logits out, with a KV cache of a given length."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int8, c_int32, create_string_buffer

import numpy as np
from numpy.typing import NDArray

from realrun.errors import RefusedError
from realrun.llama_cpp.library import Handle
from realrun.llama_cpp.model import LlamaModel
from realrun.llama_cpp.tensor_callback import Observer, TensorCallback
from trilane.common.units import MIB

KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}  # enum ggml_type
_TOKENS, _COPY = 0, 1  # sequences: that of a context, and the one that ``repeat`` needs for a moment
FLASH_ATTENTION = {None: -1, False: 0, True: 1}  # enum llama_flash_attn_type; None: the library decides


class LlamaContext(Handle):
    """One sequence of one model, to be closed before it.

    ``context``: tokens that the KV cache holds; ``piece``: tokens that are computed at once (``-ub``); ``threads``:
    of the CPU, for single tokens and pieces alike; ``kv``: the format of the KV cache; ``expert_cache_mib``: GPU memory
    for a cache of experts (``--moe-cache-mib``); ``repeats``: whether ``repeat`` may be called; ``observer``: takes
    tensors as they are computed.
    Raises RefusedError with the library's reason.
    """

    def __init__(
        self,
        model: LlamaModel,
        *,
        context: int,
        piece: int = 512,
        threads: int = 1,
        kv: str = "f16",
        flash_attention: bool | None = None,
        expert_cache_mib: int = 0,
        repeats: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self.model = model
        self._library = model.library
        self.tokens = 0  # in the KV cache
        self.piece, self.repeats = piece, repeats
        params = self._library.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, piece, piece
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = KV_TYPES[kv]
        params.flash_attn_type = FLASH_ATTENTION[flash_attention]
        params.moe_cache_size = expert_cache_mib * MIB
        params.n_seq_max, params.kv_unified = (2, True) if repeats else (1, False)
        self._callback = None if observer is None else TensorCallback(self._library, observer)
        if self._callback is not None:
            params.cb_eval = self._callback.pointer
        written = len(model.log.lines)
        handle = self._library.llama_init_from_model(model.handle, params)
        if not handle:
            why = model.log.complaint(written)
            raise RefusedError(f"{model.path}: expected a context of {context} tokens, llama.cpp made none: {why}")
        super().__init__(handle, self._library.llama_free)

    @property
    def length(self) -> int:
        """Tokens that the KV cache holds: what was asked for, rounded up by the library."""
        return int(self._library.llama_n_ctx(self.handle))

    def use_threads(self, threads: int) -> None:
        """Compute with so many from now on."""
        self._library.llama_set_n_threads(self.handle, threads, threads)

    def decode(self, tokens: Sequence[int] | NDArray[np.int32], *, every_output: bool = False) -> None:
        """Append tokens, in pieces, and wait until they are computed. Raises RefusedError beyond the length.

        Without ``every_output`` the last layer computes, after its attention, only the last token of each piece.
        """
        self._check_room(len(tokens))
        for start in range(0, len(tokens), self.piece):
            self._decode([int(token) for token in tokens[start : start + self.piece]], every_output)

    def repeat(self, tokens: int) -> None:
        """Append copies of the first ``tokens`` of the KV cache to it, with the positions that follow, for a benchmark
        that needs a full one: nothing is computed but, with the next tokens, the keys' positions.

        Raises RefusedError beyond the length, and for a cache that the library cannot copy or move.
        """
        self._check_room(tokens)
        library, memory = self._library, self._memory
        if not (library.llama_memory_can_shift(memory) and self._copied(tokens)):
            raise RefusedError(f"{self.model.path}: expected a KV cache that can be copied, this model's cannot")
        library.llama_memory_seq_add(memory, _COPY, 0, -1, self.tokens)
        library.llama_memory_seq_cp(memory, _COPY, _TOKENS, -1, -1)
        library.llama_memory_seq_rm(memory, _COPY, -1, -1)
        self.tokens += tokens

    def logits(self) -> NDArray[np.float32]:
        """Those of the last token: [vocabulary]."""
        pointer = self._library.llama_get_logits_ith(self.handle, -1)
        return np.ctypeslib.as_array(pointer, (self.model.vocabulary,)).copy()

    def keep(self, tokens: int) -> None:
        """Forget all but the first tokens. Raises RefusedError for a model whose state cannot be taken back."""
        if tokens == 0:
            self._library.llama_memory_clear(self._memory, True)
        elif not self._library.llama_memory_seq_rm(self._memory, _TOKENS, tokens, -1):
            raise RefusedError(f"{self.model.path}: expected a KV cache that can be cut, this model's state cannot")
        self.tokens = tokens

    @property
    def _memory(self) -> int:
        return int(self._library.llama_get_memory(self.handle))

    def _copied(self, tokens: int) -> bool:
        """Make a sequence of the first ``tokens``, in cells of its own; whether the library can."""
        library, memory = self._library, self._memory
        library.llama_memory_seq_cp(memory, _TOKENS, _COPY, 0, tokens)
        state = create_string_buffer(library.llama_state_seq_get_size(self.handle, _COPY))
        library.llama_state_seq_get_data(self.handle, state, len(state), _COPY)
        library.llama_memory_seq_rm(memory, _COPY, -1, -1)
        return bool(library.llama_state_seq_set_data(self.handle, state, len(state), _COPY))

    def _check_room(self, tokens: int) -> None:
        if self.tokens + tokens > self.length:
            raise RefusedError(f"expected at most {self.length} tokens in the context, found {self.tokens + tokens}")

    def _decode(self, tokens: list[int], every_output: bool) -> None:
        known = self.model.vocabulary
        if unknown := [token for token in tokens if not 0 <= token < known]:
            raise RefusedError(f"{self.model.path}: expected token ids below {known}, found {unknown[0]}")
        ids = (c_int32 * len(tokens))(*tokens)  # kept until they are computed: the batch points to them
        batch = self._library.llama_batch_get_one(ids, len(tokens))
        if every_output:
            batch.logits = (c_int8 * len(tokens))(*[1] * len(tokens))
        status = self._library.llama_decode(self.handle, batch)
        self._library.llama_synchronize(self.handle)
        if self._callback is not None:
            self._callback.check()
        if status != 0:
            raise RefusedError(f"{self.model.path}: llama.cpp could not compute {len(tokens)} tokens (status {status})")
        self.tokens += len(tokens)
