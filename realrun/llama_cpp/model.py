"""GGUF models loaded by llama.cpp, contexts that compute tokens with them, and observers of the tensors computed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from ctypes import CDLL, POINTER, c_int8, c_int32, c_void_p, cast, create_string_buffer
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from realrun.errors import RefusedError
from realrun.llama_cpp.abi import BufferOverride, EngineLog, EvalCallback, Handle, TensorHead, llama_library
from trilane.common.units import MIB

DTYPES = {0: np.float32, 1: np.float16, 26: np.int32}  # enum ggml_type


@dataclass(frozen=True)
class GraphTensor:
    """A tensor of the running graph; its values can be read while an observer takes it."""

    library: CDLL
    handle: int

    @property
    def name(self) -> str:
        return str(self.library.ggml_get_name(self.handle).decode())

    def values(self) -> NDArray[Any]:
        """A copy, the slowest dimension first, without leading ones: [tokens, features] where ggml's ``ne`` is
        (features, tokens, 1, 1); of one token [1, features]. Raises RefusedError for quantised types.
        """
        head = self._head
        if head.type not in DTYPES:
            raise RefusedError(f"llama.cpp: expected {self.name} in 32 or 16 bits, found ggml type {head.type}")
        raw = np.empty(self.library.ggml_nbytes(self.handle), np.uint8)
        self.library.ggml_backend_tensor_get(self.handle, raw.ctypes.data, 0, raw.nbytes)
        shape, strides = tuple(head.ne)[::-1], tuple(head.nb)[::-1]
        values = np.ndarray(shape, DTYPES[head.type], raw, strides=strides)  # a view, such as the first k, has gaps
        first = next((axis for axis in range(2) if shape[axis] != 1), 2)
        return np.ascontiguousarray(values[(0,) * first])

    def source(self, number: int) -> GraphTensor:
        """The operand of that number; of a matrix product, 0 is the weights and 1 their input."""
        return GraphTensor(self.library, self._head.src[number])

    @property
    def _head(self) -> TensorHead:
        return cast(self.handle, POINTER(TensorHead)).contents


class Observer(Protocol):
    """Chooses tensors by name, and gets each of them as soon as it is computed."""

    def wants(self, name: str) -> bool: ...

    def take(self, tensor: GraphTensor) -> None: ...


class TensorCallback:
    """An observer as the library calls it. An exception of the observer ends the graph and is raised by ``check``."""

    def __init__(self, library: CDLL, observer: Observer) -> None:
        self._library = library
        self._observer = observer
        self._error: BaseException | None = None
        self.pointer = EvalCallback(self._called)

    def check(self) -> None:
        """Raise what the observer raised since the last check."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _called(self, handle: int, is_question: bool, user_data: Any) -> bool:
        tensor = GraphTensor(self._library, handle)
        try:
            if is_question:
                return self._observer.wants(tensor.name)
            self._observer.take(tensor)
        except BaseException as error:  # must not cross the C code; `check` raises it
            self._error = error
            return False
        return True


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
        """The number of token ids; ids are smaller."""
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
        """Capacity of the KV cache in tokens: that of the constructor, rounded up by the library."""
        return int(self._library.llama_n_ctx(self.handle))

    def use_threads(self, threads: int) -> None:
        """Compute with ``threads`` CPU threads from now on."""
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
        """Logits [vocabulary] after the last token."""
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
        """Make a sequence of the first ``tokens``, in cells of its own; False if the library cannot."""
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
