"""Tensors of a running graph, by name: llama.cpp calls back for those that are asked for, once they are computed."""

from __future__ import annotations

from ctypes import CDLL, POINTER, cast
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from realrun.errors import RefusedError
from realrun.llama_cpp.structs import EvalCallback, TensorHead

DTYPES = {0: np.float32, 1: np.float16, 26: np.int32}  # enum ggml_type


class Observer(Protocol):
    """Says which tensors it wants, and takes them as they are computed.

    ``take`` gets the values with the slowest dimension first, that is ggml's ``ne`` reversed without trailing ones:
    [tokens, features], or [tokens, top_k] for ``ffn_moe_topk-L``.
    """

    def wants(self, name: str) -> bool: ...

    def take(self, name: str, values: NDArray[Any]) -> None: ...


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

    def _called(self, tensor: int, asked: bool, user_data: Any) -> bool:
        try:
            name = self._library.ggml_get_name(tensor).decode()
            if asked:
                return self._observer.wants(name)
            self._observer.take(name, tensor_values(self._library, tensor, name))
        except BaseException as error:  # must not cross the C code; `check` raises it
            self._error = error
            return False
        return True


def tensor_values(library: CDLL, tensor: int, name: str) -> NDArray[Any]:
    """A copy of a tensor's values, by its strides if it is a view. Raises RefusedError for quantised types."""
    head = cast(tensor, POINTER(TensorHead)).contents
    if head.type not in DTYPES:
        raise RefusedError(f"llama.cpp: expected {name} in 32 or 16 bits, found ggml type {head.type}")
    raw = np.empty(library.ggml_nbytes(tensor), np.uint8)
    library.ggml_backend_tensor_get(tensor, raw.ctypes.data, 0, raw.nbytes)
    shape, strides = tuple(head.ne)[::-1], tuple(head.nb)[::-1]
    values = np.ndarray(shape, DTYPES[head.type], raw, strides=strides)
    first = next((i for i in range(2) if shape[i] != 1), 2)
    return np.ascontiguousarray(values.reshape(shape) if first == 0 else values[(0,) * first])
